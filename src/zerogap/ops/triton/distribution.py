"""The kernels from a row of logits to its distribution and the sums over it, in fixed blocks of the vocabulary.

A block of ``BLOCK`` tokens is one program; its sum is a balanced tree, and the blocks' sums meet in another. Each value
and order is that of ``zerogap.ops.portable.sampling``. For drawing, a weight becomes a whole number of quanta
(``mass``): sums of those are exact, so any order gives the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import triton
import triton.language as tl

from zerogap.ops.triton.aot import KernelConfig
from zerogap.ops.triton.elementwise import exp, levels, log, tree_sum
from zerogap.ops.triton.run import row_config

BLOCK = 1024  # tokens of a block, as in ``portable.elementwise.blocked_sum``
_VOCABULARIES = (512, 151936)  # that are built ahead of time in tests


def block_count(vocabulary: int) -> int:
    """Return the number of blocks of a vocabulary."""
    return triton.cdiv(vocabulary, BLOCK)


def mass_bits(vocabulary: int) -> int:
    """Return how many quanta weight 1 has, as a power of two: the sum over the vocabulary is at most 2^62."""
    return 62 - levels(vocabulary)


@triton.jit(do_not_specialize=["vocabulary", "stride"])
def peak_kernel(
    logits_ptr, temperature_ptr, kept_ptr, peak_ptr, vocabulary, stride, KEPT: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the largest scaled logit of a block, within the kept set if there is one."""
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    logits = tl.load(logits_ptr + row * stride + token, inside, float("-inf"))
    temperature = tl.load(temperature_ptr + row)
    scaled = tl.math.div_rn(logits, tl.zeros_like(logits) + temperature)
    if KEPT:
        kept = tl.load(kept_ptr + row * vocabulary + token, inside, 0)
        scaled = tl.where(kept != 0, scaled, float("-inf"))
    tl.store(peak_ptr + row * tl.num_programs(0) + block, tl.max(scaled, axis=0))


@triton.jit(do_not_specialize=["vocabulary", "stride"])
def weigh_kernel(
    logits_ptr,
    temperature_ptr,
    kept_ptr,
    peak_ptr,
    shifted_ptr,
    weights_ptr,
    sums_ptr,
    terms_ptr,
    vocabulary,
    stride,
    KEPT: tl.constexpr,
    TABLES: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Write a block's sums of weights and of weight times shifted logit; with TABLES also both of each token."""
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    logits = tl.load(logits_ptr + row * stride + token, inside, float("-inf"))
    scaled = tl.math.div_rn(logits, tl.zeros_like(logits) + tl.load(temperature_ptr + row))
    shifted = scaled - row_peak(peak_ptr, row, BLOCKS)
    weights = tl.where(inside, exp(shifted), 0.0)
    if KEPT:
        kept = tl.load(kept_ptr + row * vocabulary + token, inside, 0)
        weights = tl.where(kept != 0, weights, 0.0)
    if TABLES:
        tl.store(shifted_ptr + row * vocabulary + token, shifted, inside)
        tl.store(weights_ptr + row * vocabulary + token, weights, inside)
    _store_sums(shifted, weights, sums_ptr, terms_ptr, row, block, BLOCK, LEVELS)


@triton.jit(do_not_specialize=["vocabulary"])
def filter_kernel(
    shifted_ptr,
    weights_ptr,
    kept_ptr,
    sums_ptr,
    terms_ptr,
    vocabulary,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """Clear a block's weights outside the kept set and write its sums."""
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    place = row * vocabulary + token
    shifted = tl.load(shifted_ptr + place, inside, float("-inf"))
    kept = tl.load(kept_ptr + place, inside, 0)
    weights = tl.where(kept != 0, tl.load(weights_ptr + place, inside, 0.0), 0.0)
    tl.store(weights_ptr + place, weights, inside)
    _store_sums(shifted, weights, sums_ptr, terms_ptr, row, block, BLOCK, LEVELS)


@triton.jit
def _store_sums(shifted, weights, sums_ptr, terms_ptr, row, block, BLOCK: tl.constexpr, LEVELS: tl.constexpr):
    terms = tl.where(weights > 0.0, weights * shifted, 0.0)
    place = row * tl.num_programs(0) + block + tl.arange(0, 1)
    tl.store(sums_ptr + place, tree_sum(tl.reshape(weights, [1, BLOCK]), LEVELS))
    tl.store(terms_ptr + place, tree_sum(tl.reshape(terms, [1, BLOCK]), LEVELS))


@triton.jit
def row_peak(peak_ptr, row, BLOCKS: tl.constexpr):
    """Return a row's largest scaled logit from those of its blocks."""
    block = tl.arange(0, triton.next_power_of_2(BLOCKS))
    return tl.max(tl.load(peak_ptr + row * BLOCKS + block, block < BLOCKS, float("-inf")), axis=0)


@triton.jit
def total_kernel(
    sums_ptr,
    terms_ptr,
    total_ptr,
    log_total_ptr,
    entropy_ptr,
    BLOCKS: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """Write a row's total weight, its logarithm and the entropy."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, 1 << LEVELS)
    sums = tl.load(sums_ptr + row * BLOCKS + block, block < BLOCKS, 0.0)
    terms = tl.load(terms_ptr + row * BLOCKS + block, block < BLOCKS, 0.0)
    total = tree_sum(tl.reshape(sums, [1, 1 << LEVELS]), LEVELS)
    term = tree_sum(tl.reshape(terms, [1, 1 << LEVELS]), LEVELS)
    log_total = log(total)
    place = row + tl.arange(0, 1)
    tl.store(total_ptr + place, total)
    tl.store(log_total_ptr + place, log_total)
    tl.store(entropy_ptr + place, log_total - tl.math.div_rn(term, total))


@triton.jit(do_not_specialize=["vocabulary", "stride"])
def token_kernel(
    logits_ptr,
    temperature_ptr,
    kept_ptr,
    peak_ptr,
    log_total_ptr,
    token_ptr,
    out_ptr,
    vocabulary,
    stride,
    KEPT: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Write the log-prob of a row's token, from its logit."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(token_ptr + row)
    scaled = tl.math.div_rn(tl.load(logits_ptr + row * stride + token), tl.load(temperature_ptr + row))
    value = scaled - row_peak(peak_ptr, row, BLOCKS) - tl.load(log_total_ptr + row)
    if KEPT:
        value = tl.where(tl.load(kept_ptr + row * vocabulary + token) != 0, value, float("-inf"))
    tl.store(out_ptr + row, value)


@triton.jit(do_not_specialize=["vocabulary"])
def mass_kernel(shifted_ptr, weights_ptr, mass_ptr, first_ptr, vocabulary, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Write a block's mass and its first most likely token (``vocabulary - 1`` if it has none)."""
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    weights = tl.load(weights_ptr + row * vocabulary + token, inside, 0.0)
    shifted = tl.load(shifted_ptr + row * vocabulary + token, inside, float("-inf"))
    place = row * tl.num_programs(0) + block
    tl.store(mass_ptr + place, tl.sum(mass(weights, BITS), axis=0))
    tl.store(first_ptr + place, tl.min(tl.where(shifted == 0.0, token, vocabulary - 1), axis=0))


@triton.jit
def mass(weights, BITS: tl.constexpr):
    """Return weights in whole quanta of 2^-BITS, int64; NaN has none."""
    return (tl.where(weights == weights, weights, 0.0) * (2.0**BITS)).to(tl.int64)


@triton.jit(do_not_specialize=["vocabulary"])
def draw_kernel(
    weights_ptr,
    mass_ptr,
    first_ptr,
    greedy_ptr,
    uniform_ptr,
    token_ptr,
    vocabulary,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Write a row's token: the first whose cumulative mass, in id order, is above uniform times the total."""
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, triton.next_power_of_2(BLOCKS))
    masses = tl.load(mass_ptr + row * BLOCKS + blocks, blocks < BLOCKS, 0)
    reached = tl.cumsum(masses, axis=0)
    total = tl.sum(masses, axis=0)
    fraction = (tl.load(uniform_ptr + row) * 9007199254740992.0).to(tl.uint64)  # 53 bits
    aim = tl.umulhi(fraction << 11, total.to(tl.uint64)).to(tl.int64)
    block = tl.minimum(tl.sum((reached <= aim).to(tl.int32), axis=0), BLOCKS - 1)
    before = tl.sum(tl.where(blocks < block, masses, 0), axis=0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    weights = tl.load(weights_ptr + row * vocabulary + token, token < vocabulary, 0.0)
    passed = before + tl.cumsum(mass(weights, BITS), axis=0) <= aim
    drawn = tl.minimum(block * BLOCK + tl.sum(passed.to(tl.int32), axis=0), vocabulary - 1)
    first = tl.load(first_ptr + row * BLOCKS + blocks, blocks < BLOCKS, vocabulary - 1)
    greedy = tl.load(greedy_ptr + row) != 0
    tl.store(token_ptr + row, tl.where(greedy, tl.min(first, axis=0), drawn).to(tl.int64))


@triton.jit(do_not_specialize=["vocabulary"])
def grad_logits_kernel(weights_ptr, total_ptr, slope_ptr, target_ptr, out_ptr, vocabulary, BLOCK: tl.constexpr):
    """Write slope times (target's one less probability) of a block."""
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    slope = tl.load(slope_ptr + row)
    factor = tl.math.div_rn(-slope, tl.load(total_ptr + row))
    grad = tl.load(weights_ptr + row * vocabulary + token, inside, 0.0) * factor
    grad += tl.where(token == tl.load(target_ptr + row), slope, 0.0)
    tl.store(out_ptr + row * vocabulary + token, grad, inside)


@cache
def peak_config(kept: bool) -> KernelConfig:
    """Return the configuration of `peak_kernel`."""
    pointers = "logits_ptr temperature_ptr kept_ptr:i1 peak_ptr"
    return _config(peak_kernel, "peak", pointers, "vocabulary:i32 stride:i64", {"KEPT": kept, "BLOCK": BLOCK})


@cache
def weigh_config(vocabulary: int, kept: bool, tables: bool) -> KernelConfig:
    """Return the configuration of `weigh_kernel`."""
    pointers = "logits_ptr temperature_ptr kept_ptr:i1 peak_ptr shifted_ptr weights_ptr sums_ptr terms_ptr"
    constants = {"KEPT": kept, "TABLES": tables, **_BLOCK, "BLOCKS": block_count(vocabulary)}
    return _config(weigh_kernel, "weigh", pointers, "vocabulary:i32 stride:i64", constants)


@cache
def filter_config() -> KernelConfig:
    """Return the configuration of `filter_kernel`."""
    pointers = "shifted_ptr weights_ptr kept_ptr:i1 sums_ptr terms_ptr"
    return _config(filter_kernel, "filter", pointers, "vocabulary:i32", _BLOCK)


@cache
def total_config(vocabulary: int) -> KernelConfig:
    """Return the configuration of `total_kernel`."""
    blocks = block_count(vocabulary)
    pointers = "sums_ptr terms_ptr total_ptr log_total_ptr entropy_ptr"
    return _config(total_kernel, "total", pointers, "", {"BLOCKS": blocks, "LEVELS": levels(blocks)}, 1)


@cache
def token_config(vocabulary: int, kept: bool) -> KernelConfig:
    """Return the configuration of `token_kernel`."""
    pointers = "logits_ptr temperature_ptr kept_ptr:i1 peak_ptr log_total_ptr token_ptr:i64 out_ptr"
    constants = {"KEPT": kept, "BLOCKS": block_count(vocabulary)}
    return _config(token_kernel, "token", pointers, "vocabulary:i32 stride:i64", constants, 1)


@cache
def mass_config(vocabulary: int) -> KernelConfig:
    """Return the configuration of `mass_kernel`."""
    pointers = "shifted_ptr weights_ptr mass_ptr:i64 first_ptr:i32"
    return _config(mass_kernel, "mass", pointers, "vocabulary:i32", {"BITS": mass_bits(vocabulary), "BLOCK": BLOCK})


@cache
def draw_config(vocabulary: int) -> KernelConfig:
    """Return the configuration of `draw_kernel`."""
    pointers = "weights_ptr mass_ptr:i64 first_ptr:i32 greedy_ptr:i1 uniform_ptr:fp64 token_ptr:i64"
    constants = {"BITS": mass_bits(vocabulary), "BLOCK": BLOCK, "BLOCKS": block_count(vocabulary)}
    return _config(draw_kernel, "draw", pointers, "vocabulary:i32", constants)


@cache
def grad_logits_config(dtype: torch.dtype) -> KernelConfig:
    """Return the configuration of `grad_logits_kernel`; the gradient has the rows' dtype."""
    pointers = "weights_ptr:fp32 total_ptr:fp32 slope_ptr:fp32 target_ptr:i64 out_ptr"
    return row_config(grad_logits_kernel, "logits backward", dtype, pointers, "vocabulary:i32", {"BLOCK": BLOCK})


_BLOCK = {"BLOCK": BLOCK, "LEVELS": levels(BLOCK)}


def _config(
    function: object, name: str, pointers: str, numbers: str, constants: dict[str, int], warps: int = 4
) -> KernelConfig:
    return row_config(function, f"distribution {name}", torch.float32, pointers, numbers, constants, warps)


def kernels() -> Iterator[KernelConfig]:
    """Yield every configuration for vocabularies of the usual sizes."""
    yield from (peak_config(False), peak_config(True), filter_config())
    yield from (grad_logits_config(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16))
    for vocabulary in _VOCABULARIES:
        for kept in (False, True):
            yield from (weigh_config(vocabulary, kept, tables) for tables in (False, True))
            yield token_config(vocabulary, kept)
        yield from (total_config(vocabulary), mass_config(vocabulary), draw_config(vocabulary))


KERNELS = list(kernels())
