"""Counter-based uniform numbers on a GPU: the words of ``zerogap.ops.portable.philox`` (Philox 4x64, 10 rounds)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from zerogap.ops.triton.aot import KernelConfig
from zerogap.ops.triton.run import run

_MULTIPLIER_0 = tl.constexpr(0xD2E7470EE14C6C93)
_MULTIPLIER_1 = tl.constexpr(0xCA5A826395121157)
_WEYL_0 = tl.constexpr(0x9E3779B97F4A7C15)
_WEYL_1 = tl.constexpr(0xBB67AE8584CAA73B)
_BLOCK = 128


def uniform(seed: int, keys: Sequence[tuple[int, int, int, int]], device: torch.device | str = "cpu") -> Tensor:
    """Return one number in [0, 1) per key (step, prompt, sample, position), float64 [R] on ``device``."""
    words = [[_signed(word) for word in (seed, *key)] for key in keys]
    return uniform_rows(torch.tensor(words, dtype=torch.int64).to(device, non_blocking=True))


def uniform_rows(key_R5: Tensor) -> Tensor:
    """Return one number in [0, 1) per row (seed, step, prompt, sample, position) of int64 words, float64 [R]."""
    rows = len(key_R5)
    out_R = torch.empty(rows, dtype=torch.float64, device=key_R5.device)
    run(_CONFIG, (triton.cdiv(rows, _BLOCK),), key_R5.contiguous(), out_R, rows)
    return out_R


def _signed(word: int) -> int:
    """Return the int64 of the same 64 bits."""
    word &= 0xFFFFFFFFFFFFFFFF
    return word - (1 << 64) if word >> 63 else word


@triton.jit(do_not_specialize=["rows"])
def uniform_kernel(key_ptr, out_ptr, rows, BLOCK: tl.constexpr):
    """Write one number per row of keys."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    key_0 = tl.load(key_ptr + row * 5, inside, 0).to(tl.uint64, bitcast=True)
    key_1 = tl.load(key_ptr + row * 5 + 1, inside, 0).to(tl.uint64, bitcast=True)
    c3 = tl.load(key_ptr + row * 5 + 2, inside, 0).to(tl.uint64, bitcast=True)
    c2 = tl.load(key_ptr + row * 5 + 3, inside, 0).to(tl.uint64, bitcast=True)
    c1 = tl.load(key_ptr + row * 5 + 4, inside, 0).to(tl.uint64, bitcast=True)
    zero = tl.zeros_like(c1)
    c0 = zero + 1
    multiplier_0, multiplier_1 = zero + _MULTIPLIER_0, zero + _MULTIPLIER_1
    for _ in tl.static_range(10):
        high_0, low_0 = tl.umulhi(multiplier_0, c0), multiplier_0 * c0
        high_1, low_1 = tl.umulhi(multiplier_1, c2), multiplier_1 * c2
        c0, c1, c2, c3 = high_1 ^ c1 ^ key_0, low_1, high_0 ^ c3 ^ key_1, low_0
        key_0 += zero + _WEYL_0
        key_1 += zero + _WEYL_1
    # 53 bits are exact in float64, and so is the scaling.
    tl.store(out_ptr + row, (c0 >> 11).to(tl.int64).to(tl.float64) * (2.0**-53), inside)


_CONFIG = KernelConfig(
    name="uniform",
    function=uniform_kernel,
    signature={"key_ptr": "*i64", "out_ptr": "*fp64", "rows": "i32"},
    constexprs={"BLOCK": _BLOCK},
    dtype="float64",
    op="uniform",
)
KERNELS = [_CONFIG]
