"""Recorded reward outcomes: a resumed run replays them, since a time-out is not reproducible."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from zerogap.errors import UsageError
from zerogap.rl.records import open_to_append, read_steps, to_line
from zerogap.rl.rewards import RewardJob, RewardOutcome, RewardPool, Scoring


class RewardJournal:
    """``rewards.jsonl`` of a run: a line per call, keyed by (phase, step, prompt, sample) and the arguments' digest."""

    def __init__(self, path: Path, from_step: int = 0) -> None:
        """Open the journal, which may not exist yet, and remember the outcomes of ``from_step`` and later.

        Raises:
            UsageError: a line of it is damaged.
        """
        self._outcomes: dict[tuple[str, int, int, int], tuple[str, RewardOutcome]] = {}
        for step, record in read_steps(path):
            if step >= from_step:
                try:
                    outcome = RewardOutcome(
                        record["kind"], float(record["value"]), record["seconds"], record["detail"], replayed=True
                    )
                    key = (record["phase"], step, record["prompt"], record["sample"])
                    self._outcomes[key] = (record["digest"], outcome)
                except (KeyError, TypeError, ValueError):
                    raise UsageError(
                        f"{path}: a line of step {step} is damaged; remove it, and that reward is asked again"
                    ) from None
        self._file = open_to_append(path)

    def recorded(self, job: RewardJob) -> RewardOutcome | None:
        """Return the outcome of exactly this call, or None; another completion under the same key is another call."""
        digest, outcome = self._outcomes.get(job.key, ("", None))
        return outcome if outcome is not None and digest == job.digest() else None

    def record(self, jobs: Sequence[RewardJob], outcomes: Sequence[RewardOutcome]) -> None:
        """Append outcomes and bring them to the disk, so that what a step used is known before the step ends."""
        for job, outcome in zip(jobs, outcomes, strict=True):
            line = {
                "phase": job.phase,
                "step": job.step,
                "prompt": job.prompt_index,
                "sample": job.sample,
                "digest": job.digest(),
                "kind": outcome.kind,
                "value": outcome.value,
                "seconds": round(outcome.seconds, 6),
                "detail": outcome.detail,
            }
            self._file.write(to_line(line))
            self._outcomes[job.key] = (line["digest"], replace(outcome, replayed=True))  # type: ignore[assignment]
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; what could not be written before, as on a full disk, is given up."""
        with contextlib.suppress(OSError):
            self._file.close()


class StepRewards:
    """Rewards of a step's completions, asked for as they come: recorded ones are replayed, others called and recorded.

    A context manager; left before `finish`, nothing is recorded.
    """

    def __init__(self, pool: RewardPool, journal: RewardJournal) -> None:
        self._scoring = Scoring(pool)
        self._journal = journal
        self._jobs: list[RewardJob] = []
        self._known: list[RewardOutcome | None] = []

    def __enter__(self) -> StepRewards:
        return self

    def __exit__(self, *exception: object) -> None:
        self._scoring.__exit__(*exception)

    def submit(self, job: RewardJob) -> None:
        """Ask for a reward."""
        outcome = self._journal.recorded(job)
        self._jobs.append(job)
        self._known.append(outcome)
        if outcome is None:
            self._scoring.submit(job)

    def poll(self) -> None:
        """Let the workers go on, without waiting for them; see `Scoring.poll`."""
        self._scoring.poll()

    def finish(self) -> list[RewardOutcome]:
        """Wait for the rest, record what is new in the order of the keys, and return the outcomes as submitted."""
        new = iter(self._scoring.finish())
        outcomes = [next(new) if known is None else known for known in self._known]
        fresh = [index for index, known in enumerate(self._known) if known is None]
        fresh.sort(key=lambda index: self._jobs[index].key)
        self._journal.record([self._jobs[index] for index in fresh], [outcomes[index] for index in fresh])
        return outcomes


def score(pool: RewardPool, journal: RewardJournal, jobs: Sequence[RewardJob]) -> list[RewardOutcome]:
    """Return the outcomes of ``jobs``: those in the journal are replayed, the others called and recorded."""
    with StepRewards(pool, journal) as rewards:
        for job in jobs:
            rewards.submit(job)
        return rewards.finish()
