"""The numbers of one step: what training made of it, and its metrics by name (``zerogap.rl.metric_names``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from zerogap.rl.gate import Comparison
from zerogap.rl.rewards import RewardOutcome, event_counts
from zerogap.rl.rollout import Rollout
from zerogap.trainer import Scored, StepResult, TrainSequence, UpdateStats


@dataclass
class Trained:
    """What training made of a step.

    Attributes:
        comparison: of ``compared`` with ``scores``.
        compared: the step's sequences; behind them, if their untrained tokens were scored, those (`untrained`).
        scores: of each of them, or None where none was run.
        results, updates: of each update that was computed, and applied.
        stopped: whether the gate stopped the run.
    """

    comparison: Comparison
    compared: list[TrainSequence]
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


def gap_metrics(found: Comparison) -> dict[str, float]:
    """Return what the comparison found; no gap at all where nothing was compared."""
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


def reward_metrics(outcomes: Sequence[RewardOutcome]) -> dict[str, float]:
    """Return the rewards' moments and the counted events."""
    rewards = np.array([outcome.value for outcome in outcomes])
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        **event_counts(outcomes),
    }


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return lengths in sampled tokens, the truncated share and the prefix cache's hits."""
    lengths = [rollout.generated_tokens for rollout in rollouts]
    cached = sum(completion.cached_tokens for r in rollouts for completion in r.transcript.completions)
    return {
        "rollout/response_length/mean": float(np.mean(lengths)),
        "rollout/response_length/max": float(max(lengths)),
        "rollout/truncated_share": float(np.mean([rollout.transcript.truncated for rollout in rollouts])),
        "rollout/cached_tokens": cached,
    }


def rates(rollouts: Sequence[Rollout], trained: Trained, seconds: Mapping[str, float]) -> dict[str, float]:
    """Return tokens per second: generated, and rows of the training forward; ``seconds`` are the step's phases."""
    generated = sum(rollout.generated_tokens for rollout in rollouts)
    rows = sum(s.input_rows for s, scored in zip(trained.compared, trained.scores, strict=True) if scored is not None)
    return {
        "perf/generated_tokens_per_s": generated / seconds["time/rollout_s"],
        "perf/trained_tokens_per_s": rows / seconds["time/train_s"],
    }
