"""The row law of one op: each row against itself alone, in every kind of company."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from zerogap.certify.subjects import Subject

THREADS = (1, 2, 3, 5, 8)
_COUNTS_QUICK = (2, 3, 7, 8, 9, 16, 17, 33)
_COUNTS_FULL = (2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 100, 129)


@dataclass(frozen=True)
class Break:
    """The smallest call found that breaks the law.

    Attributes:
        company: what surrounded the row.
        rows: row count of the call; ``row`` is the place in it.
        threads: torch threads.
        elements: how many of the row's outputs differ.
        max_abs: largest difference; NaN if one side is not finite.
    """

    company: str
    rows: int
    row: int
    threads: int
    elements: int
    max_abs: float

    def __str__(self) -> str:
        return (
            f"{self.company}: row {self.row} of {self.rows} at {self.threads} threads, "
            f"{self.elements} outputs differ by up to {self.max_abs:.2g}"
        )


@dataclass(frozen=True)
class RowVerdict:
    """How an op did: how many rows were compared, and the first break or None."""

    name: str
    comparisons: int
    broken: Break | None


def check_rows(subject: Subject, full: bool, threads: tuple[int, ...] = THREADS) -> RowVerdict:
    """Compare rows in company with the same rows alone, smallest calls first.

    Args:
        subject: the op.
        full: more row counts; otherwise a selection around the borders of tiles.
        threads: thread counts to try.
    """
    counts = _COUNTS_FULL if full else _COUNTS_QUICK
    pool = torch.randn(max(counts), subject.width, generator=torch.Generator().manual_seed(7))
    with torch_threads(1):
        alone = torch.cat([subject.run(pool[row : row + 1]) for row in range(len(pool))])
    comparisons = 0
    for rows in counts:
        for company, call, kept in _companies(pool, rows):
            for count in threads if company == "others" else threads[:2]:
                with torch_threads(count):
                    out = subject.run(call)
                comparisons += len(kept)
                found = _first_difference(out, alone, kept)
                if found is not None:
                    row, elements, max_abs = found
                    return RowVerdict(subject.name, comparisons, Break(company, rows, row, count, elements, max_abs))
    return RowVerdict(subject.name, comparisons, None)


def _companies(pool: Tensor, rows: int) -> Iterator[tuple[str, Tensor, list[tuple[int, int]]]]:
    """Yield (what surrounds the rows, the call's rows, pairs of a place and the pool row that stands there)."""
    first = pool[:rows]
    yield "others", first, [(place, place) for place in range(rows)]
    yield "others in reverse", first.flip(0), [(place, rows - 1 - place) for place in range(rows)]
    for name, value in (("zeros", 0.0), ("extreme values", 1e30), ("NaN", torch.nan)):
        for place in {0, rows // 2, rows - 1}:
            call = torch.full_like(first, value)
            call[place] = pool[rows - 1]
            yield name, call, [(place, rows - 1)]
    strided = torch.stack((first, first), dim=2).flatten(1)[:, ::2]
    yield "others, strided", strided, [(place, place) for place in range(rows)]


def _first_difference(out: Tensor, alone: Tensor, kept: list[tuple[int, int]]) -> tuple[int, int, float] | None:
    places, originals = (torch.tensor(column) for column in zip(*kept, strict=True))
    ours, theirs = out[places].contiguous(), alone[originals]
    different = ours.view(torch.int32) != theirs.view(torch.int32)
    if not bool(different.any()):
        return None
    index = int(different.any(1).nonzero()[0])
    gap = (ours[index].double() - theirs[index].double())[different[index]].abs()
    return int(places[index]), int(different[index].sum()), float(gap.max())


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Run the body with ``count`` torch threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
