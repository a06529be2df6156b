"""Log-probs of given tokens, fused with the LM head: the [rows, vocabulary] table of all rows never exists."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from zerogap.ops.portable.elementwise import wide, wide_dtype
from zerogap.ops.portable.linear import pad_outputs, tiled_product
from zerogap.ops.portable.sampling import LogDistribution, Sampled, SamplerRows, draw, log_distribution, most_probable

_ROWS_AT_ONCE = 64


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-prob [R] (differentiable) and entropy [R] (not) of each row, and the kept sets if they were asked for.

    ``kept_mass_R`` is each kept set's probability before it was cut out; None from a backend that does not say.
    """

    logprob_R: Tensor
    entropy_R: Tensor
    kept: tuple[Tensor | None, ...] | None = None
    kept_mass_R: Tensor | None = None


def token_logprobs(
    hidden_RK: Tensor, lm_head_VK: Tensor, target_R: Tensor, settings: SamplerRows, want_kept: bool = False
) -> TokenLogprobs:
    """Return the log-prob of ``target_R`` under each row's distribution, as the engine would have recorded it.

    Args:
        hidden_RK: hidden rows after the final norm [R, K].
        lm_head_VK: weight of the LM head [V, K].
        target_R: token ids [R].
        settings: each row's sampler settings; a log-prob is -inf where the kept set lacks the token.
        want_kept: also return the kept sets, for replay under later weights.
    """
    kept: list[Tensor | None] | None = [] if want_kept else None
    logprob_R, entropy_R, mass_R = _TokenLogprobs.apply(hidden_RK, lm_head_VK, target_R, settings, kept)
    return TokenLogprobs(logprob_R, entropy_R, None if kept is None else tuple(kept), mass_R)


def sample(
    hidden_RK: Tensor, lm_head_VK: Tensor, settings: SamplerRows, uniform_R: Tensor, top: list[int] | None = None
) -> Sampled:
    """Draw each row's next token from its hidden row; without autograd.

    Args:
        hidden_RK: hidden rows after the final norm [R, K].
        lm_head_VK: weight of the LM head [V, K].
        settings: each row's sampler settings.
        uniform_R: float64 numbers in [0, 1), one per row.
        top: how many of the most probable tokens each row wants; None for none.
    """
    padded_NK, vocabulary = pad_outputs(wide(lm_head_VK)), len(lm_head_VK)

    def distribution_of(rows: slice) -> LogDistribution:
        return _distribution(hidden_RK[rows], padded_NK, vocabulary, settings[rows])

    return sample_by_chunk(chunks(len(hidden_RK), _ROWS_AT_ONCE), distribution_of, draw, uniform_R, top)


class Distribution(Protocol):
    """What is asked of a distribution to sample from it (`LogDistribution`; each backend has its own)."""

    @property
    def logprob_RV(self) -> Tensor:
        """Log-probs of the whole vocabulary."""
        ...

    def logprobs_of(self, token_R: Tensor) -> Tensor:
        """Return each row's log-prob of one token."""
        ...


D = TypeVar("D", bound=Distribution)


def sample_by_chunk(
    parts: Iterable[slice],
    distribution_of: Callable[[slice], D],
    draw: Callable[[D, Tensor], Tensor],
    uniform_R: Tensor,
    top: list[int] | None,
) -> Sampled:
    """Draw tokens chunk by chunk, so that the distributions of one chunk exist at a time.

    Args:
        parts: the rows of each chunk (`chunks`).
        distribution_of: makes their distributions.
        draw: draws from them, given their random numbers.
        uniform_R: of all rows.
        top: as in `sample`.
    """
    tokens, logprobs = [], []
    tops: list[tuple[tuple[int, float], ...] | None] = []
    for rows in parts:
        distribution = distribution_of(rows)
        token_R = draw(distribution, uniform_R[rows])
        tokens.append(token_R)
        logprobs.append(distribution.logprobs_of(token_R))
        if top is not None:
            logprob_RV = distribution.logprob_RV
            tops += [most_probable(logprob_RV[row], n) if n else None for row, n in enumerate(top[rows])]
    return Sampled(torch.cat(tokens), torch.cat(logprobs), None if top is None else tops)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RK: Tensor,
        lm_head_VK: Tensor,
        target_R: Tensor,
        settings: SamplerRows,
        kept: list[Tensor | None] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = wide_dtype(hidden_RK.dtype)
        logprob_R, entropy_R, mass_R = (hidden_RK.new_empty(len(hidden_RK), dtype=dtype) for _ in range(3))
        padded_NK, vocabulary = pad_outputs(wide(lm_head_VK)), len(lm_head_VK)  # a copy of the table, if any: made once
        for rows in chunks(len(hidden_RK), _ROWS_AT_ONCE):
            distribution = _distribution(hidden_RK[rows], padded_NK, vocabulary, settings[rows])
            logprob_R[rows] = distribution.logprobs_of(target_R[rows])
            entropy_R[rows] = distribution.entropy_R
            mass_R[rows] = distribution.kept_mass_R
            if kept is not None:
                kept.extend(distribution.kept_sets())
        ctx.save_for_backward(hidden_RK, lm_head_VK, target_R)
        ctx.settings = settings
        ctx.mark_non_differentiable(entropy_R, mass_R)
        return logprob_R, entropy_R, mass_R

    @staticmethod
    def backward(ctx: Any, grad_R: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        hidden_RK, lm_head_VK, target_R = (wide(saved) for saved in ctx.saved_tensors)
        temperature_R = ctx.settings.temperature_R
        slope_R = grad_R / torch.where(temperature_R == 0, 1.0, temperature_R).to(grad_R.dtype)
        grad_hidden = torch.empty_like(hidden_RK)
        grad_head = torch.zeros_like(lm_head_VK)
        padded_NK, vocabulary = pad_outputs(lm_head_VK), len(lm_head_VK)
        for rows in chunks(len(hidden_RK), _ROWS_AT_ONCE):
            distribution = _distribution(hidden_RK[rows], padded_NK, vocabulary, ctx.settings[rows])
            slope = slope_R[rows].unsqueeze(1)
            grad_logits = distribution.weights_RV.mul_(-slope / distribution.total_R.unsqueeze(1))
            grad_logits.scatter_add_(1, target_R[rows].unsqueeze(1), slope)
            grad_hidden[rows] = grad_logits @ lm_head_VK
            grad_head.addmm_(grad_logits.T, hidden_RK[rows])
        return grad_hidden, grad_head, None, None, None


def chunks(rows: int, size: int) -> list[slice]:
    """Cut ``rows`` into chunks of at most ``size``; by the row law the cut changes no bit."""
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _distribution(hidden_RK: Tensor, padded_NK: Tensor, vocabulary: int, settings: SamplerRows) -> LogDistribution:
    return log_distribution(tiled_product(wide(hidden_RK), padded_NK, segments=1)[:, :vocabulary], settings)
