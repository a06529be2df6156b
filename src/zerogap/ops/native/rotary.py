"""Rotary position embedding by the kernels, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zerogap.ops.native import calls as kernels
from zerogap.ops.native.packed import heads, plain


def rotary(x_RHD: Tensor, cos_RD: Tensor, sin_RD: Tensor) -> Tensor:
    """Rotate the halves of each head by its row's angles; see ``zerogap.ops.portable.rotary``."""
    return _Rotary.apply(x_RHD, cos_RD, sin_RD)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RHD: Tensor, cos_RD: Tensor, sin_RD: Tensor) -> Tensor:
        ctx.save_for_backward(cos_RD, sin_RD)
        return _rotate(x_RHD, cos_RD, sin_RD, inverse=False)

    @staticmethod
    def backward(ctx: Any, grad_RHD: Tensor) -> tuple[Tensor, None, None]:
        # The inverse of a rotation (times the scale of yarn) is the rotation by the negative angle.
        cos_RD, sin_RD = ctx.saved_tensors
        return _rotate(grad_RHD, cos_RD, sin_RD, inverse=True), None, None


def _rotate(x_RHD: Tensor, cos_RD: Tensor, sin_RD: Tensor, inverse: bool) -> Tensor:
    out_RHD = kernels.empty(*x_RHD.shape)
    angles = (plain(cos_RD).contiguous(), plain(sin_RD).contiguous())
    kernels.rotary(heads(x_RHD), torch.arange(len(x_RHD)), *angles, out_RHD, inverse, torch.get_num_threads())
    return out_RHD
