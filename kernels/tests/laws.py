"""What the kernel tests share: every path and thread count, and equality of bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from zerogap_kernels import choose_path, path, paths_here

THREADS = (1, 2, 3, 5, 8)


def bits(x: NDArray[np.float32]) -> NDArray[np.int32]:
    return np.ascontiguousarray(x).view(np.int32)


def assert_bits(x: NDArray[np.float32], y: NDArray[np.float32], what: str = "") -> None:
    assert x.shape == y.shape
    different = np.argwhere(bits(x) != bits(y))
    assert len(different) == 0, f"{what}: {len(different)} differ, first at {different[0]}"


def every_path() -> Iterator[str]:
    """Choose each path in turn, then the one that was in use."""
    before = path()
    try:
        for name in paths_here():
            choose_path(name)
            yield name
    finally:
        choose_path(before)


def assert_row_law(op: Callable[[NDArray[np.float32], int], NDArray[np.float32]], rows: NDArray[np.float32]) -> None:
    """Hold ``op(rows, threads)`` to the row law: alone, in any company, at any offset, thread count and path.

    Args:
        op: one output row per input row.
        rows: finite rows, at least 3.
    """
    reference = np.stack([op(rows[r : r + 1], 1)[0] for r in range(len(rows))])
    for name in every_path():
        for threads in THREADS if name == paths_here()[0] else (3,):
            assert_bits(op(rows, threads), reference, f"all rows, {name}, {threads} threads")
        for count in {1, 2, 3, 7, 12, 13, len(rows)}:
            first = len(rows) // 3
            some = rows[first : first + count]
            assert_bits(op(some, 1), reference[first : first + count], f"{count} rows from {first}, {name}")
        for neighbour in (np.nan, np.inf, -np.inf, 3e38, 0.0):
            poisoned = np.full((2 * len(rows) + 1, rows.shape[1]), neighbour, dtype=np.float32)
            poisoned[1::2] = rows
            assert_bits(op(poisoned, 2)[1::2], reference, f"among rows of {neighbour}, {name}")
