"""Pieces of a stream that end where a sequence ends, so that no sequence is judged in two parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from zerogap.gap.table import Array, GapTable, concatenate, sequence_starts

LONGEST = 1 << 21  # rows held back for one sequence; one that is longer is cut


def whole_sequences(tables: Iterable[GapTable], longest: int = LONGEST) -> Iterator[GapTable]:
    """Yield the rows of ``tables`` in order, cut anew: the last sequence of each waits for what follows it.

    A sequence is what ``sequence_starts`` says. Memory is bounded by one of ``tables`` and ``longest`` rows: a longer
    sequence, or a source that does not say where its sequences end, is cut between two tokens with plain values on
    both sides, so that neither padding nor the null that opens a turn is at the cut.
    """
    held: list[GapTable] = []
    for table in tables:
        if not len(table):
            continue
        last = int(sequence_starts(table)[-1])
        if held and not last and _continues(held[-1], table):
            held.append(table)
            if sum(map(len, held)) > longest:
                whole = concatenate(held, table.source)
                cut = _quiet_cut(whole)
                yield whole.where(slice(0, cut))
                held = [whole.where(slice(cut, None))] if cut < len(whole) else []
            continue
        if held or last:
            yield concatenate([*held, table.where(slice(0, last))] if last else held, table.source)
        held = [table.where(slice(last, None))]
    if held:
        yield concatenate(held, held[-1].source)


def _continues(held: GapTable, table: GapTable) -> bool:
    """Whether the first row of ``table`` belongs to the sequence of the last row of ``held``."""
    two = concatenate([held.where(slice(-1, None)), table.where(slice(0, 1))])
    return len(sequence_starts(two)) == 1


def _quiet_cut(table: GapTable) -> int:
    """Return the last row between two tokens with plain values on both sides; the end where there is none."""
    plain: Array = np.ones(len(table), dtype=bool)
    for name in ("logprob_engine", "logprob_trainer"):
        if table.has(name):
            values = table.columns[name]
            plain &= np.isfinite(values) & (values != 0.0)
            if name in table.nulls:
                plain &= ~table.nulls[name]
    cuts = np.flatnonzero(plain[1:] & plain[:-1])
    return int(cuts[-1]) + 1 if len(cuts) else len(table)
