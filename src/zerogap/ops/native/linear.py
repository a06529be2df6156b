"""Linear layers: the forward by the kernels over packed weights, the backward by kernels and library."""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from zerogap.ops.adding import sum_so_far
from zerogap.ops.native import calls as kernels
from zerogap.ops.native.packed import computed_with, packed, plain, rows
from zerogap.ops.native.recipe import recipe_of


def linear(x_RK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, segments: int = 1) -> Tensor:
    """Return ``x_RK @ weight_NK.T + bias_N``; see ``zerogap.ops.portable.linear``."""
    return _Linear.apply(x_RK, weight_NK, bias_N, segments)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, segments: int) -> Tensor:
        recipe = recipe_of(x_RK)
        ctx.save_for_backward(weight_NK, *recipe.inputs)
        ctx.compute = recipe.compute
        ctx.has_bias = bias_N is not None
        y_RN = kernels.empty(len(x_RK), len(weight_NK))
        bias = None if bias_N is None else plain(bias_N)
        kernels.linear(rows(x_RK), packed(weight_NK, segments), bias, y_RN, torch.get_num_threads())
        return y_RN

    @staticmethod
    def backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        weight_NK, *kept = ctx.saved_tensors
        grad_x = times_weight(grad_RN, weight_NK) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            added = sum_so_far(weight_NK)
            if added is not None:
                added.addmm_(grad_RN.T, ctx.compute(*kept))
            else:
                grad_weight = torch.mm(grad_RN.T, ctx.compute(*kept), out=kernels.empty(*weight_NK.shape))
        grad_bias = grad_RN.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None


def times_weight(grad_RN: Tensor, weight_NK: Tensor) -> Tensor:
    """Return ``grad_RN @ weight_NK``: the forward's kernel over the transposed weight, which is packed on the way.

    A weight that is rounded in the forward is so here: this is the gradient of what was computed.
    """
    grad_RK = kernels.empty(len(grad_RN), weight_NK.shape[1])
    threads = torch.get_num_threads()
    values = computed_with(weight_NK)
    scratch = _transposed(weight_NK.shape[1], weight_NK.shape[0], values.dtype, threading.get_ident())
    kernels.call(scratch.repack, values.T, threads)
    kernels.linear(rows(grad_RN), scratch, None, grad_RK, threads)
    return grad_RK


@lru_cache(maxsize=16)
def _transposed(out_features: int, in_features: int, dtype: torch.dtype, thread: int) -> Any:
    """Return packed memory that is kept for a shape and thread: fresh pages would cost more than packing."""
    return kernels.pack(torch.zeros(1, 1, dtype=dtype).expand(out_features, in_features), 1, 1)
