"""The one table that every reader fills and every number is made from: one row for each generated token.

Columns are numpy arrays of equal length, described in ``columns.toml``. A log-prob that is not a number is kept as it
was found and given a kind (null, NaN, inf, sentinel, filled with zero); it is counted and never averaged in.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerogap.errors import UsageError, nearest

Array = NDArray[Any]
_DTYPES: dict[str, Any] = {"int64": np.int64, "float32": np.float32, "bool": np.bool_, "string": np.object_}

# What programs write when they have no log-prob; a true log-prob of a sampled token never reaches -1000.
_SENTINELS = np.array([-100.0, -999.0, -500.0], dtype=np.float32)
_SENTINEL_BELOW = np.float32(-900.0)
# A float32 log-softmax may exceed 0 by rounding; more is no log-prob (1.0 is a common "invalid" mark).
_POSITIVE_ABOVE = np.float32(1e-3)
# An exact 0.0 stands for probability 1. It is a filler when the other side gives the token less than this.
_SURE = np.float32(-0.01)
_LONE_ZERO_RUN = 3  # trailing exact zeros that count as filler when there is no other side to compare with


class Kind(IntEnum):
    """What one log-prob value is."""

    OK = 0
    NULL = 1
    NAN = 2
    POS_INF = 3
    NEG_INF = 4
    SENTINEL = 5
    ZERO_FILL = 6
    POSITIVE = 7
    BOUNDARY_NULL = 8


@dataclass(frozen=True)
class Column:
    """One column of the table: its type, its meaning with the unit, and other programs' names for it."""

    name: str
    type: str
    meaning: str
    aliases: tuple[str, ...] = ()

    @property
    def dtype(self) -> Any:
        """The numpy type that holds it."""
        return _DTYPES[self.type]

    @property
    def missing(self) -> Any:
        """What stands in a row without a value, which is marked as null beside: a token is trained on unless said."""
        return {"string": "", "bool": self.name == "loss_mask"}.get(self.type, 0)


@cache
def schema() -> dict[str, Column]:
    """Return the documented columns in order."""
    text = resources.files("zerogap.gap").joinpath("columns.toml").read_text(encoding="utf-8")
    return {
        name: Column(name, entry["type"], entry["meaning"], tuple(entry.get("aliases", ())))
        for name, entry in tomllib.loads(text).items()
    }


def resolve_columns(found: Iterable[str], mapping: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return ``{table column: source column}`` for the column names of a source.

    Args:
        found: column names of the source.
        mapping: explicit choices (``--map``); they win over names and aliases.

    Raises:
        UsageError: a mapped name is unknown on either side.
    """
    names = list(found)
    chosen: dict[str, str] = {}
    for ours, theirs in (mapping or {}).items():
        if ours not in schema():
            raise UsageError(f"--map {ours}={theirs}: the gap table has no column {ours!r}{nearest(ours, schema())}")
        if theirs not in names:
            raise UsageError(
                f"--map {ours}={theirs}: the source has no column {theirs!r}{nearest(theirs, names)} "
                f"(it has {', '.join(names[:20])})"
            )
        chosen[ours] = theirs
    lower = {name.lower().replace("-", "_"): name for name in reversed(names)}
    for column in schema().values():
        if column.name in chosen:
            continue
        for alias in (column.name, *column.aliases):
            theirs_found = lower.get(alias.lower())
            if theirs_found is not None and theirs_found not in chosen.values():
                chosen[column.name] = theirs_found
                break
    return chosen


@dataclass
class GapTable:
    """Tokens of one or more runs.

    Attributes:
        columns: name -> array [N]; float32 log-probs keep NaN and inf.
        nulls: name -> bool array [N], true where the source had no value at all.
        source: where the rows were read.
        notes: what a reader had to decide, for the person.
        rows_total: rows of the source; more than ``len(self)`` when this is a sample of whole sequences.
    """

    columns: dict[str, Array]
    nulls: dict[str, Array] = field(default_factory=dict)
    source: str = ""
    notes: list[str] = field(default_factory=list)
    rows_total: int = 0

    def __post_init__(self) -> None:
        lengths = {name: len(values) for name, values in self.columns.items()}
        if len(set(lengths.values())) > 1:
            raise UsageError(f"{self.source or 'table'}: columns differ in length: {lengths}")
        self.rows_total = self.rows_total or len(self)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()))) if self.columns else 0

    def has(self, *names: str) -> bool:
        """Whether every named column is there."""
        return all(name in self.columns for name in names)

    def get(self, name: str, default: Any = 0) -> Array:
        """Return a column, or an array of ``default``."""
        if name in self.columns:
            return self.columns[name]
        return np.full(len(self), default, dtype=schema()[name].dtype)

    def where(self, keep: Array | slice) -> GapTable:
        """Return the rows chosen by a bool or index array, or a slice (which copies nothing)."""
        return GapTable(
            {name: values[keep] for name, values in self.columns.items()},
            {name: values[keep] for name, values in self.nulls.items()},
            self.source,
            self.notes,
        )

    def mask(self) -> Array:
        """Return bool [N]: tokens that are trained on."""
        mask: Array = self.get("loss_mask", True).astype(bool)
        return mask

    def codes(self, *names: str) -> Array:
        """Return int64 [N]: one number for each distinct combination of the columns, in order of first appearance."""
        code = np.zeros(len(self), dtype=np.int64)
        for name in names:
            if name not in self.columns:
                continue
            values = self.columns[name]
            if values.dtype == object:
                values = values.astype(str)
            _, inverse = np.unique(values, return_inverse=True)
            code = code * (int(inverse.max(initial=0)) + 1) + inverse
        _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
        order = np.empty(len(first), dtype=np.int64)
        order[np.argsort(first, kind="stable")] = np.arange(len(first))
        result: Array = order[inverse]
        return result

    def sequence_codes(self) -> Array:
        """Return int64 [N]: which sequence each row belongs to."""
        return self.codes("run", "step", "sample")

    def kinds(self, name: str) -> Array:
        """Return uint8 [N] of ``Kind`` for a log-prob column, by value alone (see ``fill_kinds`` for the context)."""
        values = self.columns[name]
        nulls = self.nulls.get(name)
        return value_kinds(values, nulls)

    def sorted(self) -> GapTable:
        """Return the rows ordered by sequence (first appearance) and position."""
        if not self.has("position"):
            return self
        order = np.lexsort((self.columns["position"], self.sequence_codes()))
        if np.array_equal(order, np.arange(len(order))):
            return self
        kept = self.where(order)
        kept.rows_total = self.rows_total
        return kept


def value_kinds(values: Array, nulls: Array | None = None) -> Array:
    """Return uint8 [N] of ``Kind`` for float32 log-probs [N], looking at each value alone."""
    kinds = np.zeros(len(values), dtype=np.uint8)
    if np.isfinite(values).all():
        if len(values) and values.max() > _POSITIVE_ABOVE:
            kinds[values > _POSITIVE_ABOVE] = Kind.POSITIVE
        if len(values) and values.min() <= -100.0:
            kinds[(values <= _SENTINEL_BELOW) | np.isin(values, _SENTINELS)] = Kind.SENTINEL
    else:
        with np.errstate(invalid="ignore"):
            kinds[values > _POSITIVE_ABOVE] = Kind.POSITIVE
            kinds[(values <= _SENTINEL_BELOW) | np.isin(values, _SENTINELS)] = Kind.SENTINEL
        kinds[np.isnan(values)] = Kind.NAN
        kinds[np.isposinf(values)] = Kind.POS_INF
        kinds[np.isneginf(values)] = Kind.NEG_INF
    if nulls is not None and nulls.any():
        kinds[nulls] = Kind.NULL
    return kinds


def trailing_zero_runs(values: Array, starts: Array, lengths: Array) -> Array:
    """Return int64 [S]: how many exact zeros end each sequence, for values [N] cut at ``starts`` [S]."""
    if not len(values):
        return np.zeros(len(starts), dtype=np.int64)
    position = np.arange(len(values))
    last = np.maximum.reduceat(np.where(values != 0.0, position, -1), starts)
    last = np.where(last < starts, starts - 1, last)
    result: Array = starts + lengths - 1 - last
    return result


def classify(table: GapTable, starts: Array | None = None) -> tuple[Array, Array]:
    """Return the kinds (engine, trainer), each uint8 [N], in the context of sequence and other side.

    ``table`` must be ordered by sequence and position. Exact zeros that end a sequence are a filler where the other
    side gives some of them a probability clearly below 1. A null that opens a turn is what engines return there.

    Args:
        table: rows in sequence order.
        starts: index of the first row of each sequence, when known.
    """
    engine = table.kinds("logprob_engine") if table.has("logprob_engine") else np.zeros(len(table), dtype=np.uint8)
    trainer = table.kinds("logprob_trainer") if table.has("logprob_trainer") else np.zeros(len(table), dtype=np.uint8)
    if not len(table):
        return engine, trainer
    if starts is None:
        starts = sequence_starts(table)
    lengths = np.diff(np.append(starts, len(table)))
    for name, other, kinds, other_kinds in (
        ("logprob_engine", "logprob_trainer", engine, trainer),
        ("logprob_trainer", "logprob_engine", trainer, engine),
    ):
        if not table.has(name):
            continue
        values = table.columns[name]
        runs = trailing_zero_runs(values, starts, lengths)
        sure = _sure_limit(table, name, other, other_kinds, starts + lengths - runs, starts + lengths)
        for index in np.flatnonzero(runs > 0):
            end = starts[index] + lengths[index]
            rows = slice(end - runs[index], end)
            if table.has(other):
                doubt = (other_kinds[rows] == Kind.OK) & (table.columns[other][rows] < sure)
                if not doubt.any():
                    continue
                # Only the run from the first doubtful zero on: the zeros before it may be sure tokens.
                first = int(np.argmax(doubt))
                if runs[index] - first < 2 and not _padded_tail(table, name, end - 1):
                    continue
                rows = slice(end - runs[index] + first, end)
            elif runs[index] < _LONE_ZERO_RUN:
                continue
            kinds[rows] = np.where(kinds[rows] == Kind.OK, Kind.ZERO_FILL, kinds[rows])
    _boundary_nulls(table, engine, starts)
    return engine, trainer


def _sure_limit(
    table: GapTable, name: str, other: str, other_kinds: Array, run_starts: Array, run_ends: Array
) -> float:
    """Return the value of the other side below which a trailing zero is a filler.

    A kept set of one token also has log-prob exactly 0, anywhere in a sequence; where that happens the other side
    goes down to log(top_p), so a filler must be clearly below what is seen before the tails.
    """
    if not table.has(other):
        return float(_SURE)
    zero = (table.columns[name] == 0.0) & (other_kinds == Kind.OK)
    tail = np.zeros(len(table) + 1, dtype=np.int64)
    np.add.at(tail, run_starts, 1)
    np.add.at(tail, run_ends, -1)
    inner = table.columns[other][zero & (np.cumsum(tail)[:-1] == 0)]
    if len(inner) < 3:
        return float(_SURE)
    return min(float(_SURE), float(np.quantile(inner, 0.02)) - 0.1)


def _padded_tail(table: GapTable, name: str, row: int) -> bool:
    """Whether a single final zero is a filler: a token after the engine's last one, or one the engine doubts less."""
    if table.has("real_length", "position"):
        return bool(table.columns["position"][row] >= table.columns["real_length"][row])
    return name == "logprob_engine" and bool(table.get("logprob_trainer", 0.0)[row] < -0.5)


def _boundary_nulls(table: GapTable, engine: Array, starts: Array) -> None:
    """Mark nulls that open a sequence or a turn: engines give no value for the position a request starts at."""
    if not (engine == Kind.NULL).any():
        return
    opens = np.zeros(len(table), dtype=bool)
    opens[starts] = True
    if table.has("turn"):
        turn = table.columns["turn"]
        opens[1:] |= turn[1:] != turn[:-1]
    lone = np.ones(len(table), dtype=bool)
    lone[:-1] = engine[1:] != Kind.NULL
    engine[opens & lone & (engine == Kind.NULL)] = Kind.BOUNDARY_NULL


def sequence_starts(table: GapTable) -> Array:
    """Return int64 [S]: the first row of each sequence of a table in sequence order."""
    if not len(table):
        return np.zeros(0, dtype=np.int64)
    change = np.zeros(len(table), dtype=bool)
    change[0] = True
    for name in ("run", "step", "sample"):
        if name in table.columns:
            values = table.columns[name]
            change[1:] |= values[1:] != values[:-1]
    if not table.has("sample") and table.has("position"):
        position = table.columns["position"]
        change[1:] |= position[1:] <= position[:-1]
    return np.flatnonzero(change)


def concatenate(tables: Sequence[GapTable], source: str = "") -> GapTable:
    """Return the rows of several tables; a column that only some have is filled with null there."""
    if len(tables) == 1:
        return tables[0]
    names = [name for name in schema() if any(name in table.columns for table in tables)]
    columns: dict[str, Array] = {}
    nulls: dict[str, Array] = {}
    for name in names:
        parts, empty = [], []
        for table in tables:
            present = name in table.columns
            parts.append(table.columns[name] if present else table.get(name, schema()[name].missing))
            empty.append(table.nulls.get(name, np.full(len(table), not present)))
        columns[name] = np.concatenate(parts)
        if any(part.any() for part in empty):
            nulls[name] = np.concatenate(empty)
    return GapTable(columns, nulls, source, [note for table in tables for note in table.notes])
