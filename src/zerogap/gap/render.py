"""What a person sees in the terminal: verdict first, then numbers, findings, profiles; plain text when piped."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from zerogap.console import printable
from zerogap.gap.baselines import Baseline
from zerogap.gap.judge import Verdict
from zerogap.gap.names import metrics
from zerogap.gap.numbers import Numbers
from zerogap.gap.side_by_side import Comparison

_STYLES = {"zero": "green", "healthy": "green", "out-of-range": "red", "fault": "red", "unknown": "yellow",
           "warn": "yellow", "note": "cyan", "info": "cyan"}  # fmt: skip
_PROFILE_ROWS = 12


def show(console: Console, verdict: Verdict, recheck: str) -> None:
    """Print one verdict."""
    style = _STYLES[verdict.status]
    console.print(Text.assemble((f"{verdict.status}", f"bold {style}"), f"  {printable(verdict.label)}"),
                  soft_wrap=True)  # fmt: skip
    console.print(f"  {printable(verdict.summary)}", soft_wrap=True)
    if verdict.baseline is not None:
        console.print(f"  range: {printable(verdict.baseline.text())}", soft_wrap=True)
    if verdict.numbers is not None and verdict.numbers.tokens:
        _numbers(console, verdict.numbers)
    _series(console, verdict)
    for finding in verdict.findings:
        cause = finding.cause
        console.print()
        console.print(
            Text.assemble(
                (f"  {finding.level} ", f"bold {_STYLES.get(finding.level, 'red')}"),
                (f"{finding.name} {finding.code}", "bold"),
                f"  confidence {finding.confidence:.2f}",
            )
        )
        rows = [("what", cause.title), ("expected", cause.expected), ("observed", finding.observed),
                *(("evidence", row) for row in finding.evidence[:4]), ("confirm", cause.confirm),
                ("to do", finding.hint), ("re-check", f"{recheck} --only {finding.name}")]  # fmt: skip
        for name, text in rows:
            console.print(f"    {name:<9} {printable(str(text))}", soft_wrap=True)
    if not verdict.findings:
        console.print("  diagnoses: none of the known faults was found")
    for name, profile in verdict.profiles.items():
        if len(profile.rows) > 1 and name in ("position", "probability", "turn", "staleness", "host"):
            _profile(console, name, profile.rows)
    for note in dict.fromkeys(verdict.notes):
        console.print(f"  note: {printable(note)}", soft_wrap=True)


def _grid(console: Console, rows: Sequence[Sequence[str]], header: Sequence[str]) -> None:
    """Print aligned columns that are never cut off, whatever the width."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    console.print()
    for number, row in enumerate((header, *rows)):
        cells = [cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in
                 enumerate(zip(row, widths, strict=True))]  # fmt: skip
        if len(header) == 2 and not header[1]:
            cells = [row[0].ljust(widths[0]), row[1]]
        console.print(Text("  " + "  ".join(cells).rstrip(), style="bold" if number == 0 else ""), soft_wrap=True)


def _number(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.4g}"


def _numbers(console: Console, n: Numbers) -> None:
    missing = {f"{side} {kind}": count for side, kinds in n.missing.items() for kind, count in kinds.items()}
    rows = [
        ("tokens compared", f"{n.compared:,} of {n.tokens:,} ({n.masked_out:,} masked out)"),
        ("different (bits)", f"{n.different:,} ({n.different_share:.1%})" if n.compared else "-"),
        ("mean abs(d)", _number(n.mean_abs)),
        ("max abs(d)", _number(n.max_abs)),
        ("mean d (trainer - engine)", _number(n.mean_signed)),
        ("quantiles of abs(d)", "  ".join(f"{k} {v:.3g}" for k, v in n.quantiles.items()) or "-"),
        ("share over 0.1", _number(n.share_over_0_1)),
        ("KL k1 / k2 / k3", f"{_number(n.k1)} / {_number(n.k2)} / {_number(n.k3)}"),
        ("importance ratio mean (min, max)", f"{_number(n.ratio_mean)} ({_number(n.ratio_min)}, "
            f"{_number(n.ratio_max)})"),
        ("ESS share", _number(n.ess_share)),
        ("outside the clip range 0.8 to 1.2", f"{_number(n.clip_low_share)} below, {_number(n.clip_high_share)} above"),
        ("sequences; log-ratio mean (min, max)", f"{n.sequences:,}; {_number(n.sequence_log_ratio_mean)} "
         f"({_number(n.sequence_log_ratio_min)}, {_number(n.sequence_log_ratio_max)})"),
    ]  # fmt: skip
    if n.kept_mass_tokens:
        rows.append(("sampler part / numerics part", f"{_number(n.sampler_part)} / {_number(n.numerics_part)}"))
        rows.append(("numerics mean abs, kept mass", f"{_number(n.numerics_mean_abs)}, {_number(n.kept_mass_mean)}"))
        if n.kept_replayed_share:
            rows.append(("kept sets replayed by the trainer", f"{n.kept_replayed_share:.0%} of the tokens; "
                         f"without it a sampler part of {_number(n.log_kept_mass_mean)}"))  # fmt: skip
    if missing:
        rows.append(("missing, not averaged in", ", ".join(f"{k} {v:,}" for k, v in missing.items())))
    _grid(console, rows, ("numbers", ""))


def _series(console: Console, verdict: Verdict) -> None:
    rows = []
    for series in verdict.series[:8]:
        quantity = series.judged()
        if quantity is None or len(series) < 2:
            continue
        at, values = series.finite(quantity)
        if not len(values):
            continue
        rows.append(
            (printable(series.label)[-40:], printable(series.names.get(quantity, quantity))[-44:], f"{len(values)}",
             _number(float(values[0])), _number(float(values.min())), _number(float(values.max())),
             _number(float(values[-1])))
        )  # fmt: skip
        del at
    if rows:
        _grid(console, rows, ("series", "metric", "steps", "first", "min", "max", "last"))


def _profile(console: Console, name: str, rows: Sequence[tuple[str, int, float, float]]) -> None:
    shown = rows if len(rows) <= _PROFILE_ROWS else rows[:_PROFILE_ROWS]
    _grid(console, [(printable(label), f"{count:,}", _number(mean), f"{signed:+.3g}") for label, count, mean, signed in
                    shown], (f"by {name}", "tokens", "mean abs(d)", "mean d"))  # fmt: skip


def _signed(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:+.2f}"


def show_comparison(console: Console, comparison: Comparison) -> None:
    """Print two runs side by side."""
    console.print()
    console.print(f"{printable(comparison.first)}  against  {printable(comparison.second)}", soft_wrap=True)
    rows = [
        (row.name, _number(row.first), _number(row.second), _number(row.ratio), _signed(row.effect))
        for row in comparison.rows
    ]
    _grid(console, rows, ("quantity", "first", "second", "ratio", "effect size"))
    for note in comparison.notes:
        console.print(f"  {printable(note)}", soft_wrap=True)


def show_metrics(console: Console) -> None:
    """Print every metric name with its definition."""
    for metric in metrics():
        frameworks = ", ".join(metric.frameworks) or "any"
        console.print(f"{metric.names[0]}  [{frameworks}]  = {metric.quantity}", soft_wrap=True)
        console.print(f"    {metric.formula}", soft_wrap=True)
        if len(metric.names) > 1:
            console.print(f"    also: {', '.join(metric.names[1:])}", soft_wrap=True)
        if metric.trap:
            console.print(f"    mind: {metric.trap}", soft_wrap=True)
        if metric.source:
            console.print(f"    source: {metric.source}", soft_wrap=True)


def show_baselines(console: Console, known: Sequence[Baseline]) -> None:
    """Print every baseline."""
    for baseline in known:
        console.print(
            f"{baseline.name}: {baseline.quantity} {baseline.low:g} to {baseline.high:g}"
            f"{' (general)' if baseline.general else ''}",
            soft_wrap=True,
        )
        console.print(f"    {printable(baseline.setup)}; source: {printable(baseline.source)}", soft_wrap=True)
