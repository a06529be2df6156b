"""One call that reads any source: a file by its content, a folder by what it holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from zerogap.errors import UsageError, nearest
from zerogap.gap.names import metrics
from zerogap.gap.readers.files import load_file
from zerogap.gap.readers.folder import load_folder
from zerogap.gap.readers.loaded import Loaded
from zerogap.gap.series import Series, series_of_steps


def load(source: Path, mapping: Mapping[str, str] | None = None, label: str | None = None) -> Loaded:
    """Read one source: a log, dump, table, event file, or a folder that holds some of these.

    Args:
        source: file or folder.
        mapping: table column -> source column, from ``--map``.
        label: name to show; the path by default.

    Raises:
        UsageError: nothing usable was found, or the source is damaged or refused.
    """
    loaded = Loaded(label or str(source))
    if not source.exists():
        raise UsageError(f"{source}: no such file or folder; check the path")
    if source.is_dir():
        load_folder(source, mapping or {}, loaded)
    else:
        load_file(source, mapping or {}, loaded)
    if mapping and loaded.table is None:
        raise UsageError(f"--map: {source} is a {loaded.kind or 'source'} without columns of tokens; leave --map out")
    if loaded.has_tokens:
        made = series_of_steps(loaded.accumulator.steps, loaded.label, str(source))
        _merge_series(loaded, made)
    if not loaded.series and not loaded.has_tokens and loaded.table is None and not loaded.hits and not loaded.facts:
        raise UsageError(_nothing(source, loaded))
    return loaded


def _nothing(source: Path, loaded: Loaded) -> str:
    seen = sorted({name for series in loaded.other.values() for name in series.other})
    wanted = [name for metric in metrics() for name in metric.names]
    near = next((f"{name!r} there{hint}" for name in seen if (hint := nearest(name, wanted))), "")
    return (
        f"{source}: no gap metric and no log-probs found in this {loaded.kind or 'source'}"
        + (f"; {near}" if near else "")
        + "; see `zerogap gap --metrics` for the names that are known, or name columns with --map"
    )


def _merge_series(loaded: Loaded, made: list[Series]) -> None:
    """Token series win for what they measure; what a log said beside them (lr, reward) is kept."""
    if len(made) == 1 and len(loaded.series) == 1:
        ours, logged = made[0], loaded.series[0]
        index = {int(step): row for row, step in enumerate(logged.steps)}
        rows = [index.get(int(step)) for step in ours.steps]
        if all(row is None for row in rows):
            loaded.series = made + loaded.series
            return
        loaded.contradictions += _contradictions(ours, logged, rows)
        for name, values in logged.values.items():
            if name not in ours.values:
                ours.values[name] = np.array([math.nan if r is None else values[r] for r in rows])
                ours.names[name] = logged.names[name]
        loaded.other[logged.label] = logged
        if len(logged) > len(ours):
            # The log covers more steps than the tokens do: the log is the series.
            loaded.series = [logged]
            return
        loaded.series = made
    else:
        loaded.series = made + loaded.series


def _contradictions(ours: Series, logged: Series, rows: list[int | None]) -> list[tuple[int, float, float]]:
    """Return (step, logged mean, mean of the tokens) where one is 0 and the other not, or they differ by half."""
    if "abs_mean" not in logged.values:
        return []
    found = []
    for row, other in enumerate(rows):
        if other is None:
            continue
        tokens, value = float(ours.values["abs_mean"][row]), float(logged.values["abs_mean"][other])
        low, high = sorted((tokens, value)) if math.isfinite(value) else (0.0, tokens)
        if high > 1e-7 and low < 0.5 * high:
            found.append((int(ours.steps[row]), value, tokens))
    return found
