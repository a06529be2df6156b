"""Log-probs of given tokens, fused with the LM head: logits exist for a chunk of rows at a time, never for all.

The logits are the float32 accumulators of the LM head, unrounded, as the engine's are (``linear_rows``). Without
top-k, top-p and min-p not even a chunk's distribution is written down: its blocks leave only their sums.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zerogap.ops.portable.logprob import TokenLogprobs, chunks, sample_by_chunk
from zerogap.ops.portable.sampling import Sampled
from zerogap.ops.triton import distribution as d
from zerogap.ops.triton.linear import product, wide_product
from zerogap.ops.triton.run import run
from zerogap.ops.triton.sampling import (
    LogDistribution,
    SamplerRows,
    draw,
    filtered,
    log_distribution,
    peaks,
    rows_of,
    totals,
    weigh,
)

__all__ = ["Sampled", "TokenLogprobs", "linear_rows", "sample", "token_logprobs"]

_LOGITS_AT_ONCE = 1 << 26  # 256 MiB of them; the cut changes no bit


def linear_rows(x_RK: Tensor, weight_NK: Tensor) -> Tensor:
    """Return ``x @ weight.T`` as the float32 accumulators, unrounded, without autograd: the logits of both sides."""
    return product(x_RK, weight_NK, out_dtype=torch.float32)


def token_logprobs(
    hidden_RK: Tensor, lm_head_VK: Tensor, target_R: Tensor, settings: SamplerRows, want_kept: bool = False
) -> TokenLogprobs:
    """Return the log-prob of ``target_R`` under each row's distribution, as the engine would have recorded it.

    Args:
        hidden_RK: hidden rows after the final norm [R, K].
        lm_head_VK: weight of the LM head [V, K], of the same dtype.
        target_R: token ids [R].
        settings: each row's sampler settings; a log-prob is -inf where the kept set lacks the token.
        want_kept: also return the kept sets, for replay under later weights.

    Returns:
        Log-probs and entropies in float32.
    """
    kept: list[Tensor | None] | None = [] if want_kept else None
    target_R = target_R.to(hidden_RK.device)
    logprob_R, entropy_R = _TokenLogprobs.apply(hidden_RK, lm_head_VK, target_R, settings, kept)
    return TokenLogprobs(logprob_R, entropy_R, None if kept is None else tuple(kept))


def sample(
    hidden_RK: Tensor, lm_head_VK: Tensor, settings: SamplerRows, uniform_R: Tensor, top: list[int] | None = None
) -> Sampled:
    """Draw each row's next token from its hidden row, without autograd; nothing waits for the device but ``top``.

    Args:
        hidden_RK: hidden rows after the final norm [R, K].
        lm_head_VK: weight of the LM head [V, K].
        settings: each row's sampler settings.
        uniform_R: float64 numbers in [0, 1), one per row.
        top: how many of the most probable tokens each row wants; None for none.
    """

    def distribution_of(part: slice) -> LogDistribution:
        return log_distribution(linear_rows(hidden_RK[part], lm_head_VK), settings[part])

    return sample_by_chunk(_chunks(len(hidden_RK), len(lm_head_VK)), distribution_of, draw, uniform_R, top)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RK: Tensor,
        lm_head_VK: Tensor,
        target_R: Tensor,
        settings: SamplerRows,
        kept: list[Tensor | None] | None,
    ) -> tuple[Tensor, Tensor]:
        device, rows = hidden_RK.device, len(hidden_RK)
        logprob_R, entropy_R = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(2))
        for part in _chunks(rows, len(lm_head_VK)):
            logits_RV = linear_rows(hidden_RK[part], lm_head_VK)
            logprob_R[part], entropy_R[part], sets = _chunk(logits_RV, target_R[part], settings[part], kept is not None)
            if kept is not None:
                kept.extend(sets)
        ctx.save_for_backward(hidden_RK, lm_head_VK, target_R)
        ctx.settings = settings
        ctx.mark_non_differentiable(entropy_R)
        return logprob_R, entropy_R

    @staticmethod
    def backward(ctx: Any, grad_R: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden_RK, lm_head_VK, target_R = ctx.saved_tensors
        want_hidden, want_head, *_rest = ctx.needs_input_grad
        vocabulary, dtype = len(lm_head_VK), hidden_RK.dtype
        temperature_R = ctx.settings.temperature_R
        divisor_R = torch.where(temperature_R == 0, 1.0, temperature_R).to(grad_R.dtype)
        slope_R = grad_R / divisor_R.to(grad_R.device, non_blocking=True)
        grad_hidden = torch.empty_like(hidden_RK) if want_hidden else None
        # Chunks are added up in float32: rounding after each would lose the small ones.
        grad_head = torch.zeros_like(lm_head_VK, dtype=torch.float32) if want_head else None
        for part in _chunks(len(hidden_RK), vocabulary):
            distribution = log_distribution(linear_rows(hidden_RK[part], lm_head_VK), ctx.settings[part])
            rows = len(distribution.total_R)
            grad_RV = torch.empty(rows, vocabulary, dtype=dtype, device=hidden_RK.device)
            run(
                d.grad_logits_config(dtype),
                (d.block_count(vocabulary), rows),
                distribution.weights_RV,
                distribution.total_R,
                slope_R[part],
                target_R[part].contiguous(),
                grad_RV,
                vocabulary,
            )
            del distribution
            if grad_hidden is not None:
                grad_hidden[part] = grad_RV @ lm_head_VK
            if grad_head is not None:
                _add_product(grad_head, grad_RV.T, hidden_RK[part])
        return grad_hidden, grad_head, None, None, None


def _chunk(
    logits_RV: Tensor, target_R: Tensor, settings: SamplerRows, want_kept: bool
) -> tuple[Tensor, Tensor, tuple[Tensor | None, ...]]:
    """Return log-probs, entropies and, if wanted, kept sets of a chunk of rows."""
    if settings.kept is None and filtered(settings):
        distribution = log_distribution(logits_RV, settings)
        sets = distribution.kept_sets() if want_kept else ()
        return distribution.logprobs_of(target_R), distribution.entropy_R, sets
    rows = rows_of(logits_RV, settings)
    peaks_RB = peaks(rows)
    _, _, sums_RB, terms_RB = weigh(rows, peaks_RB, tables=False)
    _, log_total_R, entropy_R = totals(rows, sums_RB, terms_RB)
    logprob_R = torch.empty_like(log_total_R)
    run(
        d.token_config(rows.vocabulary, rows.kept_RV is not None),
        (len(logits_RV),),
        rows.logits_RV,
        rows.temperature_R,
        peaks_RB if rows.kept_RV is None else rows.kept_RV,
        peaks_RB,
        log_total_R,
        target_R.contiguous(),
        logprob_R,
        rows.vocabulary,
        rows.logits_RV.stride(0),
    )
    # Nothing was filtered here: the kept sets are those that were given, or none.
    return logprob_R, entropy_R, settings.kept or (None,) * len(logprob_R)


def _add_product(total_NK: Tensor, a_NR: Tensor, b_RK: Tensor) -> None:
    """Add a product to float32 ``total_NK`` without rounding it before."""
    if a_NR.dtype == torch.float32:
        total_NK.addmm_(a_NR, b_RK)
    else:
        total_NK.add_(wide_product(a_NR, b_RK))


def _chunks(rows: int, vocabulary: int) -> list[slice]:
    return chunks(rows, max(1, _LOGITS_AT_ONCE // vocabulary))
