"""The loop: prompts, rollouts, rewards, advantages, training forward = comparison, update, weights to the engine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from zerogap.models.weights import weights_digest
from zerogap.ops import ambient
from zerogap.rl.config_load import config_digest
from zerogap.rl.display import Display
from zerogap.rl.gate import Comparison, Totals, compare
from zerogap.rl.incident import incident, write_incident
from zerogap.rl.locate import locate
from zerogap.rl.metrics import MetricsWriter
from zerogap.rl.reward_journal import RewardJournal, score
from zerogap.rl.rewards import RewardJob, RewardOutcome, RewardPool, event_counts
from zerogap.rl.rollout import Rollout, train_sequence
from zerogap.rl.samples import Sample, write_samples
from zerogap.rl.setup import Run, eval_params, rollout_params
from zerogap.trainer import (
    RunState,
    Scored,
    StepResult,
    TrainSequence,
    UpdateStats,
    accumulate,
    group_advantages,
    mini_batches,
    save_checkpoint,
)
from zerogap.trainer import score as score_sequences

_EVAL_STEPS = 2**31  # evaluation's own range of sequence keys and so of random numbers


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        totals: sums over all its steps, those before a resume included.
        incident: the incident file of the first different token, if there was one.
        stopped: whether the gate stopped it.
    """

    totals: Totals
    incident: Path | None
    stopped: bool


@dataclass
class _Clock:
    """Seconds of each phase of a step, under the metrics' names."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


class Loop:
    """Drives a run from its first open step to its last."""

    def __init__(
        self, run: Run, pool: RewardPool, journal: RewardJournal, writer: MetricsWriter, display: Display
    ) -> None:
        self.run_ = run
        self.pool = pool
        self.journal = journal
        self.writer = writer
        self.display = display
        self.totals = Totals()
        self.first_step = 0
        self.incident: Path | None = None
        self.saving = _Clock()  # of the checkpoint after the step before
        if run.checkpoint is not None:
            state = run.checkpoint.state
            self.first_step = state.step
            self.totals = Totals.from_state(state.extra["totals"])
            self._send_weights(state.step)

    def run(self) -> Outcome:
        """Run all steps; stop before the update of a step whose comparison fails, if the gate says so."""
        config = self.run_.config
        if self.totals.eval_first is None and config.eval.every > 0 and self.first_step == 0:
            accuracy = self._evaluate(0, _Clock())["eval/accuracy"]
            self.totals.eval_first = accuracy
            self.display.note(f"held-out accuracy before training: {accuracy:.3f}")
        for step in range(self.first_step, config.run.steps):
            if not self._step(step):
                return Outcome(self.totals, self.incident, stopped=True)
        return Outcome(self.totals, self.incident, stopped=False)

    def _step(self, step: int) -> bool:
        """Run one step; return False if the gate stopped it."""
        run, config, clock = self.run_, self.run_.config, _Clock()
        began = time.perf_counter()
        params = rollout_params(config)
        prompts = run.task.train_prompts(step)
        with clock.phase("time/rollout_s"):
            rollouts = run.generator.generate(step, prompts, config.rollout.samples_per_prompt, params)
        with clock.phase("time/reward_s"):
            outcomes = score(self.pool, self.journal, _jobs("train", step, rollouts))
        rewards = [outcome.value for outcome in outcomes]
        size = config.rollout.samples_per_prompt
        groups = [rewards[start : start + size] for start in range(0, len(rewards), size)]
        advantages = group_advantages(groups, config.train.advantage)
        flat = [advantage for group in advantages.advantages for advantage in group]
        sequences = [train_sequence(*pair, params) for pair in zip(rollouts, flat, strict=True)]
        with clock.phase("time/train_s"), ambient.guard():
            trained = self._train(step, sequences, sum(rollout.generated_tokens for rollout in rollouts))
        self.totals.add(trained.comparison)
        write_samples(run.folder, step, _samples(rollouts, outcomes, sequences, trained.scores))
        if not trained.stopped:
            with clock.phase("time/sync_s"):
                self._send_weights(step + 1)
            self.totals.steps = step + 1
        self._count(rollouts, rewards, clock)
        values = _gap_metrics(trained.comparison) | _reward_metrics(outcomes) | _rollout_metrics(rollouts)
        values |= trained.metrics(config.train.updates_per_rollout)
        values["rollout/groups_without_variance"] = advantages.groups_without_variance
        last = step + 1 == config.run.steps
        if not trained.stopped and config.eval.every > 0 and (last or (step + 1) % config.eval.every == 0):
            values |= self._evaluate(step + 1, clock)
            self.totals.eval_last = values["eval/accuracy"]
        values |= self.saving.seconds | clock.seconds | {"time/step_s": time.perf_counter() - began}
        values |= _rates(rollouts, sequences, trained, clock)
        self.writer.write(step, values)
        self.display.step(step, values)
        # After the metrics: a step whose checkpoint stands is never done again, so its line must stand before.
        self.saving = _Clock()
        every = config.run.checkpoint_every
        if not trained.stopped and (last or (every and (step + 1) % every == 0)):
            with self.saving.phase("time/checkpoint_s"):
                self._save(step + 1)
        return not trained.stopped

    def _train(self, step: int, sequences: list[TrainSequence], sampled_tokens: int) -> _Trained:
        run, updates = self.run_, self.run_.config.train.updates_per_rollout
        if updates == 1:
            result = accumulate(run.decoder, run.optimiser, sequences, run.settings)
            found = compare(sequences, result.scores, sampled_tokens)
            if self._gate(step, sequences, found):
                return _Trained(found, result.scores, [result], [], stopped=True)
            return _Trained(found, result.scores, [result], [run.optimiser.apply()])
        # The whole batch is scored at the version that sampled it; later updates replay its kept sets.
        scores = score_sequences(run.decoder, sequences, run.settings.micro_batch_rows, want_kept=True)
        found = compare(sequences, scores, sampled_tokens)
        trained = _Trained(found, list(scores), [], [])
        if self._gate(step, sequences, found):
            trained.stopped = True
            return trained
        keys = [sequence.key for sequence in sequences]
        for part in mini_batches(keys, updates, run.config.run.seed, step):
            some, old = [sequences[i] for i in part], [scores[i] for i in part]
            trained.results.append(accumulate(run.decoder, run.optimiser, some, run.settings, old))
            trained.updates.append(run.optimiser.apply())
        return trained

    def _gate(self, step: int, sequences: list[TrainSequence], found: Comparison) -> bool:
        """Write the incident of the first different token of the run; return whether the run must stop."""
        if not found.differences:
            return False
        run, config = self.run_, self.run_.config
        if self.incident is None:
            together = config.train.updates_per_rollout > 1
            rows = run.settings.micro_batch_rows
            fault = locate(run.engine, run.decoder, sequences, found.differences[0], rows, together)
            versions = {
                "weights_version": run.engine.version,
                "weights_digest_engine": weights_digest(run.engine.decoder.state_dict()),
                "weights_digest_trainer": weights_digest(run.decoder.state_dict()),
                "numerics": run.numerics,
            }
            record = incident(step, found, sequences, fault, versions, run.tokenizer.decode)
            self.incident = write_incident(run.folder, record)
            self.display.note(f"step {step}: {found.tokens_different} tokens differ: {fault.explanation}")
        return config.gap.gate == "stop"

    def _send_weights(self, version: int) -> None:
        """Copy the trainer's weights into the engine under a new version, and check that they arrived."""
        state = self.run_.decoder.state_dict()
        self.run_.engine.load_weights(state, version, weights_digest(state))

    def _evaluate(self, step: int, clock: _Clock) -> dict[str, float]:
        """Return the held-out metrics of the weights at hand."""
        run, section = self.run_, self.run_.config.eval
        with clock.phase("time/eval_s"):
            prompts = run.task.eval_prompts()
            rollouts = run.generator.generate(_EVAL_STEPS + step, prompts, section.samples, eval_params(run.config))
            outcomes = score(self.pool, self.journal, _jobs("eval", step, rollouts))
        return {
            "eval/accuracy": float(np.mean([outcome.value >= 1 for outcome in outcomes])),
            "eval/reward": float(np.mean([outcome.value for outcome in outcomes])),
            "eval/response_length/mean": float(np.mean([rollout.generated_tokens for rollout in rollouts])),
            "eval/truncated_share": float(np.mean([rollout.transcript.truncated for rollout in rollouts])),
        }

    def _count(self, rollouts: Sequence[Rollout], rewards: Sequence[float], clock: _Clock) -> None:
        mean = float(np.mean(rewards))
        if self.totals.reward_first is None:
            self.totals.reward_first = mean
        self.totals.reward_last = mean
        self.totals.generated_tokens += sum(rollout.generated_tokens for rollout in rollouts)
        self.totals.rollout_seconds += clock.seconds["time/rollout_s"]

    def _save(self, step: int) -> None:
        run = self.run_
        state = RunState(
            step=step,
            updates=run.optimiser.updates,
            config_digest=config_digest(run.config),
            weights_digest=run.engine.digest,
            numerics=run.numerics,
            extra={"totals": self.totals.state(), "prompts": run.task.digest},
        )
        save_checkpoint(run.folder, state, run.decoder, run.source, run.optimiser, run.config.run.keep_checkpoints)


@dataclass
class _Trained:
    """What training made of a step."""

    comparison: Comparison
    scores: list[Scored | None]
    results: list[StepResult]
    updates: list[UpdateStats]
    stopped: bool = False

    def metrics(self, updates_per_rollout: int) -> dict[str, float]:
        """Return the step's training metrics: means over its updates."""
        values: dict[str, float] = {"train/tokens": sum(result.trained_tokens for result in self.results)}
        if self.results:
            values["train/loss"] = float(np.mean([result.loss for result in self.results]))
            # An update in which every advantage is 0 has no metrics; the others still count.
            measured = [result.metrics for result in self.results if result.metrics]
            for name in measured[0] if measured else ():
                reduce = np.max if name.endswith("_max") else np.mean
                values[f"train/{name}"] = float(reduce([metrics[name] for metrics in measured]))
        if self.updates:
            values["train/grad_norm"] = float(np.mean([update.grad_norm for update in self.updates]))
            values["train/learning_rate"] = self.updates[-1].learning_rate
        return values


def _jobs(phase: str, step: int, rollouts: Sequence[Rollout]) -> list[RewardJob]:
    return [
        RewardJob(
            phase,  # type: ignore[arg-type]
            step,
            rollout.key[1],
            rollout.key[2],
            rollout.prompt.content,
            rollout.transcript.text,
            rollout.prompt.answer,
            rollout.prompt.fields,
        )
        for rollout in rollouts
    ]


def _samples(
    rollouts: Sequence[Rollout],
    outcomes: Sequence[RewardOutcome],
    sequences: Sequence[TrainSequence],
    scores: Sequence[Scored | None],
) -> list[Sample]:
    samples = []
    for rollout, outcome, sequence, scored in zip(rollouts, outcomes, sequences, scores, strict=True):
        trainer: list[float | None] = [None] * sequence.response_length
        if scored is not None:
            for place, value in zip(sequence.trained_places.tolist(), scored.logprob_T.tolist(), strict=True):
                trainer[place] = value
        samples.append(
            Sample(
                prompt_index=rollout.key[1],
                sample_index=rollout.key[2],
                prompt=rollout.prompt.text,
                completion=rollout.transcript.text,
                answer=rollout.prompt.answer,
                reward=outcome.value,
                reward_kind=outcome.kind,
                advantage=sequence.advantage,
                finish_reason=rollout.transcript.completions[-1].finish_reason,
                weights_version=sequence.weights_version,
                prompt_ids=rollout.transcript.prompt_ids,
                response_ids=rollout.transcript.response_ids,
                logprobs_engine=rollout.transcript.logprobs,
                logprobs_trainer=trainer,
                loss_mask=rollout.transcript.loss_mask,
            )
        )
    return samples


def _gap_metrics(found: Comparison) -> dict[str, float]:
    counts: dict[str, float] = {
        "gap/tokens_compared": found.tokens_compared,
        "gap/tokens_different": found.tokens_different,
        "gap/tokens_nonfinite": found.tokens_nonfinite,
        "gap/tokens_not_compared": found.tokens_not_compared,
    }
    if not found.tokens_compared:  # no gap is known, which is neither 0 nor NaN
        return counts
    mean = {"gap/mean": found.gap_mean, "train/train_rollout_logprob_abs_diff": found.gap_mean}
    return counts | mean | {"gap/max": found.gap_max}


def _reward_metrics(outcomes: Sequence[RewardOutcome]) -> dict[str, float]:
    rewards = np.array([outcome.value for outcome in outcomes])
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        **event_counts(outcomes),
    }


def _rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    lengths = [rollout.generated_tokens for rollout in rollouts]
    cached = sum(completion.cached_tokens for r in rollouts for completion in r.transcript.completions)  # type: ignore[attr-defined]
    return {
        "rollout/response_length/mean": float(np.mean(lengths)),
        "rollout/response_length/max": float(max(lengths)),
        "rollout/truncated_share": float(np.mean([rollout.transcript.truncated for rollout in rollouts])),
        "rollout/cached_tokens": cached,
    }


def _rates(
    rollouts: Sequence[Rollout], sequences: Sequence[TrainSequence], trained: _Trained, clock: _Clock
) -> dict[str, float]:
    generated = sum(rollout.generated_tokens for rollout in rollouts)
    rows = sum(s.input_rows for s, scored in zip(sequences, trained.scores, strict=True) if scored is not None)
    return {
        "perf/generated_tokens_per_s": generated / clock.seconds["time/rollout_s"],
        "perf/trained_tokens_per_s": rows / clock.seconds["time/train_s"],
    }
