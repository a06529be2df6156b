"""RMSNorm, rotary position embedding, gated SiLU and token embedding: row by row, from exactly rounded operations.

Rows 16 bits wide are widened to float32 and rounded where the Triton kernels round them: the normalised value before
the weight multiplies it, silu before ``up`` does, each product of a rotation, and every result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zerogap.ops.portable.elementwise import sigmoid, tree_sum, wide


def rms_norm(x: Tensor, weight_K: Tensor, eps: float) -> Tensor:
    """Return ``x / sqrt(mean(x^2) + eps) * weight_K`` over the last dimension (arXiv 1910.07467), shape of ``x``.

    The normalised value is rounded before the weight multiplies it, as the Hugging Face models do.
    """
    return _RMSNorm.apply(x, weight_K, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_K: Tensor, eps: float) -> Tensor:
        wide_x = wide(x)
        scale = tree_sum(wide_x * wide_x).div_(x.shape[-1]).add_(eps).sqrt_().reciprocal_().unsqueeze(-1)
        ctx.save_for_backward(x, weight_K, scale)
        return (wide_x * scale).to(x.dtype).mul_(weight_K)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight_K, scale = (wide(saved) for saved in ctx.saved_tensors)
        grad = wide(grad)
        normal = x * scale
        grad_normal = grad * weight_K
        grad_x = (grad_normal - normal * (grad_normal * normal).mean(-1, keepdim=True)) * scale
        grad_weight = (grad * normal).flatten(0, -2).sum(0)
        return grad_x, grad_weight, None


def rotary(x_RHD: Tensor, cos_RD: Tensor, sin_RD: Tensor) -> Tensor:
    """Rotate the halves of each head by its row's angles (arXiv 2104.09864, the layout of the Hugging Face models).

    Args:
        x_RHD: queries or keys [R, H, D].
        cos_RD: cosines of the first half's angles [R, D/2]; the second half has the same.
        sin_RD: sines, likewise.
    """
    return _Rotary.apply(x_RHD, cos_RD, sin_RD)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RHD: Tensor, cos_RD: Tensor, sin_RD: Tensor) -> Tensor:
        ctx.save_for_backward(cos_RD, sin_RD)
        return _rotate(x_RHD, cos_RD.unsqueeze(1), sin_RD.unsqueeze(1))

    @staticmethod
    def backward(ctx: Any, grad_RHD: Tensor) -> tuple[Tensor, None, None]:
        cos_RD, sin_RD = ctx.saved_tensors
        # The inverse of a rotation (times the scale of yarn) is the rotation by the negative angle.
        return _rotate(grad_RHD, cos_RD.unsqueeze(1), -sin_RD.unsqueeze(1)), None, None


def _rotate(x_RHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x_RHD.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def silu_mul(gate_RI: Tensor, up_RI: Tensor) -> Tensor:
    """Return ``silu(gate) * up``, the gated activation of SwiGLU (arXiv 2002.05202), shape [R, I]."""
    return _SiluMul.apply(gate_RI, up_RI)


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_RI: Tensor, up_RI: Tensor) -> Tensor:
        ctx.save_for_backward(gate_RI, up_RI)
        wide_gate = wide(gate_RI)
        return sigmoid(wide_gate).mul_(wide_gate).to(gate_RI.dtype).mul_(up_RI)

    @staticmethod
    def backward(ctx: Any, grad_RI: Tensor) -> tuple[Tensor, Tensor]:
        gate_RI, up_RI = (wide(saved) for saved in ctx.saved_tensors)
        grad_RI = wide(grad_RI)
        slope = torch.sigmoid(gate_RI)
        silu = gate_RI * slope
        return grad_RI * up_RI * (slope + silu * (1.0 - slope)), grad_RI * silu


def embedding(ids_R: Tensor, weight_VK: Tensor) -> Tensor:
    """Return the rows of ``weight_VK`` that ``ids_R`` names, [R, K]; the gradient adds rows up in a fixed order."""
    return _Embedding.apply(ids_R, weight_VK)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids_R: Tensor, weight_VK: Tensor) -> Tensor:
        ctx.save_for_backward(ids_R)
        ctx.shape = weight_VK.shape
        return weight_VK.index_select(0, ids_R)

    @staticmethod
    def backward(ctx: Any, grad_RK: Tensor) -> tuple[None, Tensor]:
        (ids_R,) = ctx.saved_tensors
        grad_RK = wide(grad_RK)
        return None, grad_RK.new_zeros(ctx.shape).index_add_(0, ids_R, grad_RK)
