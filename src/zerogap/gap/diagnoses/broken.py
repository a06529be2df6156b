"""Diagnoses of a table whose log-probs or mask are not what they seem."""

from __future__ import annotations

import numpy as np

from zerogap.gap.diagnoses.base import Finding
from zerogap.gap.diagnoses.context import Context
from zerogap.gap.table import Kind

OUTLIER_RATIO = 50.0  # mean / median


def diagnose_values(c: Context) -> list[Finding]:
    """Return findings on missing, filled and masked values."""
    return [*_missing(c), *_filled(c), *_beyond_end(c), *_nothing(c)]


def _rows_text(c: Context, rows: np.ndarray, limit: int = 4) -> tuple[str, ...]:
    columns = c.table.columns
    made = []
    for row in rows[:limit]:
        parts = [f"{n} {columns[n][row]}" for n in ("step", "sample", "position") if n in columns]
        values = [f"{n.removeprefix('logprob_')} {columns[n][row]:g}" for n in ("logprob_engine", "logprob_trainer")
                  if n in columns]  # fmt: skip
        made.append(f"{', '.join(parts)}: {', '.join(values)}")
    return tuple(made)


def _missing(c: Context) -> list[Finding]:
    found: list[Finding] = []
    boundary = c.mask & (c.kinds_engine == Kind.BOUNDARY_NULL)
    if boundary.any():
        count = int(boundary.sum())
        found.append(
            Finding(
                "metric-broken/boundary-null",
                0.95,
                f"BOUNDARY_NULL x{count}, gap over {c.usable} tokens",
                {"boundary_null": count, "compared": c.usable},
                _rows_text(c, np.flatnonzero(boundary)),
            )
        )
    missing_kinds = (Kind.NULL, Kind.NAN, Kind.POS_INF, Kind.NEG_INF, Kind.POSITIVE)
    counts: dict[str, int] = {}
    bad = np.zeros(len(c.table), dtype=bool)
    for side, kinds in (("engine", c.kinds_engine), ("trainer", c.kinds_trainer)):
        for kind in missing_kinds:
            here = c.mask & (kinds == kind)
            if here.any():
                counts[f"{side} {kind.name.lower()}"] = int(here.sum())
                bad |= here
    if counts:
        text = ", ".join(f"{name} {count}" for name, count in counts.items())
        found.append(
            Finding(
                "metric-broken/missing-logprobs",
                1.0,
                f"missing={int(bad.sum())} ({text}), gap over {c.usable} tokens",
                {"missing": int(bad.sum()), "compared": c.usable, **counts},
                _rows_text(c, np.flatnonzero(bad)),
            )
        )
    return found


def _filled(c: Context) -> list[Finding]:
    found: list[Finding] = []
    ends = c.starts + c.lengths - 1
    for side, kinds in (("engine", c.kinds_engine), ("trainer", c.kinds_trainer)):
        sentinel = c.mask & (kinds == Kind.SENTINEL)
        if sentinel.any():
            values = sorted({float(v) for v in c.table.columns[f"logprob_{side}"][sentinel]})
            found.append(
                Finding(
                    "metric-broken/padded-logprobs",
                    1.0,
                    f"{int(sentinel.sum())} {side} log-probs are a sentinel "
                    f"({', '.join(f'{v:g}' for v in values[:3])})",
                    {"n": int(sentinel.sum()), "values": values[:8]},
                    _rows_text(c, np.flatnonzero(sentinel)),
                )
            )
        zero = c.mask & (kinds == Kind.ZERO_FILL)
        if not zero.any():
            continue
        per_sequence = np.add.reduceat(zero.astype(np.int64), c.starts)
        lone_last = (per_sequence == 1) & zero[ends]
        if side == "engine" and lone_last.sum() == (per_sequence > 0).sum():
            rows = ends[lone_last]
            found.append(
                Finding(
                    "metric-broken/appended-token",
                    0.85,
                    f"the last token of {len(rows)} sequences has log-prob 0.0 and mask=1: "
                    "FRAMEWORK_APPENDED_TOKEN with mask=1",
                    {"n": len(rows)},
                    _rows_text(c, rows),
                )
            )
            continue
        found.append(
            Finding(
                "metric-broken/padded-logprobs",
                0.95,
                f"PADDED_LOGPROBS n={int(zero.sum())}: exact zeros at the tail of {int((per_sequence > 0).sum())} "
                f"sequences ({side})",
                {"n": int(zero.sum()), "sequences": int((per_sequence > 0).sum())},
                _rows_text(c, np.flatnonzero(zero)),
            )
        )
    return found


def _beyond_end(c: Context) -> list[Finding]:
    """Trained tokens at or after the number of tokens that the engine generated."""
    if not c.table.has("real_length", "position"):
        return []
    beyond = c.mask & (c.table.columns["position"] >= c.table.columns["real_length"])
    if "real_length" in c.table.nulls:
        beyond &= ~c.table.nulls["real_length"]
    beyond &= c.kinds_engine != Kind.ZERO_FILL  # already said as appended or padded
    if not beyond.any():
        return []
    count = int(beyond.sum())
    return [
        Finding(
            "metric-broken/pad-in-mask",
            1.0,
            f"PAD_IN_MASK {count} tokens after the last generated one have mask 1",
            {"n": count},
            _rows_text(c, np.flatnonzero(beyond)),
        )
    ]


def _nothing(c: Context) -> list[Finding]:
    if len(c.rows) or not c.table.has("logprob_engine", "logprob_trainer"):
        return []
    return [
        Finding(
            "metric-broken/no-data",
            1.0,
            f"NO_DATA: valid_tokens=0 of {len(c.table)} ({int((~c.mask).sum())} masked out)",
            {"valid_tokens": 0, "tokens": len(c.table)},
        )
    ]


def diagnose_outliers(c: Context) -> list[Finding]:
    """A mean that a handful of tokens make; only where they are far beyond what rounding gives."""
    if len(c.size) < 50:
        return []
    mean, median, largest = float(c.size.mean()), float(np.median(c.size)), float(c.size.max())
    if largest < 5.0 or mean <= OUTLIER_RATIO * median:
        return []
    outliers = int((c.size > 0.1 * largest).sum())
    if outliers > 0.02 * len(c.size):
        return []
    p99 = float(np.quantile(c.size, 0.99))
    return [
        Finding(
            "metric-broken/outlier-dominated",
            0.9,
            f"OUTLIER_DOMINATED mean={mean:.4g} median={median:.4g} p99={p99:.4g} max={largest:.4g}; "
            f"{outliers} of {len(c.size)} tokens make it",
            {"mean": mean, "median": median, "p99": p99, "max": largest, "outliers": outliers},
            c.worst(5),
        )
    ]
