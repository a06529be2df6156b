"""From hidden rows to tokens and their log-probs by the kernels: one call draws, one scores, with the same bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zerogap.ops.adding import sum_so_far
from zerogap.ops.native import calls as kernels
from zerogap.ops.native.packed import computed_with, packed, rows
from zerogap.ops.portable.kept import ID_BYTES, bitmask_bytes
from zerogap.ops.portable.logprob import TokenLogprobs
from zerogap.ops.portable.sampling import Sampled, SamplerRows

_BACKWARD_ROWS = 256  # whose gradients of logits exist at once, where the logits are computed again

# Memory for logits that a forward keeps for its backward, in bytes: 2,729 rows of 49,152 tokens, 768 of 151,936. The
# backward turns them into gradients in place; logits of further rows it computes again, with the same bits.
KEPT_LOGITS_BYTES = 512 << 20


def sample(
    hidden_RK: Tensor, lm_head_VK: Tensor, settings: SamplerRows, uniform_R: Tensor, top: list[int] | None = None
) -> Sampled:
    """Draw each row's next token from its hidden row; see ``zerogap.ops.portable.sample``."""
    count = len(hidden_RK)
    token_R, logprob_R = torch.empty(count, dtype=torch.int64), torch.empty(count)
    wanted: dict[str, Tensor] = {}
    if top is not None:
        width = min(max(top), len(lm_head_VK))
        wanted = {
            "top_count": torch.tensor(top).clamp(max=width),
            "top_ids": torch.empty(count, width, dtype=torch.int64),
            "top_logprobs": torch.empty(count, width),
        }
    kernels.sample(
        rows(hidden_RK), packed(lm_head_VK), uniform_R, *_filters(settings), token_R, logprob_R,
        torch.get_num_threads(), **_limits(settings), **wanted,
    )  # fmt: skip
    if top is None:
        return Sampled(token_R, logprob_R)
    listed = zip(top, wanted["top_ids"].tolist(), wanted["top_logprobs"].tolist(), strict=True)
    tops = [_pairs(ids[:n], values[:n]) if n else None for n, ids, values in listed]
    return Sampled(token_R, logprob_R, tops)


def token_logprobs(
    hidden_RK: Tensor, lm_head_VK: Tensor, target_R: Tensor, settings: SamplerRows, want_kept: bool = False
) -> TokenLogprobs:
    """Return the log-prob of ``target_R`` under each row's distribution; see ``zerogap.ops.portable``."""
    kept: list[Tensor | None] | None = [] if want_kept else None
    mass_R = torch.empty(len(hidden_RK)) if settings.kept is None else None
    wants_grad = torch.is_grad_enabled() and (hidden_RK.requires_grad or lm_head_VK.requires_grad)
    keep = _rows_to_keep(len(hidden_RK), len(lm_head_VK)) if wants_grad else 0
    logprob_R, entropy_R = _TokenLogprobs.apply(hidden_RK, lm_head_VK, target_R, settings, kept, mass_R, keep)
    return TokenLogprobs(logprob_R, entropy_R, None if kept is None else tuple(kept), mass_R)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RK: Tensor,
        lm_head_VK: Tensor,
        target_R: Tensor,
        settings: SamplerRows,
        kept: list[Tensor | None] | None,
        mass_R: Tensor | None,
        keep: int,
    ) -> tuple[Tensor, Tensor]:
        count, vocabulary = len(hidden_RK), len(lm_head_VK)
        logprob_R, entropy_R, peak_R, total_R = (torch.empty(count) for _ in range(4))
        filtered = settings.kept is None and _has_filters(settings)
        wanted = {"entropy": entropy_R, "peak": peak_R, "total": total_R}
        if mass_R is not None:
            wanted["mass"] = mass_R
        sets: tuple[Tensor | None, ...] = settings.kept or (None,) * count
        if filtered:
            wanted["kept_bits"] = torch.zeros(count, bitmask_bytes(vocabulary), dtype=torch.uint8)
            wanted["kept_count"] = torch.empty(count, dtype=torch.int64)
        logits = kernels.empty(keep, _table_width(vocabulary)) if keep else None
        for part, table in ((slice(0, keep), {"logits": logits}), (slice(keep, count), {})):
            if part.start == part.stop:
                continue
            some = settings if part.stop - part.start == count else settings[part]
            kernels.token_logprobs(
                rows(hidden_RK[part]), packed(lm_head_VK), target_R[part], *_filters(some), logprob_R[part],
                torch.get_num_threads(), **_limits(some), **table, **{name: x[part] for name, x in wanted.items()},
            )  # fmt: skip
        if filtered:
            counts = wanted["kept_count"].tolist()
            sets = tuple(_stored(*pair, vocabulary) for pair in zip(wanted["kept_bits"], counts, strict=True))
        if kept is not None:
            kept.extend(sets)
        ctx.save_for_backward(hidden_RK, lm_head_VK, target_R, peak_R, total_R)
        ctx.settings = settings.replaying(sets) if filtered else settings
        ctx.logits = logits
        ctx.mark_non_differentiable(entropy_R)
        return logprob_R, entropy_R

    @staticmethod
    def backward(ctx: Any, grad_R: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_RK, lm_head_VK, target_R, peak_R, total_R = ctx.saved_tensors
        count, vocabulary = len(hidden_RK), len(lm_head_VK)
        width = _table_width(vocabulary)
        logits, ctx.logits = ctx.logits, None  # overwritten here: a second backward computes the logits again
        keep = 0 if logits is None else len(logits)
        grad_hidden = kernels.empty(*hidden_RK.shape)
        added = sum_so_far(lm_head_VK)
        grad_head = kernels.empty(*lm_head_VK.shape) if added is None else added
        if not count and added is None:
            grad_head.zero_()
        # Of a rounded head the gradient of the rows is that of the values computed with, widened once.
        head_VK = computed_with(lm_head_VK).float()
        scratch = kernels.empty(min(count - keep, _BACKWARD_ROWS), width)
        for start in range(0, count, _BACKWARD_ROWS):
            part = slice(start, min(start + _BACKWARD_ROWS, count))
            settings = ctx.settings[part]
            in_place = start < keep
            table = logits[part] if logits is not None and in_place else scratch[: part.stop - part.start]
            grad_logits = table[:, :vocabulary]
            kernels.token_logprobs_backward(
                rows(hidden_RK[part]), packed(lm_head_VK), target_R[part], settings.temperature_R, peak_R[part],
                total_R[part], grad_R[part].contiguous(), grad_logits, torch.get_num_threads(),
                **({} if in_place else _limits(settings)), in_place=in_place,
            )  # fmt: skip
            torch.mm(grad_logits, head_VK, out=grad_hidden[part])
            if start == 0 and added is None:
                torch.mm(grad_logits.T, hidden_RK[part], out=grad_head)
            else:
                grad_head.addmm_(grad_logits.T, hidden_RK[part])
        return grad_hidden, grad_head if added is None else None, None, None, None, None, None


def _rows_to_keep(count: int, vocabulary: int) -> int:
    """Return how many rows' logits the forward keeps: all, or as many whole parts of the backward as may be held."""
    most = KEPT_LOGITS_BYTES // (_table_width(vocabulary) * 4)
    return count if count <= most else most // _BACKWARD_ROWS * _BACKWARD_ROWS


def _table_width(vocabulary: int) -> int:
    """Return the floats of a row of logits: rows of whole pages would fall on the same lines of the caches."""
    return -(-vocabulary // 1024) * 1024 + 16


def _filters(settings: SamplerRows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return settings.temperature_R, settings.top_k_R, settings.top_p_R, settings.min_p_R


def _has_filters(settings: SamplerRows) -> bool:
    return bool(((settings.top_k_R > 0) | (settings.top_p_R < 1) | (settings.min_p_R > 0)).any())


def _limits(settings: SamplerRows) -> dict[str, Any]:
    """Return suppressed tokens and replayed kept sets as the kernels take them."""
    limits: dict[str, Any] = {}
    if settings.suppressed:
        ids_of = dict(settings.suppressed)
        counts = torch.tensor([0, *(len(ids_of.get(row, ())) for row in range(len(settings)))])
        ids = [token for row in range(len(settings)) for token in ids_of.get(row, ())]
        limits = {"suppressed_start": counts.cumsum(0), "suppressed": torch.tensor(ids, dtype=torch.int64)}
    if settings.kept is not None:
        limits["replay"] = [
            kept if kept is None or kept.dtype in (torch.uint8, torch.int32) else kept.to(torch.int32)
            for kept in settings.kept
        ]
    return limits


def _stored(bits: Tensor, count: int, vocabulary: int) -> Tensor | None:
    """Return a kept set to be held (``zerogap.ops.portable.kept``)."""
    if count == vocabulary:
        return None
    if ID_BYTES * count > len(bits):
        return bits.clone()
    ids = torch.empty(count, dtype=torch.int32)
    kernels.kept_ids(bits, ids)
    return ids


def _pairs(ids: list[int], values: list[float]) -> tuple[tuple[int, float], ...]:
    return tuple((token, value) for token, value in zip(ids, values, strict=True) if token >= 0)
