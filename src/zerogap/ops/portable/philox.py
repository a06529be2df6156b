"""Philox 4x64 with 10 rounds (Salmon et al. 2011), for many counters at once.

numpy's own generator makes one stream at a time and spends most of its time on setting it up; an engine step needs one
number of each of hundreds of streams. The words are those of ``numpy.random.Philox``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
_WEYL_0, _WEYL_1 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox_words(key: Sequence[Words], counter: Sequence[Words]) -> Words:
    """Return the first output word of each counter.

    Args:
        key: two arrays of words.
        counter: four arrays of words, lowest first.
    """
    key_0, key_1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        high_0, low_0 = _product(_MULTIPLIER_0, c0)
        high_1, low_1 = _product(_MULTIPLIER_1, c2)
        c0, c1, c2, c3 = high_1 ^ c1 ^ key_0, low_1, high_0 ^ c3 ^ key_1, low_0
        key_0, key_1 = key_0 + _WEYL_0, key_1 + _WEYL_1
    return c0


def _product(factor: np.uint64, words: Words) -> tuple[Words, Words]:
    """Return the high and the low words of 128-bit products."""
    low, high = words & _LOW, words >> _HALF
    factor_low, factor_high = factor & _LOW, factor >> _HALF
    cross = factor_low * high
    middle = (factor_low * low >> _HALF) + (cross & _LOW) + factor_high * low
    # factor_high * low is at most 2^64 - 2^33 + 1, so adding two numbers below 2^32 cannot overflow.
    return factor_high * high + (cross >> _HALF) + (middle >> _HALF), factor * words
