"""Attention by the kernels: over the engine's pages, or over the packed rows of training, with the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import zerogap_kernels as kernels
from torch import Tensor

from zerogap.ops.native.packed import plain
from zerogap.ops.plan import AttentionPlan

_ATTRIBUTE = "_native"


class KVMemory:
    """Keys and values of all layers in pages, in the layout that the kernels read.

    Args:
        layers: decoder layers.
        pages: pages in all.
        page_size: positions per page.
        kv_heads: key/value heads.
        head_dim: elements of a head.
        dtype: float32.
    """

    def __init__(self, layers: int, pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype):
        assert dtype == torch.float32
        self.cache = kernels.Cache(layers, pages, page_size, kv_heads, head_dim)

    @staticmethod
    def page_bytes(layers: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Return the memory of one page over all layers, in bytes."""
        return kernels.Cache.page_bytes(layers, page_size, kv_heads, head_dim)

    def store(self, layer: int, slots_R: Tensor, k_RGD: Tensor, v_RGD: Tensor) -> tuple[LayerKV, LayerKV]:
        """Store the rows' keys and values; return what `attention` takes in place of all of the layer's."""
        self.cache.store(layer, slots_R, _heads(k_RGD), _heads(v_RGD))
        held = LayerKV(self.cache, layer)
        return held, held

    def clear(self, pages: Sequence[int]) -> None:
        """Zero pages in all layers."""
        self.cache.clear_pages(list(pages))


@dataclass(frozen=True)
class LayerKV:
    """One layer's keys and values in a `KVMemory`."""

    cache: Any
    layer: int

    def attention(self, q_RHD: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        """Return the attention of queries over this layer; without autograd."""
        out_RHD = q_RHD.new_empty(q_RHD.shape)
        kernels.attention(
            _heads(q_RHD), self.cache, self.layer, native_plan(plan), scale, out_RHD, None, torch.get_num_threads()
        )
        return out_RHD


def native_plan(plan: AttentionPlan) -> Any:
    """Return the kernels' form of a plan; made once per plan."""
    held = plan.__dict__.get(_ATTRIBUTE)
    if held is None:
        tables, offsets = plan.tables
        first_S = np.cumsum(plan.count_S) - plan.count_S
        held = kernels.Plan(plan.start_S, plan.count_S, first_S, offsets[:-1].copy(), tables, plan.page_size)
        plan.__dict__[_ATTRIBUTE] = held
    return held


def attention(q_RHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """Return softmax(q k^T * scale) v over each row's own earlier keys; see ``zerogap.ops.portable.attention``."""
    return _Attention.apply(q_RHD, k_SGD, v_SGD, plan, scale)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_RHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        out_RHD = q_RHD.new_empty(q_RHD.shape)
        stats = q_RHD.new_empty(*q_RHD.shape[:2], 2)
        kernels.attention_packed(
            _heads(q_RHD), _heads(k_SGD), _heads(v_SGD), native_plan(plan), scale, out_RHD, stats,
            torch.get_num_threads(),
        )  # fmt: skip
        ctx.save_for_backward(q_RHD, k_SGD, v_SGD, out_RHD, stats)
        ctx.plan, ctx.scale = plan, scale
        return out_RHD

    @staticmethod
    def backward(ctx: Any, grad_RHD: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q_RHD, k_SGD, v_SGD, out_RHD, stats = ctx.saved_tensors
        grads = tuple(x.new_empty(x.shape) for x in (q_RHD, k_SGD, v_SGD))
        kernels.attention_backward(
            _heads(q_RHD), _heads(k_SGD), _heads(v_SGD), out_RHD, stats, _heads(grad_RHD), native_plan(ctx.plan),
            ctx.scale, *grads, torch.get_num_threads(),
        )  # fmt: skip
        return *grads, None, None


def _heads(x_RHD: Tensor) -> Tensor:
    """Return heads as the kernels take them: elements of a row side by side, rows not overlapping."""
    x = plain(x_RHD)
    whole = x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2])
    return x if whole and (len(x) < 2 or x.stride(0) >= x.shape[1] * x.shape[2]) else x.contiguous()
