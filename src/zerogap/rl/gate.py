"""The comparison of every trained token, bit for bit, and its running totals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from zerogap.trainer import Scored, TrainSequence


@dataclass(frozen=True)
class Difference:
    """A token whose two float32 words differ.

    Attributes:
        index: the sequence's place in the step's list.
        place: the token's index in the response.
        logprob_engine, logprob_trainer: nats, float32 values.
    """

    index: int
    place: int
    logprob_engine: float
    logprob_trainer: float


@dataclass(frozen=True)
class Comparison:
    """What one step's comparison found.

    ``d`` is the trainer's log-prob less the engine's, in float64 from the float32 words.

    Attributes:
        tokens_compared: tokens with both log-probs.
        tokens_different: whose words differ or are not finite.
        tokens_nonfinite: of which at least one side is NaN or infinite.
        tokens_not_compared: the other tokens that the engine sampled.
        gap_sum, gap_max: of abs(d); NaN if a token is not finite.
        differences: the different tokens, in order.
    """

    tokens_compared: int
    tokens_different: int
    tokens_nonfinite: int
    tokens_not_compared: int
    gap_sum: float
    gap_max: float
    differences: tuple[Difference, ...]

    @property
    def gap_mean(self) -> float:
        """Mean of abs(d); NaN without compared tokens."""
        return self.gap_sum / self.tokens_compared if self.tokens_compared else math.nan


def compare(sequences: Sequence[TrainSequence], scores: Sequence[Scored | None], sampled_tokens: int) -> Comparison:
    """Compare what the engine recorded with what the trainer's forward says.

    Args:
        sequences: of one step.
        scores: the trainer's, or None for a sequence that was not run.
        sampled_tokens: tokens that the engine sampled for the sequences; those that are not compared, whether their
            sequence was not run or the loss mask leaves them out, are counted as such.
    """
    engine_parts, trainer_parts, index_parts, place_parts = [], [], [], []
    for number, (sequence, scored) in enumerate(zip(sequences, scores, strict=True)):
        if scored is None:
            continue
        engine_parts.append(sequence.trained_logprobs_engine.numpy())
        trainer_parts.append(scored.logprob_T.numpy())
        place_parts.append(sequence.trained_places.numpy())
        index_parts.append(np.full(sequence.trained_count, number))
    if not engine_parts:
        return Comparison(0, 0, 0, sampled_tokens, 0.0, 0.0, ())
    engine, trainer = np.concatenate(engine_parts), np.concatenate(trainer_parts)
    index, place = np.concatenate(index_parts), np.concatenate(place_parts)
    assert engine.dtype == trainer.dtype == np.float32, f"log-probs are {engine.dtype} and {trainer.dtype}"
    nonfinite = ~(np.isfinite(engine) & np.isfinite(trainer))
    # NaN and inf are never equal to anything, not even to the same word.
    different = (engine.view(np.int32) != trainer.view(np.int32)) | nonfinite
    with np.errstate(invalid="ignore"):  # inf - inf, which is not finite and said so
        gap = np.where(nonfinite, np.nan, np.abs(trainer.astype(np.float64) - engine))
    return Comparison(
        tokens_compared=len(engine),
        tokens_different=int(different.sum()),
        tokens_nonfinite=int(nonfinite.sum()),
        tokens_not_compared=sampled_tokens - len(engine),
        gap_sum=float(gap.sum()),
        gap_max=float(gap.max(initial=0.0)),
        differences=tuple(
            Difference(int(index[i]), int(place[i]), float(engine[i]), float(trainer[i]))
            for i in np.flatnonzero(different)
        ),
    )


def worst(sequence: TrainSequence, first: Scored, second: Scored) -> Scored:
    """Return one score of a sequence that two passes scored at the weights that sampled it: no difference gets lost.

    Per token that of the first pass where its word differs from the engine's, else that of the second.
    """
    engine_T = sequence.trained_logprobs_engine
    same_T = (first.logprob_T.view(torch.int32) == engine_T.view(torch.int32)) & first.logprob_T.isfinite()
    return replace(first, logprob_T=torch.where(same_T, second.logprob_T, first.logprob_T))


@dataclass
class Totals:
    """A whole run's sums; they are part of its checkpoints."""

    steps: int = 0
    tokens_compared: int = 0
    tokens_not_compared: int = 0
    tokens_different: int = 0
    tokens_nonfinite: int = 0
    gap_sum: float = 0.0
    gap_max: float = 0.0
    generated_tokens: int = 0
    rollout_seconds: float = 0.0
    reward_first: float | None = None
    reward_last: float | None = None
    eval_first: float | None = None
    eval_last: float | None = None

    def add(self, found: Comparison) -> None:
        """Add one step's comparison."""
        self.tokens_compared += found.tokens_compared
        self.tokens_not_compared += found.tokens_not_compared
        self.tokens_different += found.tokens_different
        self.tokens_nonfinite += found.tokens_nonfinite
        self.gap_sum += found.gap_sum
        # max() would forget a NaN, whichever side it is on.
        self.gap_max = float(np.maximum(self.gap_max, found.gap_max))

    def state(self) -> dict[str, Any]:
        """Return the sums as JSON values; NaN as a text."""
        return {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }

    @staticmethod
    def from_state(state: dict[str, Any]) -> Totals:
        """Return the sums that `state` gave."""
        totals = Totals(**state)
        totals.gap_sum, totals.gap_max = float(totals.gap_sum), float(totals.gap_max)
        return totals

    def summary(self) -> dict[str, Any]:
        """Return what the command prints as JSON."""
        return {
            "steps": self.steps,
            "tokens_compared": self.tokens_compared,
            "tokens_not_compared": self.tokens_not_compared,
            "tokens_different": self.tokens_different,
            "tokens_nonfinite": self.tokens_nonfinite,
            "gap_mean": self.gap_sum / self.tokens_compared if self.tokens_compared else None,
            "gap_max": self.gap_max if self.tokens_compared else None,
            "reward_first": self.reward_first,
            "reward_last": self.reward_last,
            "eval_first": self.eval_first,
            "eval_last": self.eval_last,
            "generated_tokens_per_s": self.generated_tokens / self.rollout_seconds if self.rollout_seconds else None,
        }
