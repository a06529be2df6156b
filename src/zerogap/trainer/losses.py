"""The clipped policy-gradient loss, its aggregation over a batch, and what to watch about it.

With ``d = logprob_new - logprob_old``, ``r = exp(d)`` and the advantage ``A``, the loss of one token is

    l = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

(PPO, arXiv 1707.06347, equation 7; separate bounds, "clip-higher": DAPO, arXiv 2503.14476, section 3.1).

The loss of an optimiser batch of sequences i with n_i trained tokens each, of which B sequences have n_i > 0, is
``L = sum_i w_i sum_t l_it`` with one weight per sequence. Frameworks use the same names for different sums, so here
are ours:

* ``token-mean``: ``w_i = 1 / sum_j n_j``. Every token counts the same; long responses weigh more (DAPO).
* ``sequence-mean``: ``w_i = 1 / (B n_i)``. Every sequence counts the same; this is GRPO's own objective
  (DeepSeekMath, arXiv 2402.03300, equation 3).
* ``sequence-mean-token-sum-norm``: ``w_i = 1 / (B norm_length)`` with a constant ``norm_length``, such as the longest
  response allowed: no length bias (Dr. GRPO, arXiv 2503.20783, section 3.2). The length of the longest response that
  happens to be in the batch is not a constant, so it is not used.

The weights are of the whole optimiser batch, sequences with advantage 0 included, and known before the first
micro-batch runs: how the batch is split into micro-batches does not change the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from zerogap.errors import UsageError, nearest

Aggregation = Literal["token-mean", "sequence-mean", "sequence-mean-token-sum-norm"]


@dataclass(frozen=True)
class LossSettings:
    """Clipping and aggregation.

    Attributes:
        clip_low: the ratio is clipped at ``1 - clip_low``; in (0, 1].
        clip_high: the ratio is clipped at ``1 + clip_high``; above 0.
        aggregation: see the module's formulas.
        norm_length: tokens; the constant of ``sequence-mean-token-sum-norm``, else unused.

    Raises:
        UsageError: a value out of its range.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    aggregation: Aggregation = "token-mean"
    norm_length: int = 0

    def __post_init__(self) -> None:
        if not (0 < self.clip_low <= 1 and 0 < self.clip_high < float("inf")):
            raise UsageError(
                f"clip_low must be in (0, 1] and clip_high above 0, not {self.clip_low} and {self.clip_high}"
            )
        known = get_args(Aggregation)
        if self.aggregation not in known:
            raise UsageError(
                f"aggregation {self.aggregation!r} is none of {', '.join(known)}{nearest(self.aggregation, known)}"
            )
        if self.aggregation == "sequence-mean-token-sum-norm" and self.norm_length < 1:
            raise UsageError(
                f"aggregation sequence-mean-token-sum-norm needs norm_length of at least 1 token, not "
                f"{self.norm_length}; set it to the longest response allowed"
            )


def sequence_weights(trained_counts: Sequence[int], settings: LossSettings) -> list[float]:
    """Return w_i of the module's formulas; 0 for a sequence without trained tokens.

    Args:
        trained_counts: n_i of every sequence of the optimiser batch.
        settings: aggregation and ``norm_length``.
    """
    tokens = sum(trained_counts)
    sequences = sum(count > 0 for count in trained_counts)
    match settings.aggregation:
        case "token-mean":
            divisors = [tokens] * len(trained_counts)
        case "sequence-mean":
            divisors = [sequences * count for count in trained_counts]
        case "sequence-mean-token-sum-norm":
            divisors = [sequences * settings.norm_length] * len(trained_counts)
    return [1.0 / divisor if count else 0.0 for divisor, count in zip(divisors, trained_counts, strict=True)]


def token_losses(logprob_S: Tensor, old_S: Tensor, advantage_S: Tensor, settings: LossSettings) -> Tensor:
    """Return the clipped loss of each token, differentiable in ``logprob_S`` only.

    Args:
        logprob_S: log-probs under the weights being trained, in nats.
        old_S: log-probs under the weights that sampled.
        advantage_S: advantage of each token's sequence.
        settings: the clip bounds.
    """
    low, high = 1.0 - settings.clip_low, 1.0 + settings.clip_high
    difference_S = logprob_S - old_S.detach()
    ratio_S = difference_S.detach().exp()
    binds_S = ((advantage_S > 0) & (ratio_S > high)) | ((advantage_S < 0) & (ratio_S < low))
    bound_S = torch.full_like(advantage_S, low).masked_fill_(advantage_S > 0, high)
    # A clipped token has no gradient. It is taken out before exp, since an overflowed exp would turn "no gradient"
    # into 0 * inf.
    free_S = difference_S.masked_fill(binds_S, 0.0).exp()
    return -torch.where(binds_S, bound_S, free_S) * advantage_S


def policy_metrics(
    logprob_S: np.ndarray, old_S: np.ndarray, advantage_S: np.ndarray, settings: LossSettings
) -> dict[str, float]:
    """Return what to watch about the update, over the trained tokens; empty without tokens.

    * ``clip_share_low`` / ``clip_share_high``: share of tokens whose loss is held at the low / high bound.
    * ``ratio_mean``, ``ratio_max``: of ``exp(new - old)``.
    * ``kl_k1``, ``kl_k3``: estimates of KL(old || new) from the old policy's samples: means of ``-d`` and of
      ``exp(d) - 1 - d`` with ``d = new - old`` (J. Schulman, "Approximating KL divergence", 2020).

    Args:
        logprob_S: log-probs under the weights being trained.
        old_S: log-probs under the weights that sampled.
        advantage_S: advantage of each token's sequence.
        settings: the clip bounds.
    """
    if not len(logprob_S):
        return {}
    d_S = logprob_S.astype(np.float64) - old_S.astype(np.float64)
    ratio_S = np.exp(d_S)
    return {
        "clip_share_low": float(np.mean((advantage_S < 0) & (ratio_S < 1 - settings.clip_low))),
        "clip_share_high": float(np.mean((advantage_S > 0) & (ratio_S > 1 + settings.clip_high))),
        "ratio_mean": float(np.mean(ratio_S)),
        "ratio_max": float(np.max(ratio_S)),
        "kl_k1": float(np.mean(-d_S)),
        "kl_k3": float(np.mean(np.expm1(d_S) - d_S)),
    }
