"""Functions built from single IEEE operations, so that they keep the row law by construction.

A library's ``exp`` may take one path for full vectors and another for the tail, so its bits may depend on where an
element stands. Addition, multiplication, division, ``floor`` and bit operations are exactly rounded: any composition of
them gives each element the same bits everywhere, at any thread count and on any CPU. Every step below is one torch
operation; none carries a scalar multiplier (``alpha=``), which some builds fuse into one rounding and others do not.
(torch's square root, which ``rms_norm`` takes, is not exactly rounded on every build: the same for equal values, but
perhaps not on another CPU.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class _Format:
    """Layout of a floating-point format and the polynomial degrees that reach its precision."""

    integer: torch.dtype
    mantissa_bits: int
    bias: int
    exp_terms: int  # Taylor terms of e^r on |r| <= ln2/2
    log_terms: int  # odd terms of 2*atanh(s) on |s| <= 0.172
    exp_limit: float  # beyond it exp is 0 or inf; 2^n stays a normal number, since others depend on the CPU's mode
    ln2_high: float  # leading bits of ln 2, so that n * ln2_high is exact
    ln2_low: float


_FORMATS = {
    torch.float32: _Format(torch.int32, 23, 127, 8, 6, 87.0, 0.693359375, -2.12194440e-4),
    torch.float64: _Format(torch.int64, 52, 1023, 15, 12, 708.0, 0.6931471803691238, 1.9082149292705877e-10),
}
_LOG2E = 1.4426950408889634
_CACHED = 1 << 17  # elements that are worked on at a time, so that the temporaries stay in cache


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return what is computed in for rows of ``dtype``: float32 for bfloat16 and float16, else the dtype itself."""
    return torch.float32 if dtype.itemsize == 2 else dtype


def wide(x: Tensor) -> Tensor:
    """Return ``x`` in its `wide_dtype`, which is exact; ``x`` itself if it is so wide already."""
    return x.to(wide_dtype(x.dtype))


def exp(x: Tensor) -> Tensor:
    """Return e^x, element by element; shape and dtype (float32 or float64) of ``x``.

    Error at most 2 units in the last place within ``exp_limit``. Below ``-exp_limit`` (``-inf`` included) the result is
    +0, above ``exp_limit`` it stays at e^exp_limit; NaN stays NaN.
    """
    if x.numel() <= _CACHED:
        return _exp(x)
    flat = x.reshape(-1)
    value = torch.empty_like(flat)
    for start in range(0, flat.numel(), _CACHED):
        value[start : start + _CACHED] = _exp(flat[start : start + _CACHED])
    return value.view(x.shape)


def _exp(x: Tensor) -> Tensor:
    layout = _FORMATS[x.dtype]
    rest = x.clamp(-layout.exp_limit, layout.exp_limit)  # NaN passes through a clamp
    power = (rest * _LOG2E).add_(0.5).floor_()
    rest.sub_(power * layout.ln2_high).sub_(power * layout.ln2_low)
    value = torch.full_like(rest, 1.0 / math.factorial(layout.exp_terms))
    for term in range(layout.exp_terms - 1, -1, -1):
        value.mul_(rest).add_(1.0 / math.factorial(term))
    two_to_power = power.add_(layout.bias).to(layout.integer).mul_(1 << layout.mantissa_bits).view(x.dtype)
    return value.mul_(two_to_power).mul_(x >= -layout.exp_limit)


def log(x: Tensor) -> Tensor:
    """Return the natural logarithm of ``x`` >= 0, element by element; inf gives inf, NaN stays NaN, 0 gives -inf."""
    layout = _FORMATS[x.dtype]
    bits = x.contiguous().view(layout.integer)
    power = ((bits >> layout.mantissa_bits) - layout.bias).to(x.dtype)
    mantissa = ((bits & ((1 << layout.mantissa_bits) - 1)) | (layout.bias << layout.mantissa_bits)).view(x.dtype)
    upper = mantissa > math.sqrt(2.0)
    mantissa = torch.where(upper, mantissa * 0.5, mantissa)
    power = torch.where(upper, power + 1.0, power)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = torch.full_like(s, 2.0 / (2 * layout.log_terms + 1))
    for term in range(layout.log_terms - 1, -1, -1):
        series.mul_(square).add_(2.0 / (2 * term + 1))
    value = power * layout.ln2_low + series * s + power * layout.ln2_high
    value = torch.where(torch.isfinite(x), value, x)
    return torch.where(x == 0, torch.full_like(x, -torch.inf), value)


def tree_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension in a fixed balanced tree: the upper half is added to the lower until one is left.

    The tree depends on the length only. A length that is no power of two is padded with +0 on the right.
    """
    length = x.shape[-1]
    width = 1 << max(length - 1, 0).bit_length()
    if width != length:
        x = torch.nn.functional.pad(x, (0, width - length))
    while width > 1:
        width //= 2
        x = x[..., :width] + x[..., width:]
    return x[..., 0]


def blocked_sum(x: Tensor, block: int = 1024) -> Tensor:
    """Sum long rows: a tree within each fixed block of the last dimension, then a tree over the blocks."""
    length = x.shape[-1]
    if length <= block:
        return tree_sum(x)
    blocks = -(-length // block)
    if blocks * block != length:
        x = torch.nn.functional.pad(x, (0, blocks * block - length))
    return tree_sum(tree_sum(x.unflatten(-1, (blocks, block))))


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + e^-x), element by element."""
    return exp(-x).add_(1.0).reciprocal_()
