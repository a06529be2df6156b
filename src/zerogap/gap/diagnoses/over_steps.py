"""Diagnoses of a series: when the gap is zero, not a number or stuck at a cap, how it moves, and what of the sync."""

from __future__ import annotations

import numpy as np

from zerogap.gap.diagnoses.base import Finding
from zerogap.gap.diagnoses.trends import shape, zero_then_not
from zerogap.gap.facts import Facts
from zerogap.gap.series import Series
from zerogap.gap.table import Array

_CAPS = (1.5, 2.0, 3.0, 5.0, 10.0)


def diagnose_series(series: Series, facts: Facts, *, contract: bool) -> list[Finding]:
    """Return what the steps of one run say."""
    found = [*_clipped(series)]
    quantity = series.judged()
    if quantity is None:
        return found
    found += _nonfinite(series, quantity)
    rows, values = series.finite(quantity)
    if not len(values):
        return [*found, Finding("metric-broken/no-data", 1.0, f"no step has a finite {series.names.get(quantity)}")]
    values = _magnitude(quantity, values)
    if not values.any():
        if not contract:
            found.append(_exact_zero(series, quantity, rows, facts))
        return found
    found += _dead_steps(series, rows, values, contract=contract)
    if contract:
        return [*found, *(zero_then_not(series, rows, values) if values[0] == 0.0 else [])]
    moved = shape(series, rows, values, quantity)
    found += moved
    if not any(f.level == "fault" for f in moved):
        found += _sync_evidence(series, rows, values)
    return found


def _magnitude(quantity: str, values: Array) -> Array:
    """Return a version of the values where 0 is perfect: E[exp|d|] starts at 1, k1 has a sign."""
    if quantity in ("mult_prob_error", "seq_mult_prob_error"):
        return np.maximum(values - 1.0, 0.0)
    return np.abs(values)


def _exact_zero(series: Series, quantity: str, rows: Array, facts: Facts) -> Finding:
    hints = []
    grad = series.values.get("grad_norm")
    if (grad is not None and np.isnan(grad[rows]).any() and "grad_norm" in series.nonfinite) or str(
        facts.first("grad_norm")
    ).lower() == "nan":
        hints.append("grad_norm is nan: NaN masked by the metric")
    if facts.first("use_rollout_logprobs"):
        hints.append("--use-rollout-logprobs compares the rollout with itself")
    where = "; ".join(hints) or "NaN masked by the metric, or it compares a thing with itself"
    return Finding(
        "metric-broken/exact-zero",
        0.95 if hints else 0.8,
        f"{series.names.get(quantity, quantity)} is exactly 0.0 at all {len(rows)} steps ({where})",
        {"steps": len(rows)},
        (f"steps {series.steps[rows[0]]} to {series.steps[rows[-1]]}: 0.0",),
    )


def _nonfinite(series: Series, quantity: str) -> list[Finding]:
    at = series.nonfinite.get(quantity, [])
    if not at:
        return []
    steps = [int(series.steps[i]) for i in at]
    return [
        Finding(
            "metric-broken/nan-masked",
            1.0,
            f"{series.names.get(quantity, quantity)} is nan or inf at {len(steps)} of {len(series)} steps, "
            f"first at step {steps[0]}",
            {"steps": steps[:50]},
            tuple(f"step {step}" for step in steps[:5]),
        )
    ]


def _dead_steps(series: Series, rows: Array, values: Array, *, contract: bool) -> list[Finding]:
    """Single steps at exactly 0.0 within a run that has a gap: NaN turned into 0, or nothing compared."""
    if contract:
        return []
    zero = np.flatnonzero(values == 0.0)
    if not len(zero) or len(zero) == len(values):
        return []
    if zero[-1] == len(zero) - 1:
        return []  # zero at first only: the sync, said elsewhere
    steps = [int(series.steps[rows[i]]) for i in zero]
    return [
        Finding(
            "metric-broken/exact-zero",
            0.7,
            f"exactly 0.0 at {len(steps)} of {len(values)} steps (first: step {steps[0]}), "
            f"median of the others {np.median(values[values > 0]):.4g}",
            {"steps": steps[:50]},
            tuple(f"step {step}: 0.0" for step in steps[:5]),
        )
    ]


def _sync_evidence(series: Series, rows: Array, values: Array) -> list[Finding]:
    """Whether any update can have shown a wrong sync."""
    for name in ("grad_norm", "lr"):
        moved = series.values.get(name)
        if moved is None or not np.isfinite(moved[rows]).any():
            continue
        active = np.flatnonzero(np.nan_to_num(moved[rows]) > 0)
        if not len(active):
            return [
                Finding(
                    "weights-differ/sync-untested",
                    1.0,
                    f"not testable yet ({name}=0 at all {len(rows)} steps)",
                    {name: 0.0},
                )
            ]
        step = int(series.steps[rows[active[0]]])
        return [
            Finding(
                "weights-differ/sync-ok",
                0.8,
                f"first update with {name} > 0 at step {step}; gap {values[active[0]]:.4g} there, "
                f"{np.median(values):.4g} in the median: no jump",
                {"step": step},
            )
        ]
    if len(rows) < 2:
        return [
            Finding("weights-differ/sync-untested", 0.9, "only one step: no update lies between two rollouts yet", {})
        ]
    return []


def _clipped(series: Series) -> list[Finding]:
    """A maximum that equals one round cap at most steps."""
    made = []
    for quantity in ("ratio_max", "abs_max", "ratio_mean"):
        if quantity not in series.values:
            continue
        rows, values = series.finite(quantity)
        if not len(values):
            continue
        cap = float(values.max())
        at_cap = int(np.count_nonzero(values == cap))
        if cap in _CAPS and (at_cap >= 2 or len(values) <= 2):
            made.append(
                Finding(
                    "metric-broken/clipped-metric",
                    0.9 if at_cap > 2 else 0.75,
                    f"{series.names.get(quantity, quantity)} is exactly {cap:g} at {at_cap} of {len(values)} steps: "
                    "the logged max is the cap, true value unknown",
                    {"cap": cap, "steps": at_cap},
                    tuple(f"step {series.steps[rows[i]]}: {cap:g}" for i in np.flatnonzero(values == cap)[:5]),
                )
            )
    return made
