"""What every diagnosis of a table starts from: the compared tokens, cut into sequences, and a noise floor."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from zerogap.gap.facts import Facts
from zerogap.gap.table import Array, GapTable, Kind, classify, sequence_starts


@dataclass
class Context:
    """A table in sequence order with its differences.

    Attributes:
        table: the rows, ordered by sequence and position.
        facts: what is known about the setup.
        contract: whether a bit-exact contract is claimed.
        floor: mean abs(d) that numerics alone give, if the person said so.
    """

    table: GapTable
    facts: Facts = field(default_factory=Facts)
    contract: bool = False
    floor: float | None = None

    def __post_init__(self) -> None:
        self.table = self.table.sorted()
        self.starts: Array = sequence_starts(self.table)
        self.lengths: Array = np.diff(np.append(self.starts, len(self.table)))
        self.kinds_engine, self.kinds_trainer = classify(self.table, self.starts)
        self.mask: Array = self.table.mask()
        self.use: Array = (
            self.mask
            & (self.kinds_engine == Kind.OK)
            & (self.kinds_trainer == Kind.OK)
            & self.table.has("logprob_engine", "logprob_trainer")
        )

    @property
    def usable(self) -> int:
        """Trained tokens with a real log-prob on every side that is there."""
        return int((self.mask & (self.kinds_engine == Kind.OK) & (self.kinds_trainer == Kind.OK)).sum())

    @cached_property
    def sequence(self) -> Array:
        """Which sequence each row belongs to, int64 [N]."""
        return np.repeat(np.arange(len(self.starts)), self.lengths)

    @cached_property
    def rows(self) -> Array:
        """Indices of compared rows."""
        return np.flatnonzero(self.use)

    @cached_property
    def engine(self) -> Array:
        """Engine log-probs of compared rows, float64."""
        return self.table.get("logprob_engine", 0.0)[self.rows].astype(np.float64)

    @cached_property
    def trainer(self) -> Array:
        """Trainer log-probs of compared rows, float64."""
        return self.table.get("logprob_trainer", 0.0)[self.rows].astype(np.float64)

    @cached_property
    def d(self) -> Array:
        """Trainer minus engine on compared rows, float64."""
        return self.trainer - self.engine

    @cached_property
    def size(self) -> Array:
        """abs(d)."""
        return np.abs(self.d)

    @cached_property
    def position(self) -> Array:
        """Position in the response of compared rows."""
        if self.table.has("position"):
            return self.table.columns["position"][self.rows]
        return (np.arange(len(self.table)) - self.starts[self.sequence])[self.rows]

    @cached_property
    def in_sequence(self) -> Array:
        """Which sequence each compared row belongs to."""
        return self.sequence[self.rows]

    @cached_property
    def sequence_means(self) -> tuple[Array, Array]:
        """(tokens, mean abs(d)) of each sequence; mean is NaN for one without compared tokens."""
        count = np.bincount(self.in_sequence, minlength=len(self.starts)).astype(float)
        total = np.bincount(self.in_sequence, weights=self.size, minlength=len(self.starts))
        with np.errstate(invalid="ignore"):
            return count, np.where(count > 0, total / np.maximum(count, 1), np.nan)

    def column(self, name: str) -> Array | None:
        """Return a column at the compared rows, or None."""
        return self.table.columns[name][self.rows] if self.table.has(name) else None

    def row_text(self, compared: int) -> str:
        """Describe one compared token as evidence."""
        row = int(self.rows[compared])
        columns = self.table.columns
        parts = [f"{name} {columns[name][row]}" for name in ("run", "step", "sample") if name in columns]
        parts.append(f"position {int(self.position[compared])}")
        if "token_id" in columns:
            parts.append(f"token {int(columns['token_id'][row])}")
        return (
            f"{', '.join(parts)}: engine {self.engine[compared]:.6g}, trainer {self.trainer[compared]:.6g}, "
            f"d {self.d[compared]:+.4g}"
        )

    def worst(self, count: int = 3, among: Array | None = None) -> tuple[str, ...]:
        """Describe the tokens with the largest abs(d)."""
        size = self.size if among is None else np.where(among, self.size, -1.0)
        count = min(count, int((size >= 0).sum()))
        top = np.argpartition(-size, count - 1)[:count] if count else np.zeros(0, dtype=np.int64)
        return tuple(self.row_text(int(i)) for i in top[np.argsort(-size[top])])
