"""Kept sets on a GPU: top-k, then top-p within it, then min-p, exact, with ties by logit and then lower id.

Nothing is sorted. A token's rank is decided by the bits of its shifted logit's magnitude, so the last value that is
kept is found by bisection over those 31 bits: the number, or the mass in whole quanta, of the tokens up to a value is
an exact sum in any order. Among tokens of that value the first ones by id are kept. The nucleus holds each token before
which the kept mass is below top-p of the total, and always the most likely token.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from zerogap.ops.triton.aot import KernelConfig
from zerogap.ops.triton.distribution import mass, mass_bits
from zerogap.ops.triton.run import row_config, run

_BLOCK = 4096  # tokens that a program looks at together


def kept_sets(shifted_RV: Tensor, weights_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor) -> Tensor:
    """Return the kept sets, bool [R, V]; a row with a NaN keeps everything.

    Args:
        shifted_RV: scaled logits less the row's largest, so that none is above 0.
        weights_RV: e^shifted, not filtered yet.
        top_k_R: int64; the vocabulary's size is off.
        top_p_R: float64; 1 is off.
        min_p_R: float32; 0 is off.
    """
    rows, vocabulary = shifted_RV.shape
    kept_RV = torch.empty(rows, vocabulary, dtype=torch.bool, device=shifted_RV.device)
    last_R, room_R = (torch.empty(rows, dtype=torch.int32, device=shifted_RV.device) for _ in range(2))
    grid = (rows,)
    run(last_config(vocabulary), grid, shifted_RV, weights_RV, top_k_R, top_p_R, last_R, room_R, vocabulary)
    run(keep_config(), grid, shifted_RV, weights_RV, min_p_R, last_R, room_R, kept_RV, vocabulary)
    return kept_RV


@triton.jit(do_not_specialize=["vocabulary"])
def last_kernel(
    shifted_ptr,
    weights_ptr,
    top_k_ptr,
    top_p_ptr,
    last_ptr,
    room_ptr,
    vocabulary,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a row's last kept value, as bits of its magnitude, and how many tokens of that value are kept."""
    row = tl.program_id(0).to(tl.int64)
    shifted_ptr += row * vocabulary
    weights_ptr += row * vocabulary
    top_k = tl.load(top_k_ptr + row).to(tl.int32)
    top_p = tl.load(top_p_ptr + row)
    numbers, all_mass = _up_to(shifted_ptr, weights_ptr, vocabulary, 0x7F800000, BITS, BLOCK)
    last = tl.full([], 0x7FFFFFFF, tl.int32)  # of a row with a NaN, which has other bits than any number
    room = vocabulary
    if numbers == vocabulary:
        last = tl.full([], 0x7F800000, tl.int32)
        total = all_mass
        if top_k < vocabulary:
            last = _first_value(shifted_ptr, weights_ptr, vocabulary, top_k, total, True, BITS, BLOCK)
            count, below = _up_to(shifted_ptr, weights_ptr, vocabulary, last - 1, BITS, BLOCK)
            equal, upto = _up_to(shifted_ptr, weights_ptr, vocabulary, last, BITS, BLOCK)
            room = top_k - count
            total = below + (upto - below) // (equal - count) * room
        if top_p < 1.0:
            # Whole quanta: a token is kept while the mass before it is below ceil(top_p * total).
            share = top_p * total.to(tl.float64)
            aim = share.to(tl.int64)
            aim = tl.minimum(aim + (aim.to(tl.float64) < share).to(tl.int64), total)
            last = _first_value(shifted_ptr, weights_ptr, vocabulary, top_k, aim, False, BITS, BLOCK)
            count, below = _up_to(shifted_ptr, weights_ptr, vocabulary, last - 1, BITS, BLOCK)
            equal, upto = _up_to(shifted_ptr, weights_ptr, vocabulary, last, BITS, BLOCK)
            each = tl.maximum((upto - below) // tl.maximum(equal - count, 1), 1)
            room = tl.maximum((aim - below + each - 1) // each, 1).to(tl.int32)
    tl.store(last_ptr + row, last)
    tl.store(room_ptr + row, room)


@triton.jit
def _first_value(
    shifted_ptr,
    weights_ptr,
    vocabulary,
    wanted,
    aim,
    BY_COUNT: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the first value up to which there are ``wanted`` tokens, or else the mass ``aim``."""
    low = tl.full([], 0, tl.int32)
    high = tl.full([], 0x7F800000, tl.int32)
    for _ in range(31):
        middle = low + (high - low) // 2
        count, reached = _up_to(shifted_ptr, weights_ptr, vocabulary, middle, BITS, BLOCK)
        enough = reached >= aim
        if BY_COUNT:
            enough = count >= wanted
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, tl.minimum(middle + 1, high))
    return low


@triton.jit
def _up_to(shifted_ptr, weights_ptr, vocabulary, value, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Return number and mass of the tokens whose value is at most ``value``: at least as likely."""
    count = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < vocabulary
        there = inside & (_value(tl.load(shifted_ptr + token, inside, 0.0)) <= value)
        count += there.to(tl.int32)
        total += mass(tl.load(weights_ptr + token, there, 0.0), BITS)
    return tl.sum(count, axis=0), tl.sum(total, axis=0)


@triton.jit
def _value(shifted):
    """Return the bits of |shifted|, which rise as the logit falls."""
    return shifted.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit(do_not_specialize=["vocabulary"])
def keep_kernel(shifted_ptr, weights_ptr, min_p_ptr, last_ptr, room_ptr, kept_ptr, vocabulary, BLOCK: tl.constexpr):
    """Write a row's kept set from its last value and the room there, and its least weight."""
    row = tl.program_id(0).to(tl.int64)
    last, room = tl.load(last_ptr + row), tl.load(room_ptr + row)
    floor = tl.load(min_p_ptr + row)
    met = tl.full([], 0, tl.int32)  # tokens of the last value in earlier blocks
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < vocabulary
        value = _value(tl.load(shifted_ptr + row * vocabulary + token, inside, 0.0))
        weights = tl.load(weights_ptr + row * vocabulary + token, inside, 0.0)
        equal = (inside & (value == last)).to(tl.int32)
        place = met + tl.cumsum(equal, axis=0) - equal
        kept = (value < last) | ((equal != 0) & (place < room))
        kept = kept & ((weights >= floor) | (weights != weights))
        tl.store(kept_ptr + row * vocabulary + token, kept, inside)
        met += tl.sum(equal, axis=0)


@cache
def last_config(vocabulary: int) -> KernelConfig:
    """Return the configuration of `last_kernel`."""
    pointers = "shifted_ptr weights_ptr top_k_ptr:i64 top_p_ptr:fp64 last_ptr:i32 room_ptr:i32"
    constants = {"BITS": mass_bits(vocabulary), "BLOCK": _BLOCK}
    return row_config(last_kernel, "kept set last", torch.float32, pointers, "vocabulary:i32", constants, 8)


@cache
def keep_config() -> KernelConfig:
    """Return the configuration of `keep_kernel`."""
    pointers = "shifted_ptr weights_ptr min_p_ptr last_ptr:i32 room_ptr:i32 kept_ptr:i1"
    return row_config(keep_kernel, "kept set", torch.float32, pointers, "vocabulary:i32", {"BLOCK": _BLOCK}, 8)


KERNELS = [keep_config(), last_config(151936)]
