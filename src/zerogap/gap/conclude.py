"""From findings and a range to one status and one line: the end of every judgement."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zerogap.errors import ExitCode
from zerogap.gap.baselines import Baseline, outside, pick
from zerogap.gap.diagnoses.base import Finding
from zerogap.gap.diagnoses.numerics import ELEVATED
from zerogap.gap.facts import Facts
from zerogap.gap.numbers import Numbers, Profile
from zerogap.gap.readers import Loaded
from zerogap.gap.series import Series

OUTSIDE_SHARE = 0.1  # of the steps may lie outside a range by a little
OUTSIDE_FAR = 1.5  # times the upper end: one such step is enough


@dataclass(frozen=True)
class Options:
    """What the person said about the source."""

    gpu: str | None = None
    model: str | None = None
    baseline: str | None = None
    contract: str | None = None
    first_step: bool = False
    floor: float | None = None
    facts: Facts = field(default_factory=Facts)
    only: str | None = None


@dataclass
class Verdict:
    """What is said about one source.

    Attributes:
        status: zero, healthy, out-of-range, fault or unknown.
        summary: one line.
        quantity, value: what was judged and its median over steps.
        baseline: the range it was judged by.
        outside_steps: steps outside that range.
    """

    label: str
    kind: str
    status: str = "unknown"
    summary: str = ""
    quantity: str | None = None
    value: float | None = None
    baseline: Baseline | None = None
    outside_steps: list[int] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    numbers: Numbers | None = None
    profiles: dict[str, Profile] = field(default_factory=dict)
    series: list[Series] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> ExitCode:
        """0 zero or healthy, 1 out of range or a fault, 3 cannot say."""
        if self.status in ("zero", "healthy"):
            return ExitCode.HOLDS
        return ExitCode.DOES_NOT_HOLD if self.status in ("fault", "out-of-range") else ExitCode.UNKNOWN

    @property
    def groups(self) -> list[str]:
        """The classes that hold, most serious first."""
        made = [f.group for f in self.findings if f.level in ("fault", "warn", "unknown")]
        return list(dict.fromkeys(made)) or [self.status]


def judge_range(verdict: Verdict, loaded: Loaded, options: Options, contract: bool) -> None:
    """Judge the steps by the baseline."""
    series = next((s for s in loaded.series if s.judged()), None)
    if series is None:
        return
    quantity = series.judged()
    assert quantity is not None
    rows, values = series.finite(quantity)
    if not len(values):
        return
    if options.first_step:
        rows, values = rows[:1], values[:1]
    verdict.quantity, verdict.value = quantity, float(np.median(values))
    if contract:
        return
    verdict.baseline = pick(quantity, name=options.baseline, gpu=options.gpu, model=options.model)
    if verdict.baseline is None:
        wanted = " and ".join(f"{k} {v}" for k, v in (("GPU", options.gpu), ("model", options.model)) if v)
        verdict.notes.append(
            f"no baseline of {quantity} for {wanted or 'this quantity'}; `zerogap gap save-baseline RUN NAME` makes one"
        )
        return
    out = outside(values, verdict.baseline)
    verdict.outside_steps = [int(series.steps[rows[i]]) for i in np.flatnonzero(out)]


def _out_of_range(verdict: Verdict, loaded_series: Series, options: Options) -> bool:
    baseline = verdict.baseline
    assert baseline is not None
    assert verdict.quantity is not None
    _, values = loaded_series.finite(verdict.quantity)
    if options.first_step:
        values = values[:1]
    if not verdict.outside_steps:
        return False
    far = bool((values > OUTSIDE_FAR * baseline.high).any()) if baseline.high > 0 else True
    share = len(verdict.outside_steps) / len(values)
    median = bool(outside(np.array([np.median(values)]), baseline)[0])
    return median or far or share > OUTSIDE_SHARE


def conclude(verdict: Verdict, contract: bool, options: Options) -> None:
    """Set the status and the summary by what was found, a contract or a range."""
    faults = [f for f in verdict.findings if f.level == "fault"]
    unknown = [f for f in verdict.findings if f.level == "unknown"]
    untested = [f for f in verdict.findings if f.name == "weights-differ/sync-untested"]
    series = next((s for s in verdict.series if s.judged()), None)
    if options.first_step:
        faults = [f for f in faults if not f.name.startswith(("weights-differ/", "stale-state/")) or f.numbers.get(
            "first_bad") is None]  # fmt: skip
    if faults:
        verdict.status = "fault"
        verdict.summary = f"{faults[0].code}: {faults[0].cause.title}"
        return
    if series is None and verdict.numbers is None:
        names = {f.name for f in verdict.findings}
        if names & {"weights-differ/sync-ok", "weights-differ/tied-head-benign"} and not unknown:
            verdict.status = "healthy"
        elif "zero/bit-equal" in names and not unknown:
            verdict.status = "zero"
        first = verdict.findings[0] if verdict.findings else None
        verdict.summary = (
            f"{first.code}: {first.cause.title}" if first else "what is stated holds no known fault and no gap to judge"
        )
        return
    if verdict.value is None:
        verdict.summary = unknown[0].cause.title if unknown else "no finite value of the gap"
        return
    where = f"{verdict.quantity} {verdict.value:.4g}" + (" at the first step" if options.first_step else "")
    if contract:
        if verdict.value == 0 and not unknown and _all_zero(verdict, options):
            verdict.status, verdict.summary = "zero", "the gap is exactly 0 at every compared token or step"
            if verdict.numbers is None:
                verdict.notes.append("only averages were logged: tokens with opposite signs or NaN turned to 0 cannot "
                                     "be seen in them")  # fmt: skip
        else:
            verdict.status = "fault" if not _all_zero(verdict, options) else "unknown"
            verdict.summary = f"{where}: a contract promises exactly 0"
        return
    if unknown:
        verdict.summary = f"{unknown[0].code}: {unknown[0].cause.title}"
        return
    _conclude_range(verdict, series, where, untested, options)


def _all_zero(verdict: Verdict, options: Options) -> bool:
    for series in verdict.series:
        quantity = series.judged()
        if quantity is None:
            continue
        _, values = series.finite(quantity)
        if options.first_step:
            values = values[:1]
        base = 1.0 if quantity == "mult_prob_error" else 0.0
        if (values != base).any():
            return False
        if "different" in series.values and np.nan_to_num(series.values["different"]).any() and not options.first_step:
            return False
    return True


def _conclude_range(
    verdict: Verdict, series: Series | None, where: str, untested: list[Finding], options: Options
) -> None:
    baseline = verdict.baseline
    if baseline is None or series is None:
        verdict.summary = f"{where}: no range to judge it by"
        return
    if _out_of_range(verdict, series, options):
        below = verdict.value is not None and verdict.value < baseline.low
        if (
            baseline.general
            and baseline.quantity == "abs_mean"
            and verdict.value is not None
            and (verdict.value <= ELEVATED)
        ):
            verdict.summary = (
                f"{where}: above the general range {baseline.text()} and below what needs a fault; name the setup with "
                "--gpu/--model or save a baseline"
            )
            return
        verdict.status = "out-of-range"
        side = "below" if below else "outside"
        steps = verdict.outside_steps
        verdict.summary = f"{where}: {side} {baseline.text()} at {len(steps)} steps (first: step {steps[0]})"
        return
    if untested and not options.first_step and series.source and verdict.numbers is None:
        verdict.summary = (
            f"{where}: in the range {baseline.text()}, but {untested[0].cause.title} ({untested[0].observed})"
        )
        return
    verdict.status = "healthy"
    verdict.summary = f"{where}: in the range {baseline.text()}"
    if verdict.outside_steps:
        verdict.notes.append(f"{len(verdict.outside_steps)} steps lie a little outside the range")
