"""RMSNorm on a GPU, alone or after a residual addition: one program per few rows, every sum a balanced tree.

Rounding points: the residual sum, the normalised value before the weight multiplies it, the product. What lies between
is float32. A weight's gradient is summed over fixed chunks of rows and those in ascending order, without atomics.
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
from zerogap.ops.triton.elementwise import levels, rounded, tree_sum
from zerogap.ops.triton.run import DTYPES, row_config, run, warps_for

_TILE = 2048  # elements that one program holds at least
ROWS_PER_CHUNK = 128  # rows of a weight gradient's first stage
_CHUNK_COLUMNS = 64
_CHUNK_ROWS = 8
_WIDTHS = (1024, 80, 128, 2560, 8192)  # that are built ahead of time in tests


def rms_norm(x: Tensor, weight_K: Tensor, eps: float) -> Tensor:
    """Return ``x / sqrt(mean(x^2) + eps) * weight_K`` over the last dimension (arXiv 1910.07467), shape of ``x``."""
    return _RMSNorm.apply(x, weight_K, eps)


def add_rms_norm(x_RK: Tensor, residual_RK: Tensor, weight_K: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return ``x + residual``, rounded, and its ``rms_norm``: the bits of the two ops one after the other."""
    return _AddRMSNorm.apply(x_RK, residual_RK, weight_K, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_K: Tensor, eps: float) -> Tensor:
        _, out, scale_R = norm_forward(x, None, weight_K, eps)
        ctx.save_for_backward(x, weight_K, scale_R)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight_K, scale_R = ctx.saved_tensors
        return (*norm_backward(grad, None, x, weight_K, scale_R, ctx.needs_input_grad[1]), None)


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RK: Tensor, residual_RK: Tensor, weight_K: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        sum_RK, out_RK, scale_R = norm_forward(x_RK, residual_RK, weight_K, eps)
        ctx.save_for_backward(sum_RK, weight_K, scale_R)
        return sum_RK, out_RK

    @staticmethod
    def backward(ctx: Any, grad_sum: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        sum_RK, weight_K, scale_R = ctx.saved_tensors
        grad_x, grad_weight = norm_backward(grad_out, grad_sum, sum_RK, weight_K, scale_R, ctx.needs_input_grad[2])
        return grad_x, grad_x, grad_weight, None


def norm_forward(x: Tensor, residual: Tensor | None, weight_K: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return (``x`` plus residual, its norm, the reciprocal root of each row) without autograd."""
    width = x.shape[-1]
    x = x.contiguous()
    total, out = x if residual is None else torch.empty_like(x), torch.empty_like(x)
    rows = x.numel() // width
    scale_R = torch.empty(rows, dtype=torch.float32, device=x.device)
    config = norm_config(width, x.dtype, residual is not None)
    other = x if residual is None else residual.contiguous()
    run(config, _row_grid(rows, config), x, other, weight_K, total, out, scale_R, rows, eps)
    return total, out, scale_R


def norm_backward(
    grad: Tensor, grad_sum: Tensor | None, x: Tensor, weight_K: Tensor, scale_R: Tensor, want_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of a norm's input (``grad_sum``, if any, added) and, in float32, weight (if wanted)."""
    width = x.shape[-1]
    grad, x = grad.contiguous(), x.contiguous()
    grad_x = torch.empty_like(x)
    rows = len(scale_R)
    config = norm_grad_config(width, x.dtype, grad_sum is not None)
    other = grad if grad_sum is None else grad_sum.contiguous()
    run(config, _row_grid(rows, config), grad, other, x, weight_K, scale_R, grad_x, rows)
    if not want_weight:
        return grad_x, None
    partial_PK = torch.empty(triton.cdiv(rows, ROWS_PER_CHUNK), width, dtype=torch.float32, device=x.device)
    run(norm_weight_grad_config(width, x.dtype), _chunk_grid(rows, width), grad, x, scale_R, partial_PK, rows)
    return grad_x, column_sums(partial_PK)


def column_sums(x_PK: Tensor) -> Tensor:
    """Sum float32 rows, [P, K] to [K]: chunks of ``ROWS_PER_CHUNK`` rows, then chunks of those, until one is left."""
    while len(x_PK) > 1:
        rows, width = x_PK.shape
        out_PK = torch.empty(triton.cdiv(rows, ROWS_PER_CHUNK), width, dtype=torch.float32, device=x_PK.device)
        run(column_sum_config(width), _chunk_grid(rows, width), x_PK, out_PK, rows)
        x_PK = out_PK
    return x_PK[0]


def _row_grid(rows: int, config: KernelConfig) -> tuple[int, ...]:
    return (triton.cdiv(rows, config.constexprs["ROWS"]),)


def _chunk_grid(rows: int, width: int) -> tuple[int, ...]:
    return (triton.cdiv(rows, ROWS_PER_CHUNK), triton.cdiv(width, _CHUNK_COLUMNS))


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    sum_ptr,
    out_ptr,
    scale_ptr,
    rows,
    eps,
    RESIDUAL: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Normalise ROWS rows of [rows, WIDTH]; with RESIDUAL the residual is added first and the sum stored."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside, place = lines(row, column, rows, WIDTH)
    dtype = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + place, inside, 0.0).to(tl.float32)
    if RESIDUAL:
        x = rounded(x + tl.load(residual_ptr + place, inside, 0.0).to(tl.float32), dtype)
        tl.store(sum_ptr + place, x, inside)
    scale = row_scale(x, eps, WIDTH, LEVELS)
    weight = tl.load(weight_ptr + column, column < WIDTH, 0.0).to(tl.float32)
    tl.store(out_ptr + place, rounded(x * scale[:, None], dtype) * weight[None, :], inside)
    tl.store(scale_ptr + row, scale, row < rows)


@triton.jit
def lines(row, column, rows, WIDTH: tl.constexpr):
    """Return which elements of some rows and columns of [rows, WIDTH] exist, and where they lie."""
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    return inside, row[:, None] * WIDTH + column[None, :]


@triton.jit
def row_scale(x, eps, WIDTH: tl.constexpr, LEVELS: tl.constexpr):
    """Return 1 / sqrt(mean(x^2) + eps) of each row of float32 [M, 2^LEVELS], padded with 0 beyond WIDTH."""
    total = tree_sum(x * x, LEVELS)
    mean = tl.math.div_rn(total, tl.zeros_like(total) + WIDTH)
    root = tl.math.sqrt_rn(mean + eps)
    return tl.math.div_rn(tl.zeros_like(root) + 1.0, root)


@triton.jit(do_not_specialize=["rows"])
def rms_norm_grad_kernel(
    grad_ptr,
    grad_sum_ptr,
    x_ptr,
    weight_ptr,
    scale_ptr,
    grad_x_ptr,
    rows,
    RESIDUAL: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write the gradient of ROWS rows of a norm's input; with RESIDUAL the residual stream's gradient is added."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside, place = lines(row, column, rows, WIDTH)
    scale = tl.load(scale_ptr + row, row < rows, 0.0)[:, None]
    weight = tl.load(weight_ptr + column, column < WIDTH, 0.0).to(tl.float32)
    grad_normal = tl.load(grad_ptr + place, inside, 0.0).to(tl.float32) * weight[None, :]
    normal = tl.load(x_ptr + place, inside, 0.0).to(tl.float32) * scale
    total = tree_sum(grad_normal * normal, LEVELS)
    mean = tl.math.div_rn(total, tl.zeros_like(total) + WIDTH)
    grad_x = (grad_normal - normal * mean[:, None]) * scale
    if RESIDUAL:
        grad_x += tl.load(grad_sum_ptr + place, inside, 0.0).to(tl.float32)
    tl.store(grad_x_ptr + place, grad_x, inside)


@triton.jit(do_not_specialize=["rows"])
def rms_norm_weight_grad_kernel(
    grad_ptr,
    x_ptr,
    scale_ptr,
    partial_ptr,
    rows,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum gradient times normalised value over a chunk of CHUNK rows, for BLOCK columns, into its row of partials."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for step in range(CHUNK // ROWS):
        row = tl.program_id(0).to(tl.int64) * CHUNK + step * ROWS + tl.arange(0, ROWS)
        inside, place = lines(row, column, rows, WIDTH)
        scale = tl.load(scale_ptr + row, row < rows, 0.0)[:, None]
        normal = rounded(tl.load(x_ptr + place, inside, 0.0).to(tl.float32) * scale, x_ptr.dtype.element_ty)
        total += tl.load(grad_ptr + place, inside, 0.0).to(tl.float32) * normal
    _store_column_sums(total, partial_ptr, column, WIDTH, ROWS)


@triton.jit(do_not_specialize=["rows"])
def column_sum_kernel(
    x_ptr,
    out_ptr,
    rows,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum a chunk of CHUNK float32 rows, for BLOCK columns."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for step in range(CHUNK // ROWS):
        row = tl.program_id(0).to(tl.int64) * CHUNK + step * ROWS + tl.arange(0, ROWS)
        inside, place = lines(row, column, rows, WIDTH)
        total += tl.load(x_ptr + place, inside, 0.0)
    _store_column_sums(total, out_ptr, column, WIDTH, ROWS)


@triton.jit
def _store_column_sums(total, out_ptr, column, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    tl.static_assert(ROWS == 8)
    sums = tree_sum(tl.trans(total), 3)
    tl.store(out_ptr + tl.program_id(0).to(tl.int64) * WIDTH + column, sums, column < WIDTH)


def row_tile(width: int, elements: int = _TILE) -> dict[str, int]:
    """Return the tile of a kernel on rows of ``width``: a function of the width only, though no bit depends on it."""
    block = 1 << levels(width)
    return {"WIDTH": width, "BLOCK": block, "LEVELS": levels(width), "ROWS": max(1, elements // block)}


@cache
def norm_config(width: int, dtype: torch.dtype, residual: bool) -> KernelConfig:
    """Return the forward kernel's configuration."""
    pointers = "x_ptr residual_ptr weight_ptr sum_ptr out_ptr scale_ptr:fp32"
    tile = {"RESIDUAL": residual, **row_tile(width)}
    return row_config(rms_norm_kernel, "rms_norm", dtype, pointers, "rows:i32 eps:fp32", tile, _warps(tile))


@cache
def norm_grad_config(width: int, dtype: torch.dtype, residual: bool) -> KernelConfig:
    """Return the configuration of the kernel of the input's gradient."""
    pointers = "grad_ptr grad_sum_ptr x_ptr weight_ptr scale_ptr:fp32 grad_x_ptr"
    tile = {"RESIDUAL": residual, **row_tile(width)}
    return row_config(rms_norm_grad_kernel, "rms_norm backward", dtype, pointers, "rows:i32", tile, _warps(tile))


@cache
def norm_weight_grad_config(width: int, dtype: torch.dtype) -> KernelConfig:
    """Return the configuration of the first stage of the weight's gradient."""
    pointers = "grad_ptr x_ptr scale_ptr:fp32 partial_ptr:fp32"
    return row_config(
        rms_norm_weight_grad_kernel, "rms_norm weight backward", dtype, pointers, "rows:i32", _chunk_tile(width)
    )


@cache
def column_sum_config(width: int) -> KernelConfig:
    """Return the configuration of the second stage."""
    return row_config(column_sum_kernel, "column sums", torch.float32, "x_ptr out_ptr", "rows:i32", _chunk_tile(width))


def _chunk_tile(width: int) -> dict[str, int]:
    return {"WIDTH": width, "CHUNK": ROWS_PER_CHUNK, "ROWS": _CHUNK_ROWS, "BLOCK": _CHUNK_COLUMNS}


def _warps(tile: dict[str, int]) -> int:
    return warps_for(tile["BLOCK"] * tile["ROWS"])


def _kernels() -> Iterator[KernelConfig]:
    for dtype in DTYPES:
        for width in _WIDTHS if dtype == torch.bfloat16 else _WIDTHS[:1]:
            for residual in (False, True):
                yield norm_config(width, dtype, residual)
                yield norm_grad_config(width, dtype, residual)
            yield norm_weight_grad_config(width, dtype)
    yield column_sum_config(_WIDTHS[0])


KERNELS = list(_kernels())
