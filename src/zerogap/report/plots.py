"""Figures of the gap as SVG: transparent, in colours that read on white and on black."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zerogap.errors import UsageError
from zerogap.files import write_atomic
from zerogap.gap.diagnoses.context import Context
from zerogap.gap.judge import Verdict
from zerogap.gap.numbers import Profile
from zerogap.gap.readers import Loaded
from zerogap.gap.series import Series

INK = "#767676"  # text and axes: 4.5:1 on white, 4:1 on near-black
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")  # told apart with any colour vision
_STYLE: Any = {
    "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.facecolor": "none", "figure.facecolor": "none", "savefig.facecolor": "none", "axes.grid": True,
    "grid.color": INK, "grid.alpha": 0.25, "axes.spines.top": False, "axes.spines.right": False, "font.size": 11,
    "svg.fonttype": "path", "svg.hashsalt": "zerogap", "legend.frameon": False, "axes.titlesize": 12,
    "axes.titlelocation": "left", "figure.dpi": 100,
}  # fmt: skip
_SCATTER_POINTS = 8000


def svg(figure: Figure) -> str:
    """Return a figure as SVG text."""
    buffer = io.StringIO()
    with rc_context(_STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": "zerogap"})
    return buffer.getvalue()


def _figure(width: float = 6.4, height: float = 3.4) -> tuple[Figure, Axes]:
    with rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots()
    return figure, axes


def curve(
    title: str, unit: str, lines: Sequence[tuple[str, np.ndarray, np.ndarray]],
    band: tuple[float, float] | None = None,
) -> Figure:  # fmt: skip
    """Return one quantity over steps: (label, steps, values) for each line; ``band`` is the healthy range."""
    figure, axes = _figure()
    with rc_context(_STYLE):
        draw_curve(axes, title, unit, lines, band)
    return figure


def draw_curve(
    axes: Axes, title: str, unit: str, lines: Sequence[tuple[str, np.ndarray, np.ndarray]],
    band: tuple[float, float] | None = None,
) -> None:  # fmt: skip
    """Draw a curve on given axes; values that are no number leave a hole and a cross at the foot."""
    for number, (label, steps, values) in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(steps, values, color=colour, marker="o" if len(steps) < 60 else None, markersize=3, linewidth=1.5,
                  label=label)  # fmt: skip
        bad = ~np.isfinite(values)
        if bad.any():
            axes.plot(steps[bad], np.zeros(int(bad.sum())), "x", color=colour, label="not a number")
    if band is not None:
        axes.axhspan(*band, color=COLOURS[2], alpha=0.15, label="healthy range")
    finite = np.concatenate([v[np.isfinite(v)] for _, _, v in lines]) if lines else np.zeros(0)
    positive = finite[finite > 0]
    if len(positive) and len(positive) == len(finite) and positive.max() > 100 * positive.min():
        axes.set_yscale("log")
    elif len(finite) and not finite.any():
        axes.set_ylim(-0.05, 1.0)
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    if len(lines) > 1 or band is not None:
        axes.legend(fontsize=9)


def scatter(context: Context) -> Figure:
    """Return engine against trainer log-probs of compared tokens."""
    figure, axes = _figure(5.2, 4.6)
    with rc_context(_STYLE):
        draw_scatter(axes, context)
    return figure


def draw_scatter(axes: Axes, context: Context) -> None:
    """Draw the scatter; the points are pixels inside the SVG, or the file would be huge."""
    x, y = context.engine, context.trainer
    if len(x) > _SCATTER_POINTS:
        chosen = np.random.default_rng(0).choice(len(x), _SCATTER_POINTS, replace=False)
        x, y = x[chosen], y[chosen]
    low = float(min(x.min(initial=0), y.min(initial=0))) - 0.2
    axes.plot([low, 0], [low, 0], color=INK, linewidth=1)
    axes.scatter(x, y, s=5, color=COLOURS[0], alpha=0.5, linewidths=0, rasterized=True)
    axes.set_title("engine against trainer")
    axes.set_xlabel("engine log-prob, nats")
    axes.set_ylabel("trainer log-prob, nats")


def bars(profile: Profile, title: str) -> Figure:
    """Return mean abs(d) for each group of a profile."""
    figure, axes = _figure()
    with rc_context(_STYLE):
        rows = profile.rows[-24:]
        axes.bar(range(len(rows)), [mean for _, _, mean, _ in rows], color=COLOURS[0])
        if not any(mean for _, _, mean, _ in rows):
            axes.set_ylim(0, 1)
        axes.set_xticks(range(len(rows)), [label[:14] for label, *_ in rows], rotation=45, ha="right", fontsize=9)
        axes.set_ylabel("mean abs(d), nats")
        axes.set_title(title)
        axes.grid(axis="x", visible=False)
    return figure


def samples(context: Context) -> Figure:
    """Return the distribution of the mean gap over sequences."""
    figure, axes = _figure()
    counts, means = context.sequence_means
    values = means[counts > 0]
    with rc_context(_STYLE):
        if len(values) and values.max() > 0 and values.min() < values.max():
            axes.hist(values, bins=min(40, max(5, len(values) // 2)), color=COLOURS[0])
        else:
            axes.bar([0 if not len(values) else float(values[0])], [len(values)], width=0.05, color=COLOURS[0])
            axes.set_xlim(-0.5, 1.0)
        axes.set_title("gap by sample")
        axes.set_xlabel("mean abs(d) of a sample, nats")
        axes.set_ylabel("samples")
    return figure


def gap_lines(series: Sequence[Series], quantity: str) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Return the lines of one quantity for each series that has it."""
    made = []
    for s in series:
        if quantity not in s.values:
            continue
        # A step without the metric is left out; a step whose metric is nan stays, to be marked.
        keep = np.isfinite(s.values[quantity])
        keep[s.nonfinite.get(quantity, [])] = True
        made.append((s.label[-40:], s.steps[keep].astype(float), s.values[quantity][keep]))
    return made


def band_of(verdict: Verdict) -> tuple[float, float] | None:
    """Return the healthy range to draw, if the gap was judged by one."""
    return None if verdict.baseline is None else (verdict.baseline.low, verdict.baseline.high)


def save_plot(verdicts: Sequence[Verdict], loaded: Sequence[Loaded], path: Path) -> None:
    """Write one image: the gap over steps, and for tokens the scatter and the profiles.

    Raises:
        UsageError: the name is neither .svg nor .png, the folder is missing, or there is nothing to draw.
    """
    kind = path.suffix.lower().lstrip(".")
    if kind not in ("svg", "png"):
        raise UsageError(f"--plot {path}: name a .svg or .png file")
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path}: the folder {path.parent} does not exist")
    series = [s for v in verdicts for s in v.series if s.judged()]
    tables = [item.table for item in loaded if item.has_tokens and item.table is not None]
    contexts = [c for c in map(Context, tables) if len(c.rows)]
    quantity = series[0].judged() if series else None
    if quantity is None and not contexts:
        raise UsageError("--plot: nothing to draw; no gap over steps and no tokens")
    panels = (1 if quantity else 0) + len(contexts[:2])
    with rc_context(_STYLE | {"savefig.facecolor": "white" if kind == "png" else "none"}):
        figure = Figure(figsize=(7.2, 3.6 * panels), layout="constrained")
        axes = list(np.atleast_1d(figure.subplots(panels, 1)))
        if quantity:
            draw_curve(axes.pop(0), "gap over steps", quantity, gap_lines(series, quantity), band_of(verdicts[0]))
        for context, ax in zip(contexts, axes, strict=False):
            draw_scatter(ax, context)
        write_atomic(path, lambda temporary: figure.savefig(temporary, format=kind, metadata=(
            {"Date": None} if kind == "svg" else None)))  # fmt: skip


def finite_or(value: float, other: str = "-") -> str:
    """Return a number in four digits, or ``other``."""
    return other if value is None or math.isnan(value) else f"{value:.4g}"
