"""torch's own ops as a backend of our engine and trainer: what exactness costs, with everything else the same.

They break the row law, and live here only, to be timed against the exact ones.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from zerogap.ops import AttentionPlan, Sampled, SamplerRows, TokenLogprobs, backend

_ATTRIBUTE = "_padded"


@dataclass(frozen=True)
class Padded:
    """A batch's S chunks padded to Q rows and L keys.

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


def padded(plan: AttentionPlan) -> Padded:
    """Return the padded form of a plan; made once per plan."""
    held = plan.__dict__.get(_ATTRIBUTE)
    if held is None:
        held = plan.__dict__[_ATTRIBUTE] = _pad(plan)
    return held


def _pad(plan: AttentionPlan) -> Padded:
    chunks, size = plan.chunks, plan.page_size
    start = torch.tensor([chunk.start for chunk in chunks])
    count = torch.tensor([chunk.count for chunk in chunks])
    length = start + count
    longest, most = int(length.max()), int(count.max())
    table = torch.zeros(len(chunks), -(-longest // size), dtype=torch.int64)
    for row, chunk in zip(table, chunks, strict=True):
        used = -(-(chunk.start + chunk.count) // size)
        row[:used] = torch.tensor(list(chunk.block_table[:used]))
    position = torch.arange(longest)
    position_SL = torch.where(position < length[:, None], position, 0)
    slots = table.gather(1, position_SL // size) * size + position_SL % size
    offset = torch.arange(most)
    place_R = (offset < count[:, None]).flatten().nonzero().squeeze(1)
    plain = bool((start == 0).all()) and bool((count == most).all())
    visible = None if plain else (position <= (start[:, None] + offset)[..., None]).unsqueeze(1)
    return Padded(slots, place_R, visible, (len(chunks), most))


def attention(q_RHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    form = padded(plan)
    sequences, most = form.shape
    laid = q_RHD.new_zeros(sequences * most, *q_RHD.shape[1:]).index_copy(0, form.place_R, q_RHD)
    q = laid.view(sequences, most, *q_RHD.shape[1:]).transpose(1, 2)
    slots = form.slots_SL.flatten()
    k, v = (x.index_select(0, slots).view(*form.slots_SL.shape, *x.shape[1:]).transpose(1, 2) for x in (k_SGD, v_SGD))
    causal = form.visible is None and most > 1
    out = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=form.visible, is_causal=causal, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2).flatten(0, 1).index_select(0, form.place_R)


class KVMemory:
    """Keys and values of all layers by slot, as plain tensors."""

    def __init__(self, layers: int, pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype):
        self.pages = pages
        self.keys, self.values = (
            torch.zeros(layers, pages * page_size, kv_heads, head_dim, dtype=dtype) for _ in range(2)
        )

    @staticmethod
    def page_bytes(layers: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return 2 * layers * page_size * kv_heads * head_dim * dtype.itemsize

    def store(self, layer: int, slots_R: Tensor, k_RGD: Tensor, v_RGD: Tensor) -> tuple[Tensor, Tensor]:
        self.keys[layer].index_copy_(0, slots_R, k_RGD)
        self.values[layer].index_copy_(0, slots_R, v_RGD)
        return self.keys[layer], self.values[layer]

    def clear(self, pages: Sequence[int]) -> None:
        index = torch.tensor(list(pages))
        for held in (self.keys, self.values):
            held.unflatten(1, (self.pages, -1)).index_fill_(1, index, 0.0)


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


def sample(
    hidden_RK: Tensor, lm_head_VK: Tensor, settings: SamplerRows, uniform_R: Tensor, top: list[int] | None = None
) -> Sampled:
    _plain_sampling(settings)
    logprob_RV = torch.log_softmax(functional.linear(hidden_RK, lm_head_VK), -1)
    token_R1 = torch.multinomial(logprob_RV.exp(), 1)
    return Sampled(token_R1.squeeze(1), logprob_RV.gather(1, token_R1).squeeze(1))


def token_logprobs(
    hidden_RK: Tensor, lm_head_VK: Tensor, target_R: Tensor, settings: SamplerRows, want_kept: bool = False
) -> TokenLogprobs:
    _plain_sampling(settings)
    logprob_RV = torch.log_softmax(functional.linear(hidden_RK, lm_head_VK), -1)
    with torch.no_grad():
        entropy_R = -(logprob_RV.exp() * logprob_RV).sum(-1)
    return TokenLogprobs(logprob_RV.gather(1, target_R.unsqueeze(1)).squeeze(1), entropy_R)


def _plain_sampling(settings: SamplerRows) -> None:
    plain = (settings.temperature_R == 1) & (settings.top_k_R == 0) & (settings.top_p_R == 1) & (settings.min_p_R == 0)
    if settings.suppressed or not bool(plain.all()):
        raise ValueError("torch's own ops are timed with plain sampling only")


def install() -> None:
    """Let this module serve as the backend for all tensors of this process."""
    module = sys.modules[__name__]
    backend.of_dtype = lambda dtype: module
    backend.describe = lambda: "torch's own ops"
