"""The verdict on one source: is the gap zero, healthy, out of range, explained by a fault, or not to be judged."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zerogap.errors import ExitCode
from zerogap.gap.baselines import Baseline, outside, pick
from zerogap.gap.diagnoses.base import LEVELS, Finding, causes
from zerogap.gap.diagnoses.broken import diagnose_outliers, diagnose_values
from zerogap.gap.diagnoses.context import Context
from zerogap.gap.diagnoses.contract import contract_findings
from zerogap.gap.diagnoses.inputs import diagnose_inputs
from zerogap.gap.diagnoses.numerics import (
    ELEVATED,
    diagnose_elevated,
    diagnose_numerics,
)
from zerogap.gap.diagnoses.over_steps import diagnose_series
from zerogap.gap.diagnoses.sampler import diagnose_sampler
from zerogap.gap.diagnoses.stated import diagnose_facts
from zerogap.gap.facts import Facts, is_on
from zerogap.gap.from_facts import add_stated
from zerogap.gap.numbers import Numbers, Profile
from zerogap.gap.readers import Loaded
from zerogap.gap.redact import redacted
from zerogap.gap.series import Series
from zerogap.gap.table import GapTable

OUTSIDE_SHARE = 0.1  # of the steps may lie outside a range by a little
CONTRACT_NOISE = 1e-3  # mean abs(d) under a contract from which causes beyond kernels are looked for
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


_GENERAL = frozenset({"inputs-differ/some-sequences", "inputs-differ/context", "inputs-differ/positions",
                      "sampler/temperature", "sampler/penalties"})  # fmt: skip
_BY_VALUE = frozenset({"numerics/bf16-logits", "numerics/trainer-not-batch-invariant"})


def diagnose_table(table: GapTable, facts: Facts, *, contract: bool, floor: float | None) -> list[Finding]:
    """Return every diagnosis of a table of tokens."""
    c = Context(table, facts, contract, floor)
    found = diagnose_values(c)
    if not len(c.rows):
        return found
    if contract:
        found += contract_findings(c)
        if float(c.size.mean()) < CONTRACT_NOISE:
            return found
    by_column = diagnose_numerics(c)
    specific = [*diagnose_sampler(c), *diagnose_inputs(c), *diagnose_outliers(c)]
    if any(f.level == "fault" and f.name not in _BY_VALUE for f in by_column):
        # A column says which tokens disagree; what the same tokens look like without it is no second cause.
        specific = [f for f in specific if f.name not in _GENERAL]
    specific += by_column
    explained = contract or any(f.level in ("fault", "warn") for f in specific)
    return [*found, *specific, *diagnose_elevated(c, explained)]


def judge(loaded: Loaded, options: Options) -> Verdict:
    """Return the verdict on a loaded source."""
    facts = Facts()
    facts.update({k: v for k, v in loaded.facts.items() if not k.startswith("config.")})
    for stated_facts in (loaded.stated, options.facts):
        if stated_facts is not None:
            facts.absorb(stated_facts)
    stated = options.contract or facts.first("contract")
    contract = (is_on(stated) if stated is not None else False) or is_on(facts.first("true_on_policy"))
    if not loaded.series and not loaded.has_tokens and loaded.table is None:
        add_stated(loaded, facts)
    verdict = Verdict(
        loaded.label, loaded.kind, series=loaded.series, notes=list(loaded.notes), facts=dict(facts.values)
    )
    found: list[Finding] = []
    if loaded.table is not None:
        found += diagnose_table(loaded.table, facts, contract=contract, floor=options.floor)
    if loaded.has_tokens:
        verdict.numbers = loaded.accumulator.numbers()
        verdict.profiles = loaded.accumulator.profiles()
        found += _bits(verdict.numbers, contract)
    for series in loaded.series:
        found += diagnose_series(series, facts, contract=contract)
    found += _contradicted(loaded)
    found += diagnose_facts(facts)
    found += [_from_hit(hit) for hit in _distinct(loaded.hits)]
    lacking = _lacking(loaded)
    if lacking:
        verdict.notes.append(lacking)
    verdict.findings = _ranked(found)
    if options.only:
        verdict.findings = [f for f in verdict.findings if options.only in (f.name, f.group, f.code)]
    _range(verdict, loaded, options, contract)
    _conclude(verdict, contract, options)
    if lacking and verdict.status == "unknown":
        verdict.summary = lacking
    return verdict


def _lacking(loaded: Loaded) -> str:
    """Say which side's log-probs are missing from a table."""
    if loaded.table is None or loaded.table.has("logprob_engine", "logprob_trainer") or loaded.kind == "notes":
        return ""
    there, missing = ("engine", "trainer") if loaded.table.has("logprob_engine") else ("trainer", "engine")
    return (
        f"only the {there}'s log-probs are in it; name the {missing}'s column with --map logprob_{missing}=NAME, "
        f"or give "
        "a source with both"
    )


def _bits(numbers: Numbers, contract: bool) -> list[Finding]:
    if not numbers.compared or numbers.different:
        return []
    text = f"all {numbers.compared:,} compared tokens are bit-equal"
    if contract:
        return [Finding("zero/bit-equal", 1.0, text, {"tokens": numbers.compared})]
    return [
        Finding("metric-broken/compares-itself", 0.5, f"{text} and no contract was named", {"tokens": numbers.compared})
    ]


def _contradicted(loaded: Loaded) -> list[Finding]:
    """The logged average and the tokens of the same steps say different things."""
    if not loaded.contradictions:
        return []
    step, logged, tokens = loaded.contradictions[0]
    return [
        Finding(
            "metric-broken/contradicts-tokens",
            0.95,
            f"at {len(loaded.contradictions)} steps, first at step {step}: logged {logged:.4g}, tokens {tokens:.4g}",
            {"steps": [s for s, _, _ in loaded.contradictions[:50]]},
            tuple(f"step {s}: logged {a:.4g}, tokens {b:.4g}" for s, a, b in loaded.contradictions[:4]),
        )
    ]


def _distinct(hits: list[Any]) -> list[Any]:
    seen: dict[str, Any] = {}
    for hit in hits:
        seen.setdefault(hit.finding, hit)
    return list(seen.values())


def _from_hit(hit: Any) -> Finding:
    groups = ", ".join(g for g in hit.groups if g)
    cause = causes()[hit.finding]
    observed = f"line {hit.line_number} of the log: {cause.code}" + (f" ({groups})" if groups else "")
    return Finding(hit.finding, 0.9, observed, {}, (redacted(hit.line.strip())[:200],))


def _ranked(found: list[Finding]) -> list[Finding]:
    """One finding for each name, the surest; faults first. A specific cause silences the general ones."""
    best: dict[str, Finding] = {}
    for finding in found:
        held = best.get(finding.name)
        if held is None or finding.confidence > held.confidence:
            best[finding.name] = finding
    if "metric-broken/compares-itself" in best and "metric-broken/exact-zero" in best:
        del best["metric-broken/exact-zero"]  # the tokens are there: they say the same more exactly
    if "weights-differ/sync-not-applied" in best:
        for general in ("numerics/contract-broken", "numerics/dtype-or-kernel", "metric-broken/exact-zero"):
            best.pop(general, None)
        if "stale-state/prefix-cache" in best:  # some sequences are bit-equal: the weights did arrive
            del best["weights-differ/sync-not-applied"]
    return sorted(best.values(), key=lambda f: (LEVELS.index(f.level), -f.confidence, f.name))


def _range(verdict: Verdict, loaded: Loaded, options: Options, contract: bool) -> None:
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


def _conclude(verdict: Verdict, contract: bool, options: Options) -> None:
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
