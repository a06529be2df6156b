"""The loop: prompts, rollouts, rewards, advantages, training forward = comparison, update, weights to the engine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from zerogap.engine import Key, SamplingParams
from zerogap.models.weights import weights_digest
from zerogap.ops import ambient
from zerogap.rl.config_load import config_digest
from zerogap.rl.display import Display
from zerogap.rl.gate import Comparison, Totals, compare, worst
from zerogap.rl.incident import incident, write_incident
from zerogap.rl.locate import locate
from zerogap.rl.memory import release_memory
from zerogap.rl.metrics import MetricsWriter
from zerogap.rl.reward_journal import RewardJournal, StepRewards
from zerogap.rl.rewards import RewardJob, RewardOutcome, RewardPool
from zerogap.rl.rollout import Rollout, train_sequence
from zerogap.rl.samples import Sample, write_samples
from zerogap.rl.setup import Run, eval_params, rollout_params
from zerogap.rl.step_metrics import Trained, gap_metrics, rates, reward_metrics, rollout_metrics
from zerogap.rl.tasks import Prompt
from zerogap.trainer import (
    RunState,
    Scored,
    TrainSequence,
    accumulate,
    group_advantages,
    mini_batches,
    save_checkpoint,
    with_gradient,
    without_gradient,
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
        rollouts, outcomes = self._rollout("train", step, prompts, config.rollout.samples_per_prompt, params, clock)
        rewards = [outcome.value for outcome in outcomes]
        size = config.rollout.samples_per_prompt
        groups = [rewards[start : start + size] for start in range(0, len(rewards), size)]
        advantages = group_advantages(groups, config.train.advantage)
        flat = [advantage for group in advantages.advantages for advantage in group]
        sequences = [train_sequence(*pair, params) for pair in zip(rollouts, flat, strict=True)]
        with clock.phase("time/train_s"), ambient.guard():
            trained = self._train(step, sequences, sum(rollout.generated_tokens for rollout in rollouts))
        self.totals.add(trained.comparison)
        write_samples(run.folder, step, _samples(rollouts, outcomes, sequences, trained))
        if not trained.stopped:
            with clock.phase("time/sync_s"):
                self._send_weights(step + 1)
            self.totals.steps = step + 1
        self._count(rollouts, rewards, clock)
        values = gap_metrics(trained.comparison) | reward_metrics(outcomes) | rollout_metrics(rollouts)
        values |= trained.metrics(config.train.updates_per_rollout)
        values["rollout/groups_without_variance"] = advantages.groups_without_variance
        last = step + 1 == config.run.steps
        if not trained.stopped and config.eval.every > 0 and (last or (step + 1) % config.eval.every == 0):
            values |= self._evaluate(step + 1, clock)
            self.totals.eval_last = values["eval/accuracy"]
        values |= self.saving.seconds | clock.seconds | {"time/step_s": time.perf_counter() - began}
        values |= rates(rollouts, trained, clock.seconds)
        self.writer.write(step, values)
        self.display.step(step, values)
        # After the metrics: a step whose checkpoint stands is never done again, so its line must stand before.
        self.saving = _Clock()
        every = config.run.checkpoint_every
        if not trained.stopped and (last or (every and (step + 1) % every == 0)):
            with self.saving.phase("time/checkpoint_s"):
                self._save(step + 1)
        return not trained.stopped

    def _rollout(
        self,
        phase: Literal["train", "eval"],
        step: int,
        prompts: Sequence[Prompt],
        samples: int,
        params: SamplingParams,
        clock: _Clock,
    ) -> tuple[list[Rollout], list[RewardOutcome]]:
        """Generate, and judge each completion as soon as it ends; both lists are in the order of the keys.

        Nothing depends on which ends first: outcomes belong to their keys.
        """
        keys: list[Key] = []
        with StepRewards(self.pool, self.journal) as rewards:

            def judge(rollout: Rollout) -> None:
                keys.append(rollout.key)
                rewards.submit(_job(phase, step, rollout))

            with clock.phase("time/rollout_s"):
                first = step if phase == "train" else _EVAL_STEPS + step
                rollouts = self.run_.generator.generate(first, prompts, samples, params, judge, rewards.poll)
            with clock.phase("time/reward_s"):
                outcome_of = dict(zip(keys, rewards.finish(), strict=True))
        return rollouts, [outcome_of[rollout.key] for rollout in rollouts]

    def _train(self, step: int, sequences: list[TrainSequence], sampled_tokens: int) -> Trained:
        run, updates = self.run_, self.run_.config.train.updates_per_rollout
        extra, extra_scores = self._score_untrained(sequences)
        compared = [*sequences, *extra]
        extra_pass = range(len(sequences), len(compared))
        if updates == 1:
            result = accumulate(run.decoder, run.optimiser, sequences, run.settings)
            scores = [*result.scores, *extra_scores]
            found = compare(compared, scores, sampled_tokens)
            trained = Trained(found, compared, scores, [result], [])
            passes = [with_gradient(sequences), without_gradient(sequences), extra_pass]
            if self._gate(step, compared, found, passes):
                trained.stopped = True
            else:
                trained.updates.append(run.optimiser.apply())
            return trained
        # The whole batch is scored at the version that sampled it; later updates replay its kept sets.
        old = score_sequences(run.decoder, sequences, run.settings.micro_batch_rows, want_kept=True)
        found = compare(compared, [*old, *extra_scores], sampled_tokens)
        trained = Trained(found, compared, [*old, *extra_scores], [], [])
        if self._gate(step, compared, found, [range(len(sequences)), extra_pass]):
            trained.stopped = True
            return trained
        for part in mini_batches([sequence.key for sequence in sequences], updates, run.config.run.seed, step):
            some = [sequences[i] for i in part]
            trained.results.append(accumulate(run.decoder, run.optimiser, some, run.settings, [old[i] for i in part]))
            if not trained.updates:
                # The weights are still those that sampled: the forward with gradient must say the same words again.
                for index, again in zip(part, trained.results[0].scores, strict=True):
                    if again is not None:
                        trained.scores[index] = worst(sequences[index], old[index], again)
                trained.comparison = compare(compared, trained.scores, sampled_tokens)
                members = [part[i] for i in with_gradient(some)]
                if self._gate(step, compared, trained.comparison, [members]):
                    trained.stopped = True
                    return trained
            trained.updates.append(run.optimiser.apply())
        return trained

    def _score_untrained(self, sequences: list[TrainSequence]) -> tuple[list[TrainSequence], list[Scored]]:
        """With ``gap.scope = "all"`` return the sequences' tokens that were sampled and are not trained on, scored."""
        run, extra = self.run_, [sequence.untrained() for sequence in sequences]
        if run.config.gap.scope != "all" or not any(sequence.trained_count for sequence in extra):
            return [], []
        return extra, score_sequences(run.decoder, extra, run.settings.micro_batch_rows)

    def _gate(
        self, step: int, sequences: list[TrainSequence], found: Comparison, passes: Sequence[Sequence[int]]
    ) -> bool:
        """Write the incident of the first different token of the run; return whether the run must stop.

        Args:
            step: of the run.
            sequences: the step's, and behind them those of `_score_untrained`.
            found: their comparison.
            passes: the forward passes that were compared, each by the sequences that it packed, in their order.
        """
        if not found.differences:
            return False
        run, config = self.run_, self.run_.config
        if self.incident is None:
            first = found.differences[0]
            members = next(members for members in passes if first.index in members)
            fault = locate(run.engine, run.decoder, sequences, first, run.settings.micro_batch_rows, members)
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
        """Give the engine the trainer's weights under a new version: shared ones are there, others are checked."""
        release_memory()  # that of gradients and activations
        engine = self.run_.engine
        if engine.shared:
            engine.weights_changed(version)
        else:
            state = self.run_.decoder.state_dict()
            engine.load_weights(state, version, weights_digest(state))

    def _evaluate(self, step: int, clock: _Clock) -> dict[str, float]:
        """Return the held-out metrics of the weights at hand."""
        run, section = self.run_, self.run_.config.eval
        with clock.phase("time/eval_s"):
            prompts = run.task.eval_prompts()
            params = eval_params(run.config)
            rollouts, outcomes = self._rollout("eval", step, prompts, section.samples, params, _Clock())
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


def _job(phase: Literal["train", "eval"], step: int, rollout: Rollout) -> RewardJob:
    prompt = rollout.prompt
    return RewardJob(
        phase, step, *rollout.key[1:], prompt.content, rollout.transcript.text, prompt.answer, prompt.fields
    )


def _samples(
    rollouts: Sequence[Rollout],
    outcomes: Sequence[RewardOutcome],
    sequences: Sequence[TrainSequence],
    trained: Trained,
) -> list[Sample]:
    trainers: dict[Key, list[float | None]] = {s.key: [None] * s.response_length for s in sequences}
    told = any(scored is not None and scored.kept_mass_T is not None for scored in trained.scores)
    cut = [s for s in sequences if s.sampler.cuts] if told else []  # not every backend says the kept mass
    masses: dict[Key, list[float | None]] = {s.key: [None] * s.response_length for s in cut}
    for compared, scored in zip(trained.compared, trained.scores, strict=True):
        if scored is not None:
            places = compared.trained_places.tolist()
            for place, value in zip(places, scored.logprob_T.tolist(), strict=True):
                trainers[compared.key][place] = value
            if compared.key in masses and scored.kept_mass_T is not None:
                for place, value in zip(places, scored.kept_mass_T.tolist(), strict=True):
                    masses[compared.key][place] = value
    samples = []
    for rollout, outcome, sequence in zip(rollouts, outcomes, sequences, strict=True):
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
                logprobs_trainer=trainers[sequence.key],
                loss_mask=rollout.transcript.loss_mask,
                cached_tokens=rollout.transcript.cached_tokens,
                kept_mass=masses.get(sequence.key),
            )
        )
    return samples
