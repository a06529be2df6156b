"""Two runs side by side, with effect sizes; only quantities of the same definition are put on one line."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from zerogap.gap.judge import Verdict
from zerogap.gap.names import GAP_QUANTITIES
from zerogap.gap.series import Series


@dataclass(frozen=True)
class Row:
    """One quantity of both runs: medians over steps (or the number of the tokens), and how far apart they are."""

    name: str
    first: float
    second: float
    ratio: float
    effect: float | None


@dataclass
class Comparison:
    """Rows for two runs; ``first_apart`` is the first common step where the gaps part (three times)."""

    first: str
    second: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    first_apart: int | None = None


def compare_runs(a: Verdict, b: Verdict) -> Comparison:
    """Compare two verdicts' series and numbers."""
    made = Comparison(a.label, b.label)
    first = next((s for s in a.series if s.judged()), None)
    second = next((s for s in b.series if s.judged()), None)
    if first is not None and second is not None:
        return compare_series(first, second, made)
    if a.numbers is not None and b.numbers is not None:
        for name in ("mean_abs", "max_abs", "mean_signed", "different_share", "k3", "ratio_mean"):
            made.rows.append(_row(name, getattr(a.numbers, name), getattr(b.numbers, name), None))
    else:
        made.notes.append("the two sources have no quantity in common")
    return made


def compare_series(first: Series, second: Series, made: Comparison | None = None) -> Comparison:
    """Compare two series over all their steps and say where they part."""
    made = made or Comparison(first.label, second.label)
    shared = [q for q in first.values if q in second.values]
    for quantity in sorted(shared, key=lambda q: (q not in GAP_QUANTITIES, q)):
        _, x = first.finite(quantity)
        _, y = second.finite(quantity)
        if len(x) and len(y):
            made.rows.append(_row(quantity, float(np.median(x)), float(np.median(y)), cohen(x, y)))
    judged = first.judged()
    if judged is not None and judged == second.judged():
        made.first_apart = part(first, second, judged)
        if made.first_apart is not None:
            made.notes.append(f"the gaps part at step {made.first_apart} (first step where one is 3 times the other)")
    elif judged != second.judged():
        made.notes.append(
            f"{first.label} gives {judged}, {second.label} gives {second.judged()}: unlike quantities, not compared"
        )
    return made


def part(first: Series, second: Series, quantity: str) -> int | None:
    """Return the first common step at which one gap is three times the other, if they were alike before."""
    at = {int(s): float(v) for s, v in zip(second.steps, second.values[quantity], strict=True)}
    alike = 0
    for step, value in zip(first.steps, first.values[quantity], strict=True):
        other = at.get(int(step))
        if other is None or not math.isfinite(other) or not math.isfinite(value):
            continue
        low, high = sorted((abs(float(value)), abs(other)))
        if high > 3 * low and high > 1e-6:
            return int(step) if alike else None
        alike += 1
    return None


def cohen(x: np.ndarray, y: np.ndarray) -> float | None:
    """Return Cohen's d of two samples over steps, or None where it has no meaning."""
    if len(x) < 2 or len(y) < 2:
        return None
    pooled = math.sqrt(((len(x) - 1) * x.var(ddof=1) + (len(y) - 1) * y.var(ddof=1)) / (len(x) + len(y) - 2))
    return float((y.mean() - x.mean()) / pooled) if pooled > 0 else None


def _row(name: str, first: float, second: float, effect: float | None) -> Row:
    ratio = second / first if first else math.nan
    return Row(name, first, second, ratio, effect)
