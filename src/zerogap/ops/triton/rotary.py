"""Rotary position embedding on a GPU, alone or after the RMSNorm of each head (QK-norm).

Rounding points: those of ``rms_norm``; then each product with a cosine or sine, and their sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zerogap.ops.triton.aot import KernelConfig
from zerogap.ops.triton.elementwise import levels, rounded
from zerogap.ops.triton.norm import norm_backward, row_scale, row_tile
from zerogap.ops.triton.run import DTYPES, row_config, run

_TILE = 1024  # elements that one program holds
_WIDTHS = (128, 64, 80, 96, 256)  # that are built ahead of time in tests


def rotary(x_RHD: Tensor, cos_RD: Tensor, sin_RD: Tensor) -> Tensor:
    """Rotate the halves of each head by its row's angles (arXiv 2104.09864, the layout of the Hugging Face models).

    Args:
        x_RHD: queries or keys [R, H, D].
        cos_RD: cosines of the first half's angles [R, D/2]; the second half has the same.
        sin_RD: sines, likewise.
    """
    return _Rotary.apply(x_RHD, cos_RD, sin_RD)


def qk_norm_rotary(x_RHD: Tensor, weight_D: Tensor, eps: float, cos_RD: Tensor, sin_RD: Tensor) -> Tensor:
    """Return ``rotary(rms_norm(x, weight, eps), cos, sin)`` in one pass: the bits of the two ops."""
    return _QKNormRotary.apply(x_RHD, weight_D, eps, cos_RD, sin_RD)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RHD: Tensor, cos_RD: Tensor, sin_RD: Tensor) -> Tensor:
        ctx.save_for_backward(cos_RD, sin_RD)
        return rotate(x_RHD, None, 0.0, cos_RD, sin_RD)[0]

    @staticmethod
    def backward(ctx: Any, grad_RHD: Tensor) -> tuple[Tensor, None, None]:
        cos_RD, sin_RD = ctx.saved_tensors
        return rotate(grad_RHD, None, 0.0, cos_RD, -sin_RD)[0], None, None


class _QKNormRotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RHD: Tensor, weight_D: Tensor, eps: float, cos_RD: Tensor, sin_RD: Tensor) -> Tensor:
        out_RHD, scale = rotate(x_RHD, weight_D, eps, cos_RD, sin_RD)
        ctx.save_for_backward(x_RHD, weight_D, scale, cos_RD, sin_RD)
        return out_RHD

    @staticmethod
    def backward(ctx: Any, grad_RHD: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        x_RHD, weight_D, scale, cos_RD, sin_RD = ctx.saved_tensors
        grad, _ = rotate(grad_RHD, None, 0.0, cos_RD, -sin_RD)
        grad_x, grad_weight = norm_backward(grad, None, x_RHD, weight_D, scale, ctx.needs_input_grad[1])
        return grad_x, grad_weight, None, None, None


def rotate(x_RHD: Tensor, weight_D: Tensor | None, eps: float, cos_RD: Tensor, sin_RD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rotated heads, normalised before if there is a weight, and each head's 1 / root, without autograd."""
    rows, heads, width = x_RHD.shape
    x_RHD = x_RHD.contiguous()
    out_RHD = torch.empty_like(x_RHD)
    scale = torch.empty(rows * heads if weight_D is not None else 1, dtype=torch.float32, device=x_RHD.device)
    config = rotary_config(width, x_RHD.dtype, weight_D is not None)
    run(
        config,
        (triton.cdiv(rows * heads, config.constexprs["ROWS"]),),
        x_RHD,
        x_RHD if weight_D is None else weight_D,
        cos_RD.to(x_RHD.dtype).contiguous(),
        sin_RD.to(x_RHD.dtype).contiguous(),
        out_RHD,
        scale,
        rows * heads,
        heads,
        eps,
    )
    return out_RHD, scale


@triton.jit(do_not_specialize=["rows", "heads"])
def rotary_kernel(
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    scale_ptr,
    rows,
    heads,
    eps,
    NORM: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Rotate ROWS of the ``rows`` heads [rows, WIDTH]; ``heads`` in a row share their angles."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, HALF)
    inside = (row < rows)[:, None] & (column < WIDTH // 2)[None, :]
    place = row[:, None] * WIDTH + column[None, :]
    dtype = x_ptr.dtype.element_ty
    first = tl.load(x_ptr + place, inside, 0.0).to(tl.float32)
    second = tl.load(x_ptr + place + WIDTH // 2, inside, 0.0).to(tl.float32)
    if NORM:
        whole = tl.arange(0, BLOCK)
        all_inside = (row < rows)[:, None] & (whole < WIDTH)[None, :]
        x = tl.load(x_ptr + row[:, None] * WIDTH + whole[None, :], all_inside, 0.0).to(tl.float32)
        scale = row_scale(x, eps, WIDTH, LEVELS)
        tl.store(scale_ptr + row, scale, row < rows)
        weight = tl.load(weight_ptr + column, column < WIDTH // 2, 0.0).to(tl.float32)
        first = rounded(rounded(first * scale[:, None], dtype) * weight[None, :], dtype)
        weight = tl.load(weight_ptr + column + WIDTH // 2, column < WIDTH // 2, 0.0).to(tl.float32)
        second = rounded(rounded(second * scale[:, None], dtype) * weight[None, :], dtype)
    angle = (row // heads)[:, None] * (WIDTH // 2) + column[None, :]
    cos = tl.load(cos_ptr + angle, inside, 0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, inside, 0.0).to(tl.float32)
    tl.store(out_ptr + place, rounded(first * cos, dtype) - rounded(second * sin, dtype), inside)
    tl.store(out_ptr + place + WIDTH // 2, rounded(second * cos, dtype) + rounded(first * sin, dtype), inside)


@cache
def rotary_config(width: int, dtype: torch.dtype, norm: bool) -> KernelConfig:
    """Return the kernel's configuration for heads of ``width``."""
    pointers = "x_ptr weight_ptr cos_ptr sin_ptr out_ptr scale_ptr:fp32"
    tile = {"NORM": norm, "HALF": 1 << levels(width // 2), **row_tile(width, _TILE)}
    return row_config(rotary_kernel, "rotary", dtype, pointers, "rows:i32 heads:i32 eps:fp32", tile)


def _kernels() -> Iterator[KernelConfig]:
    for dtype in DTYPES:
        for width in _WIDTHS if dtype == torch.bfloat16 else _WIDTHS[:1]:
            yield from (rotary_config(width, dtype, norm) for norm in (False, True))


KERNELS = list(_kernels())
