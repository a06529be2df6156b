"""Rewards, called in worker processes: one that raises, hangs, dies or returns no finite number is a counted event.

A reward function is ``reward(prompt, completion, answer, **fields) -> float``. ``prompt`` is the text or the list of
chat messages, ``completion`` the generated text, ``answer`` the task's answer, and ``fields`` what else the task's data
has; a function without ``**fields`` receives only those that it names.
"""

from __future__ import annotations

import hashlib
import json
import selectors
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from zerogap.errors import UsageError
from zerogap.rl.reward_process import START_LIMIT_S, Worker

Kind = Literal["ok", "raised", "timed_out", "not_finite", "died"]
EVENT_KINDS: tuple[Kind, ...] = ("raised", "timed_out", "not_finite", "died")


@dataclass(frozen=True)
class RewardJob:
    """One completion to judge.

    Attributes:
        phase: ``train`` or ``eval``.
        step, prompt_index, sample: which completion it is.
        prompt: text, or chat messages.
        completion: the generated text.
        answer: what the task says is right; any JSON value.
        fields: further JSON values of the task.
    """

    phase: Literal["train", "eval"]
    step: int
    prompt_index: int
    sample: int
    prompt: str | Sequence[Mapping[str, str]]
    completion: str
    answer: Any
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int, int, int]:
        """Which completion of the run this is."""
        return self.phase, self.step, self.prompt_index, self.sample

    def arguments(self) -> str:
        """Return the arguments of the call as one line of JSON."""
        prompt = self.prompt if isinstance(self.prompt, str) else [dict(message) for message in self.prompt]
        return json.dumps(
            {"prompt": prompt, "completion": self.completion, "answer": self.answer, "fields": dict(self.fields)}
        )

    def digest(self) -> str:
        """Return a hex digest of the arguments: equal digest, same question and completion."""
        return hashlib.blake2b(self.arguments().encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class RewardOutcome:
    """What a call gave.

    Attributes:
        kind: ``ok``, or what went wrong.
        value: the reward; ``reward.on_error`` unless ``kind`` is ``ok``.
        seconds: duration of the call.
        detail: one line on what went wrong.
        replayed: True if it was read from the journal and the function was not called.
    """

    kind: Kind
    value: float
    seconds: float
    detail: str = ""
    replayed: bool = False


def event_counts(outcomes: Sequence[RewardOutcome]) -> dict[str, int]:
    """Return the metrics ``reward/raised``, ``reward/timed_out``, ``reward/not_finite`` and ``reward/died``."""
    return {f"reward/{kind}": sum(outcome.kind == kind for outcome in outcomes) for kind in EVENT_KINDS}


class RewardPool:
    """Calls a reward function in worker processes; a context manager, so that none is left behind."""

    def __init__(self, function: str, workers: int, time_limit_s: float, on_error: float) -> None:
        """Start nothing yet.

        Args:
            function: ``module:function``.
            workers: number of processes.
            time_limit_s: limit of one call, seconds.
            on_error: reward of a call that gives none.
        """
        self._function, self._limit, self._on_error = function, time_limit_s, on_error
        self._workers: list[Worker | None] = [None] * workers
        self._log: Path | None = None

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End every worker and everything that the rewards started."""
        self.drop_all()

    def log_to(self, path: Path) -> None:
        """Append what the reward function prints from now on to a file; before that it goes nowhere."""
        self._log = path
        for worker in self._workers:
            if worker is not None and worker.ready:
                worker.send({"log": str(path.absolute())})

    def check(self) -> None:
        """Start one worker and wait until it has the function.

        Raises:
            UsageError: it cannot be imported or called.
        """
        while not any(worker is not None and worker.ready for worker in self._workers):
            self.advance([], deque(), {}, 1)

    def score(self, jobs: Sequence[RewardJob]) -> list[RewardOutcome]:
        """Return the outcomes of ``jobs``, in their order; each function call is made once.

        Raises:
            UsageError: a worker cannot import the function.
        """
        with Scoring(self) as scoring:
            for job in jobs:
                scoring.submit(job)
            return scoring.finish()

    def advance(
        self,
        lines: Sequence[str],
        waiting: deque[int],
        outcomes: dict[int, RewardOutcome],
        wanted: int,
        wait: bool = True,
    ) -> None:
        """Hand out calls and take what came; for `Scoring`.

        Args:
            lines: arguments of all calls.
            waiting: indices of those that no worker has yet.
            outcomes: of those that are done, by index; added to.
            wanted: calls that are not done; so many workers are started at most.
            wait: until something happens.

        Raises:
            UsageError: a worker cannot import the function.
        """
        self._give(lines, waiting, wanted)
        for index, worker in self._wait(wait):
            answer, closed = worker.receive()
            if answer is not None and not worker.ready:
                if "error" in answer:
                    raise UsageError(answer["error"])
                worker.ready = True
            elif answer is not None and worker.job is not None:
                outcomes[worker.job] = self._outcome(answer)
                worker.job = None
            elif closed or worker.seconds > (self._limit if worker.ready else START_LIMIT_S):
                self._lost(worker, closed, outcomes)
                self._drop(index)

    def _give(self, lines: Sequence[str], waiting: deque[int], wanted: int) -> None:
        """Start missing workers, as many as there is work for, and give each idle one a call."""
        for index, worker in enumerate(self._workers[:wanted]):
            if worker is None or (worker.job is None and worker.process.poll() is not None):
                self._drop(index)
                self._workers[index] = Worker(self._function, self._log)
        for worker in self._workers:
            if worker is not None and worker.ready and worker.job is None and waiting:
                worker.job = waiting.popleft()
                worker.send(lines[worker.job], self._limit)

    def _wait(self, wait: bool) -> list[tuple[int, Worker]]:
        """Wait until a worker says something or its time is up; return the workers that are at something."""
        at_work = [(i, w) for i, w in enumerate(self._workers) if w is not None and (w.job is not None or not w.ready)]
        if not wait:
            return at_work
        left = [(self._limit if worker.ready else START_LIMIT_S) - worker.seconds for _, worker in at_work]
        with selectors.DefaultSelector() as selector:
            for index, worker in at_work:
                selector.register(worker.channel, selectors.EVENT_READ, index)
            # A grandchild may hold the socket open after its worker's death, so the processes are looked at too.
            selector.select(timeout=max(0.0, min([0.2, *left])) + 0.001)
        return at_work

    def _outcome(self, answer: Mapping[str, Any]) -> RewardOutcome:
        seconds = float(answer["seconds"])
        if seconds > self._limit:  # also where nobody looked in time: what counts does not depend on when one looks
            return self._late(seconds)
        value = self._on_error if answer["value"] is None else float(answer["value"])
        return RewardOutcome(answer["kind"], value, seconds, str(answer["detail"]))

    def _late(self, seconds: float) -> RewardOutcome:
        return RewardOutcome("timed_out", self._on_error, seconds, f"over {self._limit:g} s")

    def _lost(self, worker: Worker, closed: bool, outcomes: dict[int, RewardOutcome]) -> None:
        """Record what a worker that hung or died was doing."""
        if not worker.ready:
            problem = "ended" if closed else f"took over {START_LIMIT_S:g} s"
            raise UsageError(f"task.reward = '{self._function}': the worker process {problem} while importing it")
        if worker.job is None:
            return
        if closed:
            try:
                code: int | None = worker.process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                code = None
            outcome = RewardOutcome(
                "died", self._on_error, worker.seconds, f"the worker process ended with code {code}"
            )
        else:
            outcome = self._late(worker.seconds)
        outcomes[worker.job] = outcome

    def drop_all(self) -> None:
        """End every worker; the next call starts others."""
        for index in range(len(self._workers)):
            self._drop(index)

    def _drop(self, index: int) -> None:
        worker = self._workers[index]
        if worker is not None:
            worker.end()
            self._workers[index] = None


class Scoring:
    """Reward calls of a step, submitted one by one while others are at work already; a context manager.

    Left before `finish`, its workers end: an answer to one of its calls must not become one to the next.
    """

    def __init__(self, pool: RewardPool) -> None:
        self._pool = pool
        self._lines: list[str] = []
        self._waiting: deque[int] = deque()
        self._outcomes: dict[int, RewardOutcome] = {}

    def __enter__(self) -> Scoring:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._open:
            self._pool.drop_all()

    @property
    def _open(self) -> int:
        return len(self._lines) - len(self._outcomes)

    def submit(self, job: RewardJob) -> None:
        """Add a call; it is made once, by a worker that is free."""
        self._waiting.append(len(self._lines))
        self._lines.append(job.arguments())

    def poll(self) -> None:
        """Hand out calls and take outcomes, without waiting.

        Raises:
            UsageError: a worker cannot import the function.
        """
        if self._open:
            self._pool.advance(self._lines, self._waiting, self._outcomes, self._open, wait=False)

    def finish(self) -> list[RewardOutcome]:
        """Wait for the rest; return the outcomes in the order of submission, whichever came first.

        Raises:
            UsageError: a worker cannot import the function.
        """
        while self._open:
            self._pool.advance(self._lines, self._waiting, self._outcomes, self._open)
        return [self._outcomes[index] for index in range(len(self._lines))]
