"""Gated SiLU and token embedding on a GPU: element by element, and rows that are copied.

Rounding points of ``silu_mul``: silu, and its product with ``up``. An embedding row's gradient is the sum of its
tokens' gradients in the order of the rows, in float32, without atomics.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zerogap.ops.triton.aot import KernelConfig
from zerogap.ops.triton.elementwise import rounded, sigmoid
from zerogap.ops.triton.run import DTYPES, row_config, run

_SILU = 1024  # elements of a program
_COLUMNS = 128  # columns of an embedding row in a program


def silu_mul(gate_RI: Tensor, up_RI: Tensor) -> Tensor:
    """Return ``silu(gate) * up``, the gated activation of SwiGLU (arXiv 2002.05202), shape [R, I]."""
    return _SiluMul.apply(gate_RI, up_RI)


def embedding(ids_R: Tensor, weight_VK: Tensor) -> Tensor:
    """Return the rows of ``weight_VK`` that ``ids_R`` names, [R, K]; the gradient adds rows up in a fixed order."""
    return _Embedding.apply(ids_R, weight_VK)


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_RI: Tensor, up_RI: Tensor) -> Tensor:
        gate_RI, up_RI = gate_RI.contiguous(), up_RI.contiguous()
        ctx.save_for_backward(gate_RI, up_RI)
        out_RI = torch.empty_like(gate_RI)
        count = out_RI.numel()
        run(silu_config(gate_RI.dtype), (triton.cdiv(count, _SILU),), gate_RI, up_RI, out_RI, count)
        return out_RI

    @staticmethod
    def backward(ctx: Any, grad_RI: Tensor) -> tuple[Tensor, Tensor]:
        gate_RI, up_RI = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate_RI), torch.empty_like(up_RI)
        count = gate_RI.numel()
        config = silu_grad_config(gate_RI.dtype)
        run(config, (triton.cdiv(count, _SILU),), grad_RI.contiguous(), gate_RI, up_RI, grad_gate, grad_up, count)
        return grad_gate, grad_up


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids_R: Tensor, weight_VK: Tensor) -> Tensor:
        ctx.save_for_backward(ids_R)
        ctx.shape = weight_VK.shape
        return weight_VK.index_select(0, ids_R)

    @staticmethod
    def backward(ctx: Any, grad_RK: Tensor) -> tuple[None, Tensor]:
        (ids_R,) = ctx.saved_tensors
        rows, width = grad_RK.shape
        grad_VK = grad_RK.new_zeros(ctx.shape, dtype=torch.float32)
        ids_R, order_R = ids_R.sort(stable=True)
        grid = (rows, triton.cdiv(width, _COLUMNS))
        run(embedding_config(grad_RK.dtype), grid, ids_R, order_R, grad_RK.contiguous(), grad_VK, rows, width)
        return None, grad_VK


@triton.jit(do_not_specialize=["count"])
def silu_mul_kernel(gate_ptr, up_ptr, out_ptr, count, BLOCK: tl.constexpr):
    """Write silu(gate) * up of BLOCK elements."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    gate = tl.load(gate_ptr + place, inside, 0.0).to(tl.float32)
    up = tl.load(up_ptr + place, inside, 0.0).to(tl.float32)
    tl.store(out_ptr + place, rounded(sigmoid(gate) * gate, gate_ptr.dtype.element_ty) * up, inside)


@triton.jit(do_not_specialize=["count"])
def silu_mul_grad_kernel(grad_ptr, gate_ptr, up_ptr, grad_gate_ptr, grad_up_ptr, count, BLOCK: tl.constexpr):
    """Write the gradients of gate and up of BLOCK elements."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    grad = tl.load(grad_ptr + place, inside, 0.0).to(tl.float32)
    gate = tl.load(gate_ptr + place, inside, 0.0).to(tl.float32)
    up = tl.load(up_ptr + place, inside, 0.0).to(tl.float32)
    slope = sigmoid(gate)
    silu = slope * gate
    tl.store(grad_gate_ptr + place, grad * up * (slope + silu * (1.0 - slope)), inside)
    tl.store(grad_up_ptr + place, grad * rounded(silu, gate_ptr.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["rows", "width"])
def embedding_grad_kernel(ids_ptr, order_ptr, grad_ptr, out_ptr, rows, width, BLOCK: tl.constexpr):
    """Sum BLOCK columns of the gradients of one token id: the program of the first of equal sorted ids does it."""
    first = tl.program_id(0)
    token = tl.load(ids_ptr + first)
    before = tl.load(ids_ptr + first - 1, first > 0, -1)
    if token != before:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        total = tl.zeros([BLOCK], tl.float32)
        place = first
        same = token
        while same == token:
            row = tl.load(order_ptr + place)
            total += tl.load(grad_ptr + row * width + column, inside, 0.0).to(tl.float32)
            place += 1
            same = tl.load(ids_ptr + place, place < rows, -1)
        tl.store(out_ptr + token * width + column, total, inside)


@cache
def silu_config(dtype: torch.dtype) -> KernelConfig:
    """Return the forward kernel's configuration."""
    return row_config(silu_mul_kernel, "silu_mul", dtype, "gate_ptr up_ptr out_ptr", "count:i64", {"BLOCK": _SILU})


@cache
def silu_grad_config(dtype: torch.dtype) -> KernelConfig:
    """Return the backward kernel's configuration."""
    pointers = "grad_ptr gate_ptr up_ptr grad_gate_ptr grad_up_ptr"
    return row_config(silu_mul_grad_kernel, "silu_mul backward", dtype, pointers, "count:i64", {"BLOCK": _SILU})


@cache
def embedding_config(dtype: torch.dtype) -> KernelConfig:
    """Return the configuration of the embedding's backward kernel."""
    pointers = "ids_ptr:i64 order_ptr:i64 grad_ptr out_ptr:fp32"
    numbers = "rows:i32 width:i32"
    return row_config(embedding_grad_kernel, "embedding backward", dtype, pointers, numbers, {"BLOCK": _COLUMNS})


KERNELS = [make(dtype) for make in (silu_config, silu_grad_config, embedding_config) for dtype in DTYPES]
