"""Linear layers: the forward by the kernels over packed weights, the backward by the library."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import zerogap_kernels as kernels
from zerogap.ops.native.packed import packed, plain, rows


def linear(x_RK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, segments: int = 1) -> Tensor:
    """Return ``x_RK @ weight_NK.T + bias_N``; see ``zerogap.ops.portable.linear``."""
    return _Linear.apply(x_RK, weight_NK, bias_N, segments)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, segments: int) -> Tensor:
        ctx.save_for_backward(x_RK, weight_NK)
        ctx.has_bias = bias_N is not None
        y_RN = x_RK.new_empty(len(x_RK), len(weight_NK))
        bias = None if bias_N is None else plain(bias_N)
        kernels.linear(rows(x_RK), packed(weight_NK, segments), bias, y_RN, torch.get_num_threads())
        return y_RN

    @staticmethod
    def backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x_RK, weight_NK = ctx.saved_tensors
        grad_x = grad_RN @ weight_NK if ctx.needs_input_grad[0] else None
        grad_weight = grad_RN.T @ x_RK if ctx.needs_input_grad[1] else None
        grad_bias = grad_RN.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None
