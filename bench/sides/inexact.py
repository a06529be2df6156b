"""torch's own ops in our engine and trainer: what exactness costs, or gains, with everything else the same.

They break the row law; this lives here only, to be timed against the exact ones. Whatever is not named below is the
backend's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from zerogap.models import decoder, rows
from zerogap.ops import portable
from zerogap.ops.portable import Chunk, SamplerRows, TokenLogprobs


@dataclass(frozen=True)
class AttentionPlan:
    """S sequences padded to Q rows and L keys.

    Attributes:
        slots_SL: slot of each absolute position; past the end the sequence's first.
        place_R: where row r stands in the flattened [S, Q].
        visible: bool [S, 1, Q, L], True where a row may look; None if plain causal attention says the same.
        shape: (S, Q).
    """

    slots_SL: Tensor
    place_R: Tensor
    visible: Tensor | None
    shape: tuple[int, int]

    @staticmethod
    def build(chunks: Sequence[Chunk], page_size: int) -> AttentionPlan:
        start = torch.tensor([chunk.start for chunk in chunks])
        count = torch.tensor([chunk.count for chunk in chunks])
        length = start + count
        longest, most = int(length.max()), int(count.max())
        table = torch.zeros(len(chunks), -(-longest // page_size), dtype=torch.int64)
        for row, chunk in zip(table, chunks, strict=True):
            used = -(-(chunk.start + chunk.count) // page_size)
            row[:used] = torch.tensor(list(chunk.block_table[:used]))
        position = torch.arange(longest)
        position_SL = torch.where(position < length[:, None], position, 0)
        slots = table.gather(1, position_SL // page_size) * page_size + position_SL % page_size
        offset = torch.arange(most)
        real_SQ = offset < count[:, None]
        place_R = real_SQ.flatten().nonzero().squeeze(1)
        plain = bool((start == 0).all()) and bool((count == most).all())
        visible = None if plain else (position <= (start[:, None] + offset)[..., None]).unsqueeze(1)
        return AttentionPlan(slots, place_R, visible, (len(chunks), most))


def attention(q_RHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    sequences, most = plan.shape
    padded = q_RHD.new_zeros(sequences * most, *q_RHD.shape[1:]).index_copy(0, plan.place_R, q_RHD)
    q = padded.view(sequences, most, *q_RHD.shape[1:]).transpose(1, 2)
    slots = plan.slots_SL.flatten()
    k, v = (x.index_select(0, slots).view(*plan.slots_SL.shape, *x.shape[1:]).transpose(1, 2) for x in (k_SGD, v_SGD))
    out = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=plan.visible, is_causal=plan.visible is None and most > 1, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2).flatten(0, 1).index_select(0, plan.place_R)


def linear(x_RK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, segments: int = 1) -> Tensor:
    return functional.linear(x_RK, weight_NK, bias_N)


def rms_norm(x: Tensor, weight_K: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, weight_K.shape, weight_K, eps)


def rotary(x_RHD: Tensor, cos_RD: Tensor, sin_RD: Tensor) -> Tensor:
    first, second = x_RHD.chunk(2, dim=-1)
    cos, sin = cos_RD.unsqueeze(1), sin_RD.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def silu_mul(gate_RI: Tensor, up_RI: Tensor) -> Tensor:
    return functional.silu(gate_RI) * up_RI


def embedding(ids_R: Tensor, weight_VK: Tensor) -> Tensor:
    return functional.embedding(ids_R, weight_VK)


@dataclass(frozen=True)
class Distribution:
    """Log-probs of all tokens."""

    logprob_RV: Tensor

    def logprobs_of(self, token_R: Tensor) -> Tensor:
        return self.logprob_RV.gather(1, token_R.unsqueeze(1)).squeeze(1)


def log_distribution(logits_RV: Tensor, settings: SamplerRows) -> Distribution:
    _plain_sampling(settings)
    return Distribution(torch.log_softmax(logits_RV, -1))


def draw(distribution: Distribution, uniform_R: Tensor) -> Tensor:
    return torch.multinomial(distribution.logprob_RV.exp(), 1).squeeze(1)


def token_logprobs(
    hidden_RK: Tensor, lm_head_VK: Tensor, target_R: Tensor, settings: SamplerRows, want_kept: bool = False
) -> TokenLogprobs:
    _plain_sampling(settings)
    assert not want_kept
    logprob_RV = torch.log_softmax(functional.linear(hidden_RK, lm_head_VK), -1)
    with torch.no_grad():
        entropy_R = -(logprob_RV.exp() * logprob_RV).sum(-1)
    return TokenLogprobs(logprob_RV.gather(1, target_R.unsqueeze(1)).squeeze(1), entropy_R)


def _plain_sampling(settings: SamplerRows) -> None:
    plain = (settings.temperature_R == 1) & (settings.top_k_R == 0) & (settings.top_p_R == 1) & (settings.min_p_R == 0)
    assert not settings.suppressed, _PLAIN_ONLY
    assert bool(plain.all()), _PLAIN_ONLY


_PLAIN_ONLY = "torch's own ops are timed with plain sampling only"


class Ops:
    """The names above in front of a backend's."""

    __name__ = "torch's own"

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def __getattr__(self, name: str) -> Any:
        return globals()[name] if name in _NAMES else getattr(self.backend, name)


_NAMES = (
    "AttentionPlan",
    "attention",
    "draw",
    "embedding",
    "linear",
    "log_distribution",
    "rms_norm",
    "rotary",
    "silu_mul",
    "token_logprobs",
)


def install() -> None:
    """Put torch's own ops in the place of the exact ones in decoder, sampler and trainer of this process."""
    from zerogap.engine import sampler
    from zerogap.trainer import scoring

    for module in (decoder, rows, sampler, scoring):
        module.ops = Ops(portable)  # type: ignore[attr-defined]
