"""Verdicts: a contract against facts. Yes only if every requirement is yes; what is unknown is named."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from zerogap.contracts import rules
from zerogap.contracts.contract import Alternative, Contract, Fault, Fix, Requirement, VersionRange
from zerogap.contracts.rules import Condition, Verdict
from zerogap.contracts.schema import derived
from zerogap.facts.fact import ABSENT, Fact, Facts, show

# How each kind of fact is learned, for the hint beside a missing one.
_LEARN = {
    "gpu": "run on the machine itself, or plan one: --gpu H200",
    "host": "run on the machine itself, or give --facts FILE",
    "software": "give --python VENV/bin/python, --facts FILE, --stack NAME (a known set), or --assume {name}=VALUE",
    "model": "give --model FOLDER_OR_NAME, or --assume {name}=VALUE",
    "env": "set it in the launch (--launch FILE), or --assume {name}=VALUE",
    "certificate": "measure it there: zerogap certify --model {model}; for a GPU with --device cuda:0",
    "zerogap": "give --python VENV/bin/python, or --assume {name}=VALUE",
    "probe": "measure it: zerogap probe URL",
    "log": "give --against LOG",
}
_LAUNCH = "give --launch FILE, or --assume {name}=VALUE"
_STATE = "state it in the launch, or --assume {name}=VALUE"


@dataclass(frozen=True)
class Finding:
    """The answer to one requirement.

    Attributes:
        level: "require" or "warn"; a warning changes no verdict.
        missing: facts that are unknown, each with why or how to learn it.
        evidence: facts that the answer stands on, by name.
        hint: what to do; never something that the same checker refuses.
        recheck: the command that checks just this again.
    """

    id: str
    what: str
    verdict: Verdict
    level: str
    expected: str
    observed: str
    says: str
    hint: str
    prints: str
    source: str
    evidence: Mapping[str, Fact] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    recheck: str = ""

    @property
    def assumed(self) -> tuple[str, ...]:
        """Names of the facts under this answer that a person stated."""
        return tuple(name for name, fact in self.evidence.items() if fact.assumed)

    def to_json(self) -> dict[str, Any]:
        """Return the finding as JSON types."""
        return {
            "name": self.id,
            "what": self.what,
            "status": "warn" if self.level == "warn" and self.verdict is Verdict.NO else str(self.verdict),
            "level": self.level,
            "expected": self.expected,
            "observed": self.observed,
            "says": self.says,
            "hint": self.hint,
            "prints": self.prints,
            "source": self.source,
            "evidence": {name: fact.to_json() for name, fact in self.evidence.items()},
            "missing": dict(self.missing),
            "assumed": list(self.assumed),
            "recheck": self.recheck,
        }


@dataclass(frozen=True)
class Offer:
    """An alternative with what the same code says of it."""

    contract: str
    promise: str
    says: str
    verdict: Verdict
    missing: tuple[str, ...]
    because: str

    def to_json(self) -> dict[str, Any]:
        """Return the alternative as JSON types."""
        return {
            "contract": self.contract,
            "promise": self.promise,
            "says": self.says,
            "verdict": str(self.verdict),
            "missing": list(self.missing),
            "because": self.because,
        }


@dataclass(frozen=True)
class Judgement:
    """A contract's verdict with its findings and what to use instead."""

    contract: Contract
    verdict: Verdict
    findings: tuple[Finding, ...]
    offers: tuple[Offer, ...] = ()

    @property
    def missing(self) -> tuple[str, ...]:
        """Facts that are unknown and needed."""
        return tuple(
            dict.fromkeys(name for finding in self.findings if finding.level == "require" for name in finding.missing)
        )

    def to_json(self) -> dict[str, Any]:
        """Return the judgement as JSON types."""
        return {
            "name": self.contract.name,
            "title": self.contract.title,
            "promise": self.contract.promise,
            "as_of": self.contract.as_of,
            "verdict": str(self.verdict),
            "missing": list(self.missing),
            "requirements": [finding.to_json() for finding in self.findings],
            "instead": self.contract.instead if self.verdict is Verdict.NO else "",
            "alternatives": [offer.to_json() for offer in self.offers],
        }


def resolve(facts: Facts) -> Facts:
    """Return the facts with those that follow from them, such as the backend an engine picks when none is set."""
    for rule in derived():
        now = facts.get(rule.fact)
        if now is not None and now.value != "unset":
            continue
        outcome = rules.check_all(rule.when, facts)
        if outcome.verdict is Verdict.YES:
            used = (facts[name] for condition in rule.when for name in condition.names)
            known = {rule.fact: Fact(rule.value, rule.source, any(fact.assumed for fact in used))}
            facts = Facts(known).over(facts)
        elif outcome.verdict is Verdict.UNKNOWN and now is not None:
            why = f"{now.source}, and what follows needs {', '.join(outcome.missing) or rule.source}"
            facts = Facts({}, {rule.fact: why}).over(facts)
    return facts


def how_to_learn(name: str, facts: Facts) -> str:
    """Return why a fact is unknown, or how to establish it."""
    launched = "launch.given" in facts and facts["launch.given"].value is True
    text = _LEARN.get(name.partition(".")[0], _STATE if launched else _LAUNCH)
    model = shlex.quote(show(facts["model.path"].value)) if "model.path" in facts else "FOLDER_OR_NAME"
    text = text.format(name=name, model=model)
    why = facts.unknown.get(name)
    return f"{why}; {text}" if why else text


def judge(contract: Contract, facts: Facts, known_faults: Sequence[Fault] = (), *, fixes: bool = True) -> Judgement:
    """Judge a contract.

    Args:
        contract: the contract.
        facts: the facts, resolved.
        known_faults: faults; one that is there and breaks this contract is one more requirement that is not met.
        fixes: whether to look for changes that would meet what is not met.
    """
    findings = [finding for item in contract.requirements if (finding := _requirement(item, facts))]
    findings += [_version(version, facts) for version in contract.versions]
    findings += [
        finding
        for fault in known_faults
        if contract.name in fault.breaks and (finding := _fault(fault, facts)) and finding.verdict is not Verdict.YES
    ]
    verdict = rules.all_of([finding.verdict for finding in findings if finding.level == "require"])
    judgement = Judgement(contract, verdict, tuple(findings))
    if fixes and verdict is not Verdict.YES:
        offered = {item.id: item.fixes for item in contract.requirements} | {f.code: f.fixes for f in known_faults}
        findings = [
            replace(
                finding,
                hint=_join(finding.hint, _fix(finding, offered.get(finding.id, ()), judgement, facts, known_faults)),
            )
            for finding in findings
        ]
        judgement = replace(judgement, findings=tuple(findings))
    return judgement


def offers(
    contract: Contract, every: Iterable[Contract], facts: Facts, known_faults: Sequence[Fault]
) -> tuple[Offer, ...]:
    """Return a contract's alternatives in order, each judged by the same code."""
    by_name = {item.name: item for item in every}
    return tuple(
        _offer(alternative, by_name[alternative.contract], facts, known_faults) for alternative in contract.alternatives
    )


def _offer(alternative: Alternative, contract: Contract, facts: Facts, known_faults: Sequence[Fault]) -> Offer:
    there = resolve(facts.assuming(alternative.set, "as this alternative would set it")) if alternative.set else facts
    judgement = judge(contract, there, known_faults, fixes=False)
    refused = [
        finding for finding in judgement.findings if finding.verdict is Verdict.NO and finding.level == "require"
    ]
    because = f"{refused[0].what}: {refused[0].says or refused[0].observed}" if refused else ""
    return Offer(contract.name, contract.promise, alternative.says, judgement.verdict, judgement.missing, because)


# -- single findings


def _requirement(item: Requirement, facts: Facts) -> Finding | None:
    applies = rules.check_all(item.when, facts)
    if applies.verdict is Verdict.NO:
        return None
    outcomes = [rules.check_all(item.needs, facts)] if item.needs else []
    outcomes += [rules.check_any(item.any_of, facts)] if item.any_of else []
    outcomes += [applies] if applies.verdict is Verdict.UNKNOWN else []
    verdict = rules.all_of([outcome.verdict for outcome in outcomes])
    if applies.verdict is Verdict.UNKNOWN and verdict is Verdict.NO:
        verdict = Verdict.UNKNOWN  # it may not apply at all
    missing = {name: how_to_learn(name, facts) for outcome in outcomes for name in outcome.missing}
    reasons = [reason for outcome in outcomes for reason in outcome.reasons]
    unproven = False
    if verdict is Verdict.YES and item.unproven:
        doubt = rules.check_all(item.unproven, facts)
        if doubt.verdict is not Verdict.NO:
            verdict, unproven = Verdict.UNKNOWN, doubt.verdict is Verdict.YES
            missing |= {name: how_to_learn(name, facts) for name in doubt.missing}
    if item.level == "warn" and verdict is not Verdict.NO:
        return None
    judged = [condition for group in (item.needs, *item.any_of) for condition in group]
    told = verdict is Verdict.NO or unproven
    return Finding(
        item.id,
        item.what,
        verdict,
        item.level,
        item.expected or _expected(item),
        _observed(judged, facts),
        fill(item.says, facts) if told else "; ".join(reasons),
        fill(item.hint, facts) if told else "",
        fill(item.prints, facts) if verdict is Verdict.NO else "",
        item.source,
        {name: facts[name] for name in item.facts if name in facts},
        missing if verdict is Verdict.UNKNOWN else {},
    )


def _expected(item: Requirement) -> str:
    groups = [" and ".join(str(condition) for condition in group) for group in item.any_of]
    return "; ".join([*(str(condition) for condition in item.needs), *([" or ".join(groups)] if groups else [])])


def _observed(conditions: Iterable[Condition], facts: Facts) -> str:
    names = dict.fromkeys(name for condition in conditions for name in condition.names)
    return ", ".join(f"{name} = {_shown(name, facts[name]) if name in facts else 'unknown'}" for name in names)


def _version(wanted: VersionRange, facts: Facts) -> Finding:
    name, package = wanted.fact, wanted.fact.partition(".")[2]
    expected = f"{wanted.first} or newer, read up to {wanted.tested_to}"
    low = rules.check(Condition(name, "at_least", wanted.first), facts)
    high = rules.check(Condition(name, "at_most", wanted.tested_to), facts)
    verdict, says, hint = low.verdict, "", ""
    if low.verdict is Verdict.NO:
        absent = facts[name].value == ABSENT
        says = (
            f"{package} is not installed"
            if absent
            else f"{package} {show(facts[name].value)} is older than {wanted.first}"
        )
        hint = f"install {package} {wanted.first} or newer"
    elif low.verdict is Verdict.YES and high.verdict is not Verdict.YES:
        verdict = Verdict.UNKNOWN
        says = f"{package} {show(facts[name].value)} is newer than what this contract was read at, and may differ"
        hint = f"use {package} {wanted.tested_to}, or read the newer source and add a contract for it (--contracts DIR)"
    return Finding(
        f"version-{package.replace('_', '-')}",
        f"the version of {package} is one that this contract covers",
        verdict,
        "require",
        expected,
        _observed([Condition(name, "present")], facts),
        says or "; ".join(low.reasons),
        hint,
        "",
        "the contract's version range",
        {name: facts[name]} if name in facts else {},
        {missing: how_to_learn(missing, facts) for missing in low.missing},
    )


def _fault(fault: Fault, facts: Facts) -> Finding:
    """Judge a fault: no when it is there, unknown when its first sign is there and the rest is not known, else yes."""
    outcome = rules.check_all(fault.when, facts)
    verdict = Verdict.NO if outcome.verdict is Verdict.YES else Verdict.YES
    if outcome.verdict is Verdict.UNKNOWN and fault.doubt and rules.check(fault.when[0], facts).verdict is Verdict.YES:
        verdict = Verdict.UNKNOWN
    names = dict.fromkeys(name for condition in fault.when for name in condition.names)
    return Finding(
        fault.code,
        fault.title,
        verdict,
        "require" if fault.status == "fail" else "warn",
        "none of: " + "; ".join(str(condition) for condition in fault.when),
        _observed(fault.when, facts),
        fill(fault.says, facts) if verdict is Verdict.NO else "",
        fill(fault.hint, facts) if verdict is Verdict.NO else "",
        "",
        fault.source,
        {name: facts[name] for name in names if name in facts},
        {name: how_to_learn(name, facts) for name in outcome.missing} if verdict is Verdict.UNKNOWN else {},
    )


def fault_findings(known_faults: Iterable[Fault], facts: Facts) -> tuple[Finding, ...]:
    """Return the known faults that are there."""
    return tuple(finding for fault in known_faults if (finding := _fault(fault, facts)).verdict is Verdict.NO)


def _shown(name: str, fact: Fact) -> str:
    if fact.value == ABSENT:
        return "not installed" if name.startswith("software.") else "none"
    return show(fact.value)


_FIELD = re.compile(r"\{([a-z_]+\.[\w.]+)(:source)?\}")


def fill(text: str, facts: Facts) -> str:
    """Fill ``{fact}`` and ``{fact:source}`` into a text of a contract."""

    def value(found: re.Match[str]) -> str:
        if found[1] not in facts:
            return "unknown"
        fact = facts[found[1]]
        return fact.source if found[2] else _shown(found[1], fact)

    return _FIELD.sub(value, text)


def _join(first: str, second: str) -> str:
    return "; ".join(part for part in (first, second) if part)


def _fix(
    finding: Finding, candidates: Sequence[Fix], before: Judgement, facts: Facts, known_faults: Sequence[Fault]
) -> str:
    """Return the first change that the checker itself accepts: it meets this finding and breaks nothing else."""
    if finding.verdict is not Verdict.NO:
        return ""
    broken = {item.id for item in before.findings if item.verdict is Verdict.NO and item.level == "require"}
    for candidate in candidates:
        changed = resolve(facts.assuming(candidate.set, "proposed"))
        after = judge(before.contract, changed, known_faults, fixes=False)
        still = {item.id for item in after.findings if item.verdict is Verdict.NO and item.level == "require"}
        if finding.id not in still and still <= broken:
            return fill(candidate.says, facts)
    return ""
