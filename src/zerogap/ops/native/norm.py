"""RMSNorm, gated SiLU and token embedding by the kernels, forward and backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from zerogap.ops.adding import sum_so_far
from zerogap.ops.native import calls as kernels
from zerogap.ops.native.packed import plain, rows, table
from zerogap.ops.native.recipe import noted


def rms_norm(x: Tensor, weight_K: Tensor, eps: float) -> Tensor:
    """Return ``x / sqrt(mean(x^2) + eps) * weight_K`` over the last dimension."""
    return noted(_RMSNorm.apply(x, weight_K, eps), partial(_normal, eps=eps), x, weight_K)


def _normal(x: Tensor, weight_K: Tensor, eps: float) -> Tensor:
    y = kernels.empty(*x.shape)
    kernels.rms_norm(_as_rows(x), plain(weight_K), eps, _as_rows(y), torch.get_num_threads())
    return y


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_K: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight_K)
        ctx.eps = eps
        return _normal(x, weight_K, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight_K = ctx.saved_tensors
        return *_norm_backward(x, weight_K, ctx.eps, grad), None


def _norm_backward(x: Tensor, weight_K: Tensor, eps: float, grad: Tensor) -> tuple[Tensor, Tensor]:
    grad_x, grad_weight = kernels.empty(*x.shape), torch.zeros_like(weight_K)
    kernels.rms_norm_backward(
        _as_rows(x), plain(weight_K), eps, _as_rows(grad), _as_rows(grad_x), grad_weight, False,
        torch.get_num_threads(),
    )  # fmt: skip
    return grad_x, grad_weight


def add_rms_norm(x_RK: Tensor, residual_RK: Tensor, weight_K: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return ``x + residual`` and its `rms_norm`."""
    sum_RK, normal_RK = _AddRMSNorm.apply(x_RK, residual_RK, weight_K, eps)
    return sum_RK, noted(normal_RK, partial(_normal, eps=eps), sum_RK, weight_K)


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RK: Tensor, residual_RK: Tensor, weight_K: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        sum_RK = torch.add(x_RK, residual_RK, out=kernels.empty(*x_RK.shape))
        ctx.save_for_backward(sum_RK, weight_K)
        ctx.eps = eps
        return sum_RK, _normal(sum_RK, weight_K, eps)

    @staticmethod
    def backward(ctx: Any, grad_sum_RK: Tensor, grad_RK: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        sum_RK, weight_K = ctx.saved_tensors
        grad_x, grad_weight = _norm_backward(sum_RK, weight_K, ctx.eps, grad_RK)
        grad_x += grad_sum_RK
        return grad_x, grad_x, grad_weight, None


def silu_mul(gate_RI: Tensor, up_RI: Tensor) -> Tensor:
    """Return ``silu(gate) * up``, shape [R, I]."""
    return noted(_SiluMul.apply(gate_RI, up_RI), _gated, gate_RI, up_RI)


def _gated(gate_RI: Tensor, up_RI: Tensor) -> Tensor:
    y_RI = kernels.empty(*gate_RI.shape)
    kernels.silu_mul(rows(gate_RI), rows(up_RI), y_RI, torch.get_num_threads())
    return y_RI


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_RI: Tensor, up_RI: Tensor) -> Tensor:
        ctx.save_for_backward(gate_RI, up_RI)
        return _gated(gate_RI, up_RI)

    @staticmethod
    def backward(ctx: Any, grad_RI: Tensor) -> tuple[Tensor, Tensor]:
        gate_RI, up_RI = ctx.saved_tensors
        grad_gate, grad_up = kernels.empty(*grad_RI.shape), kernels.empty(*grad_RI.shape)
        kernels.silu_mul_backward(
            rows(gate_RI), rows(up_RI), rows(grad_RI), grad_gate, grad_up, torch.get_num_threads()
        )
        return grad_gate, grad_up


def embedding(ids_R: Tensor, weight_VK: Tensor) -> Tensor:
    """Return the rows of ``weight_VK`` that ``ids_R`` names, [R, K]; the gradient adds rows up in a fixed order."""
    return _Embedding.apply(ids_R, weight_VK)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids_R: Tensor, weight_VK: Tensor) -> Tensor:
        ctx.save_for_backward(ids_R, weight_VK)
        y_RK = kernels.empty(len(ids_R), weight_VK.shape[1])
        kernels.embedding(ids_R, rows(table(weight_VK)), y_RK, torch.get_num_threads())
        return y_RK

    @staticmethod
    def backward(ctx: Any, grad_RK: Tensor) -> tuple[None, Tensor | None]:
        ids_R, weight_VK = ctx.saved_tensors
        added = sum_so_far(weight_VK)
        grad_weight = kernels.empty(*weight_VK.shape).zero_() if added is None else added
        kernels.embedding_backward(ids_R, rows(grad_RK), grad_weight, torch.get_num_threads())
        return None, grad_weight if added is None else None


def _as_rows(x: Tensor) -> Tensor:
    return rows(x.flatten(0, -2)) if x.dim() != 2 else rows(x)
