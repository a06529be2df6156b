"""How the gap of a series moves: high after a resume, a jump, growth, a saw-tooth."""

from __future__ import annotations

import itertools

import numpy as np

from zerogap.gap.diagnoses.base import Finding
from zerogap.gap.diagnoses.statistics import rank_correlation
from zerogap.gap.series import Series
from zerogap.gap.table import Array

# By quantity: after / before of a worse stretch, the same when it is one step long, last / first of a growing gap.
# Squares (k3) and maxima scatter more than means; k1 has a sign and scatters around 0, so it needs a size as well.
FACTORS = {
    "abs_mean": (3.0, 5.0, 1.8),
    "prob_abs_mean": (3.0, 5.0, 1.8),
    "log_ppl_abs": (4.0, 8.0, 2.5),
    "mult_prob_error": (4.0, 8.0, 2.5),
    "abs_max": (6.0, 20.0, 3.0),
    "k3": (9.0, 25.0, 3.2),
    "k2": (9.0, 25.0, 3.2),
    "k1": (9.0, 25.0, 4.0),
}
K1_SIZE = 0.01  # nats
GROWTH_RANK = 0.75  # Spearman correlation with the step, for growth
LAYOUT_NATS = 1.0  # no rounding, staleness or quantisation in the field gives this
RESUME_FACTOR = 8.0


def shape(series: Series, rows: Array, values: Array, quantity: str) -> list[Finding]:
    """Return at most one explanation of how the gap moves: resume, layout, jump or growth."""
    resumed = _resume(series, rows, values)
    if resumed:
        return resumed
    if len(values) < 2:
        return []
    if values[0] == 0.0:
        first = int(np.flatnonzero(values > 0)[0])
        return zero_then_not(series, rows, values) if values[first:].min() > 0 else []
    jump = _jump(series, rows, values, quantity)
    if jump:
        return jump
    return _growth(series, rows, values, quantity)


def zero_then_not(series: Series, rows: Array, values: Array) -> list[Finding]:
    """A gap of 0 up to some step, and none from there on."""
    later = np.flatnonzero(values > 0)
    if not len(later):
        return []
    first = int(later[0])
    return [
        Finding(
            "weights-differ/sync-not-applied",
            0.9,
            f"0 up to step {series.steps[rows[first - 1]]}, {values[first]:.4g} at step {series.steps[rows[first]]} "
            f"(first bad step={series.steps[rows[first]]})",
            {"first_bad": int(series.steps[rows[first]])},
            tuple(
                f"step {series.steps[rows[i]]}: {values[i]:.4g}"
                for i in range(max(first - 2, 0), min(first + 3, len(values)))
            ),
        )
    ]


def _resume(series: Series, rows: Array, values: Array) -> list[Finding]:
    """High only at the first step (or first after a restart), then normal."""
    candidates = [int(np.searchsorted(rows, r)) for r in series.restarts]
    if series.steps[rows[0]] > 0:
        candidates.append(0)
    for index in candidates:
        after = values[index + 1 : index + 6]
        high = 1
        while len(after) > 1 and after[0] > 0.3 * values[min(index, len(values) - 1)] and high < 3:
            after, high = after[1:], high + 1
        if index < len(values) and len(after) and values[index] > RESUME_FACTOR * np.median(after):
            step = int(series.steps[rows[index]])
            return [
                Finding(
                    "weights-differ/resumed-on-base",
                    0.85,
                    f"{values[index]:.4g} at step {step}, the first after a resume; {np.median(after):.4g} after it",
                    {"first": float(values[index]), "next": float(np.median(after)), "step": step},
                    (f"step {step}: {values[index]:.4g}", f"step {series.steps[rows[index + 1]]}: {after[0]:.4g}"),
                )
            ]
    return []


def _jump(series: Series, rows: Array, values: Array, quantity: str) -> list[Finding]:
    """A good stretch from the first step, then one bad step after which it stays bad."""
    best = -1
    several, single, _ = FACTORS[quantity]
    for index in range(1, len(values)):
        before, after = values[:index], values[index:]
        factor = several if len(after) > 1 else single
        if quantity == "k1" and values[index] < K1_SIZE:
            continue
        if values[index] > factor * before.max() and np.median(after) > factor * np.median(before):
            best = index
            break
    if best < 0:
        return []
    before, bad = values[:best], float(values[best])
    step = int(series.steps[rows[best]])
    numbers = {"before": float(np.median(before)), "after": bad, "first_bad": step}
    if quantity == "abs_mean" and bad >= LAYOUT_NATS:
        return [
            Finding(
                "weights-differ/layout",
                0.9,
                f"{np.median(before):.4g} before, {bad:.4g} at step {step}: more than any stale weights give",
                numbers,
                (f"step {step}: {bad:.4g}",),
            )
        ]
    update = _update_text(series, int(rows[best]))
    return [
        Finding(
            "weights-differ/not-synced",
            0.9 if update else 0.75,
            f"{np.median(before):.4g} up to step {series.steps[rows[best - 1]]}, {bad:.4g} at step {step} "
            f"(first_bad={step}{update})",
            numbers,
            (f"step {series.steps[rows[best - 1]]}: {values[best - 1]:.4g}", f"step {step}: {bad:.4g}"),
        )
    ]


def _update_text(series: Series, row: int) -> str:
    """Say which update came before the row, when lr or grad_norm is known."""
    for name in ("lr", "grad_norm"):
        values = series.values.get(name)
        if values is None:
            continue
        moved = np.flatnonzero(np.nan_to_num(values) > 0)
        if len(moved) and moved[0] in (row - 1, row):
            return f", the first update with {name} > 0"
    return ""


def _growth(series: Series, rows: Array, values: Array, quantity: str) -> list[Finding]:
    if len(values) < 3 or (quantity == "k1" and values.max() < K1_SIZE):
        return []
    steps = series.steps[rows].astype(float)
    head = max(1, len(values) // 8)
    start, now = float(np.median(values[:head])), float(np.median(values[-head:]))
    rank = rank_correlation(steps, values)
    resets = _resets(values, FACTORS[quantity][2])
    if len(values) >= 8 and resets and _saw_tooth(values, resets):
        at = [int(series.steps[rows[i]]) for i in resets]
        return [
            Finding(
                "stale-state/prefix-cache",
                0.7,
                f"grows and falls back at steps {', '.join(map(str, at[:5]))}, as when an engine is restarted or "
                "flushed",
                {"resets": at},
                tuple(f"step {s}: back to {values[i]:.4g}" for s, i in zip(at[:5], resets, strict=False)),
                code="STALE_PREFIX_CACHE",
            )
        ]
    means = quantity in ("abs_mean", "prob_abs_mean")
    if len(values) < 6 and not means:
        return []
    needed = GROWTH_RANK if len(values) >= 16 else 0.9 if len(values) >= 6 else 0.95
    if now < FACTORS[quantity][2] * start or rank < needed:
        return []
    slope = float(np.polyfit(steps, values, 1)[0])
    numbers = {"baseline": start, "now": now, "slope_per_step": slope, "rank_correlation": rank}
    # At the precision of the values themselves: 0.00084 nats a step is said as it is.
    text = f"baseline {start:.4g}, now {now:.4g}, slope {slope:+.2g}/step"
    rows_shown = tuple(f"step {series.steps[rows[i]]}: {values[i]:.4g}" for i in (0, len(values) // 2, -1))
    lr = series.values.get("lr")
    if lr is not None and np.isfinite(lr[rows]).any() and not np.nan_to_num(lr[rows]).any():
        covariate = _covariate(series, rows, values)
        return [
            Finding(
                "stale-state/growing-at-lr0",
                0.85,
                f"{text}; lr is 0 throughout{covariate}",
                numbers,
                rows_shown,
            )
        ]
    return [
        Finding("stale-state/growing", 0.6 + 0.3 * max(0.0, rank), text + _covariate(series, rows, values), numbers,
                rows_shown)
    ]  # fmt: skip


def _covariate(series: Series, rows: Array, values: Array) -> str:
    """Name what else moves with the gap."""
    for name, text in (("response_length", "response length"), ("cached_tokens", "cached tokens")):
        other = series.values.get(name)
        if other is None or np.isfinite(other[rows]).sum() < 3:
            continue
        both = np.isfinite(other[rows])
        strength = rank_correlation(other[rows][both], values[both])
        if strength > 0.7:
            first, last = other[rows][both][0], other[rows][both][-1]
            return f"; covariate={text} ({first:.4g} to {last:.4g}, rank correlation {strength:.2f})"
    return ""


def _resets(values: Array, growth: float) -> list[int]:
    """Indices where the gap falls back to near its start after having grown by the factor ``growth``."""
    start = float(np.median(values[: max(1, len(values) // 16)]))
    return [
        i
        for i in range(2, len(values))
        if values[i] < values[i - 1] / growth and values[i] < 1.5 * start and values[i - 1] > growth * start
    ]


def _saw_tooth(values: Array, resets: list[int]) -> bool:
    """Whether the stretches between resets each rise."""
    edges = [0, *resets, len(values)]
    rising = [rank_correlation(np.arange(b - a), values[a:b]) > 0.8 for a, b in itertools.pairwise(edges) if b - a >= 4]
    # Every stretch but the last must be long enough to be seen to rise.
    return len(rising) >= len(resets) and all(rising)
