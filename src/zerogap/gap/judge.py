"""The verdict on one source: is the gap zero, healthy, out of range, explained by a fault, or not to be judged."""

from __future__ import annotations

from typing import Any

from zerogap.gap.conclude import Options, Verdict, conclude, judge_range
from zerogap.gap.diagnoses.base import LEVELS, Finding, causes
from zerogap.gap.diagnoses.broken import diagnose_outliers, diagnose_values
from zerogap.gap.diagnoses.context import Context
from zerogap.gap.diagnoses.contract import contract_findings
from zerogap.gap.diagnoses.inputs import diagnose_inputs
from zerogap.gap.diagnoses.numerics import (
    diagnose_elevated,
    diagnose_numerics,
)
from zerogap.gap.diagnoses.over_steps import diagnose_series
from zerogap.gap.diagnoses.sampler import diagnose_sampler
from zerogap.gap.diagnoses.stated import diagnose_facts
from zerogap.gap.facts import Facts, is_on
from zerogap.gap.from_facts import add_stated
from zerogap.gap.numbers import Numbers
from zerogap.gap.readers import Loaded
from zerogap.gap.redact import redacted
from zerogap.gap.table import GapTable

__all__ = ["Options", "Verdict", "diagnose_table", "judge"]

CONTRACT_NOISE = 1e-3  # mean abs(d) under a contract from which causes beyond kernels are looked for


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
    judge_range(verdict, loaded, options, contract)
    conclude(verdict, contract, options)
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
