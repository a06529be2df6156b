"""Attention by the kernels: over the engine's pages, or over the packed rows of training, with the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerogap.ops.native import calls as kernels
from zerogap.ops.native.packed import heads
from zerogap.ops.native.plan import native_plan
from zerogap.ops.native.program import compile_program
from zerogap.ops.plan import AttentionPlan
from zerogap.ops.record import Recording


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
        kernels.call(self.cache.store, layer, slots_R, heads(k_RGD), heads(v_RGD))
        held = LayerKV(self.cache, layer)
        return held, held

    @staticmethod
    def compile_program(recording: Recording) -> Any:
        """Return the ``Program`` of a recorded forward over such a memory, or None."""
        return compile_program(recording)

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
        out_RHD = kernels.empty(*q_RHD.shape)
        kernels.attention(
            heads(q_RHD), self.cache, self.layer, native_plan(plan), scale, out_RHD, None, torch.get_num_threads()
        )
        return out_RHD


def attention(q_RHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """Return softmax(q k^T * scale) v over each row's own earlier keys; see ``zerogap.ops.portable.attention``."""
    return _Attention.apply(q_RHD, k_SGD, v_SGD, plan, scale)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_RHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        out_RHD = kernels.empty(*q_RHD.shape)
        stats = kernels.empty(*q_RHD.shape[:2], 2)
        kernels.attention_packed(
            heads(q_RHD), heads(k_SGD), heads(v_SGD), native_plan(plan), scale, out_RHD, stats,
            torch.get_num_threads(),
        )  # fmt: skip
        ctx.save_for_backward(q_RHD, k_SGD, v_SGD, out_RHD, stats)
        ctx.plan, ctx.scale = plan, scale
        return out_RHD

    @staticmethod
    def backward(ctx: Any, grad_RHD: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q_RHD, k_SGD, v_SGD, out_RHD, stats = ctx.saved_tensors
        grad_q, grad_k, grad_v = (kernels.empty(*x.shape) for x in (q_RHD, k_SGD, v_SGD))
        kernels.attention_backward(
            heads(q_RHD), heads(k_SGD), heads(v_SGD), out_RHD, stats, heads(grad_RHD), native_plan(ctx.plan),
            ctx.scale, grad_q, grad_k, grad_v, torch.get_num_threads(),
        )  # fmt: skip
        return grad_q, grad_k, grad_v, None, None
