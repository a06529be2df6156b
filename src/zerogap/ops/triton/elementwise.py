"""Functions for kernels with one fixed definition: exp, log, sigmoid, rounding, sums in a balanced tree.

They follow ``zerogap.ops.portable.elementwise`` step by step: the same reductions of the argument, polynomials and
trees, so that under Triton's interpreter they give the portable backend's very bits. On a GPU each Horner step is one
explicit ``fma``, which is exactly rounded like addition, multiplication, ``div_rn`` and ``sqrt_rn``; the compiler may
fuse nothing else (``enable_fp_fusion=False`` at every launch). ``tl.exp``, ``tl.log`` and plain ``/`` are not used:
they are approximations that differ between architectures. A sum adds two halves of a power of two at each level.
Addition is commutative, so neither a tensor's layout over threads nor the number of warps can change a bit of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LIMIT = tl.constexpr(87.0)
_LOG2E = tl.constexpr(1.4426950408889634)
_LN2_HIGH = tl.constexpr(0.693359375)
_LN2_LOW = tl.constexpr(-2.12194440e-4)
_SQRT2 = tl.constexpr(1.4142135623730951)


@triton.jit
def exp(x):
    """Return e^x of float32 values: +0 below -87, e^87 above 87, NaN for NaN."""
    rest = tl.where(x < -_LIMIT, -_LIMIT, tl.where(x > _LIMIT, _LIMIT, x))
    power = tl.floor(tl.math.fma(rest, _splat(rest, _LOG2E), _splat(rest, 0.5)))
    rest = tl.math.fma(power, _splat(rest, -_LN2_HIGH), rest)  # exact: the constant has few bits
    rest = tl.math.fma(power, _splat(rest, -_LN2_LOW), rest)
    value = _splat(rest, 1.0 / 40320.0)
    value = tl.math.fma(value, rest, _splat(rest, 1.0 / 5040.0))
    value = tl.math.fma(value, rest, _splat(rest, 1.0 / 720.0))
    value = tl.math.fma(value, rest, _splat(rest, 1.0 / 120.0))
    value = tl.math.fma(value, rest, _splat(rest, 1.0 / 24.0))
    value = tl.math.fma(value, rest, _splat(rest, 1.0 / 6.0))
    value = tl.math.fma(value, rest, _splat(rest, 0.5))
    value = tl.math.fma(value, rest, _splat(rest, 1.0))
    value = tl.math.fma(value, rest, _splat(rest, 1.0))
    two_to_power = ((power + 127.0).to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < -_LIMIT, 0.0, value * two_to_power)


@triton.jit
def log(x):
    """Return the natural logarithm of float32 values >= 0: -inf for 0, inf for inf, NaN for NaN."""
    bits = x.to(tl.int32, bitcast=True)
    power = ((bits >> 23) - 127).to(tl.float32)
    mantissa = ((bits & 0x7FFFFF) | (127 << 23)).to(tl.float32, bitcast=True)
    upper = mantissa > _SQRT2
    mantissa = tl.where(upper, mantissa * 0.5, mantissa)
    power = tl.where(upper, power + 1.0, power)
    s = tl.math.div_rn(mantissa - 1.0, mantissa + 1.0)
    square = s * s
    series = _splat(s, 2.0 / 13.0)
    series = tl.math.fma(series, square, _splat(s, 2.0 / 11.0))
    series = tl.math.fma(series, square, _splat(s, 2.0 / 9.0))
    series = tl.math.fma(series, square, _splat(s, 2.0 / 7.0))
    series = tl.math.fma(series, square, _splat(s, 2.0 / 5.0))
    series = tl.math.fma(series, square, _splat(s, 2.0 / 3.0))
    series = tl.math.fma(series, square, _splat(s, 2.0))
    value = power * _LN2_LOW + series * s + power * _LN2_HIGH
    value = tl.where((bits & 0x7FFFFFFF) >= 0x7F800000, x, value)
    return tl.where(x == 0.0, float("-inf"), value)


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + e^-x) of float32 values."""
    return tl.math.div_rn(_splat(x, 1.0), exp(-x) + 1.0)


@triton.jit
def rounded(x, like: tl.constexpr):
    """Round float32 values to the dtype ``like``, to nearest even, and widen them again."""
    return x.to(like).to(tl.float32)


@triton.jit
def tree_sum(x, LEVELS: tl.constexpr):
    """Sum float32 [M, 2^LEVELS] over the last dimension, [M]: the upper half onto the lower, until one is left."""
    for _ in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), axis=1)
    return tl.reshape(x, [x.shape[0]])


@triton.jit
def _splat(like, value):
    return tl.zeros_like(like) + value


def levels(width: int) -> int:
    """Return the height of the tree over ``width`` elements, padded with +0 to a power of two."""
    return max(width - 1, 0).bit_length()
