"""What reading a source gives, and how rows are added to it: counted all, kept as a bounded sample."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from zerogap.gap.facts import Facts
from zerogap.gap.metrics import Accumulator
from zerogap.gap.readers.pieces import whole_sequences
from zerogap.gap.readers.text_log import LogHit
from zerogap.gap.series import Series, SeriesBuilder
from zerogap.gap.table import Array, GapTable, concatenate, sequence_starts

_BLOCK = 4096
SAMPLE_TOKENS = 1_500_000  # tokens kept in memory for the diagnoses; numbers always count every token


@dataclass
class Rollout:
    """One generated text with its tokens, for the report."""

    step: int
    sample: str
    prompt: str
    text: str
    token_ids: list[int]
    engine: list[float]
    trainer: list[float]
    reward: float = math.nan


@dataclass
class Loaded:
    """Everything a source gave.

    Attributes:
        label: the source as the person named it.
        kind: what it was recognised as.
        series: one per run.
        table: rows for the diagnoses; whole sequences spread over the source when there are very many.
        accumulator: sums over every row.
        facts: what was stated about the setup, name -> value.
        hits: log lines that match a known trouble.
    """

    label: str
    kind: str = ""
    series: list[Series] = field(default_factory=list)
    table: GapTable | None = None
    accumulator: Accumulator = field(default_factory=Accumulator)
    facts: dict[str, Any] = field(default_factory=dict)
    hits: list[LogHit] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    rollouts: list[Rollout] = field(default_factory=list)
    other: dict[str, Series] = field(default_factory=dict)
    folder: Path | None = None
    stated: Facts | None = None
    contradictions: list[tuple[int, float, float]] = field(default_factory=list)

    @property
    def has_tokens(self) -> bool:
        """Whether rows with both log-probs were read."""
        return self.accumulator.tokens > 0


class _Sampler:
    """Keeps whole sequences, chosen by a hash of their name, so that a sample is spread over the source."""

    def __init__(self, rows: int) -> None:
        self.share = min(1.0, SAMPLE_TOKENS / max(rows, 1))
        self.parts: list[GapTable] = []
        self.rows = 0
        self._kept = 0
        self._sequences = 0
        self._first: GapTable | None = None

    def add(self, table: GapTable) -> None:
        self.rows += len(table)
        if self.share < 1.0:
            if self._first is None:
                self._first = table.where(slice(0, SAMPLE_TOKENS))
            starts = _sample_starts(table)
            names = _hash(table.where(starts)) if table.has("sample") else _hash_numbers(self._sequences, len(starts))
            self._sequences += len(starts)
            table = table.where(np.repeat(names < self.share, np.diff(np.append(starts, len(table)))))
            table = table.where(slice(0, 2 * SAMPLE_TOKENS - self._kept))  # one name may stand for very many rows
        if len(table):
            self.parts.append(table)
            self._kept += len(table)

    def sample(self) -> list[GapTable]:
        """Return what was kept; the first rows when the hash chose none."""
        return self.parts or ([self._first] if self._first is not None else [])


def _sample_starts(table: GapTable) -> Array:
    """Return int64 [S]: where sequences start; blocks of rows in a source that has neither names nor positions."""
    if table.has("sample") or table.has("position"):
        return sequence_starts(table)
    return np.union1d(sequence_starts(table), np.arange(0, len(table), _BLOCK))


def _hash(table: GapTable) -> Array:
    """Return float64 [N] in [0, 1) for the (step, sample) of each row."""
    mixed = np.zeros(len(table), dtype=np.uint64)
    for name, factor in (("step", 0x9E3779B97F4A7C15), ("sample", 0xC2B2AE3D27D4EB4F)):
        if name in table.columns:
            values = table.columns[name]
            if values.dtype == object:
                unique, inverse = np.unique(values.astype(str), return_inverse=True)
                hashed = np.array([int.from_bytes(u.encode()[-7:], "little") for u in unique], dtype=np.uint64)
                values = hashed[inverse]
            mixed = _mix(mixed ^ (values.astype(np.uint64) * np.uint64(factor)))
    result: Array = mixed.astype(np.float64) / 2.0**64
    return result


def _hash_numbers(first: int, count: int) -> Array:
    """Return float64 [count] in [0, 1) for the sequences number ``first``, ``first + 1``, ... of a source."""
    numbers = np.arange(first, first + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    result: Array = _mix(numbers).astype(np.float64) / 2.0**64
    return result


def _mix(values: Array) -> Array:
    values = values ^ (values >> np.uint64(29))
    values = values * np.uint64(0xBF58476D1CE4E5B9)
    mixed: Array = values ^ (values >> np.uint64(32))
    return mixed


def add_tables(tables: Iterable[GapTable], rows: int, loaded: Loaded) -> None:
    """Count the tables' tokens and keep a sample of them; ``tables`` may be cut at any row.

    Args:
        tables: the rows in the order of the source.
        rows: how many there are, about. A source of up to ``SAMPLE_TOKENS`` is put in the order of its sequences
            first; a larger one is taken as it comes, and so has to have the rows of a sequence together.
        loaded: what they are added to.
    """
    if rows <= SAMPLE_TOKENS:
        parts = [table for table in tables if len(table)]
        pieces = iter([concatenate(parts, loaded.label).sorted()] if parts else [])
    else:
        pieces = whole_sequences(tables)
    sampler = _Sampler(rows)
    for piece in pieces:
        if piece.has("logprob_engine", "logprob_trainer"):
            loaded.accumulator.add(piece)
        sampler.add(piece)
    kept = sampler.sample()
    if not kept:
        return
    total = sampler.rows + (loaded.table.rows_total if loaded.table is not None else 0)
    loaded.table = concatenate([*([loaded.table] if loaded.table is not None else []), *kept], loaded.label).sorted()
    loaded.table.rows_total = total
    if len(loaded.table) < total:
        loaded.notes.append(f"diagnoses look at {len(loaded.table):,} of {total:,} tokens (whole sequences)")


def take(builder: SeriesBuilder, loaded: Loaded, path: Path, label: str = "") -> None:
    """Add the runs of a builder; those without a gap metric are kept beside for the report."""
    for series in builder.build(f"{loaded.label}:{label}" if label else loaded.label):
        if series.judged() or any(name in series.values for name in ("different", "prob_pearson")):
            loaded.series.append(series)
        else:
            loaded.other[f"{series.label}"] = series
        loaded.notes += [f"{path.name}: {note}" for note in series.notes if f"{path.name}: {note}" not in loaded.notes]
