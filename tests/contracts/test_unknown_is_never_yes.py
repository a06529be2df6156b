"""Every requirement of every contract, with a fact taken away: the answer is unknown and the fact is named."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contracts.whole import ALONE, WHOLE, facts_of
from zerogap.contracts import verdict
from zerogap.contracts.check import report
from zerogap.contracts.contract import Contract, Requirement
from zerogap.contracts.rules import Verdict, check_all
from zerogap.contracts.schema import all_contracts, faults
from zerogap.errors import ExitCode

CONTRACTS = {contract.name: contract for contract in all_contracts()}
SETS = [(name, index) for name, sets in WHOLE.items() for index in range(len(sets))]


def _judge(contract: Contract, values: dict[str, Any], *without: str) -> verdict.Judgement:
    return verdict.judge(contract, facts_of(values).without(*without), faults(), fixes=False)


def test_there_is_a_whole_set_for_every_contract() -> None:
    assert set(WHOLE) == set(CONTRACTS)


@pytest.mark.parametrize(("name", "index"), SETS)
def test_a_whole_set_holds(name: str, index: int) -> None:
    judgement = _judge(CONTRACTS[name], WHOLE[name][index])
    assert [f.id for f in judgement.findings if f.verdict is not Verdict.YES and f.level == "require"] == []
    assert judgement.verdict is Verdict.YES
    assert report(facts_of(WHOLE[name][index]), all_contracts(), [name]).exit_code == ExitCode.HOLDS


@pytest.mark.parametrize(("name", "index"), SETS)
def test_without_any_one_fact_the_contract_is_unknown_and_names_it(name: str, index: int) -> None:
    values = WHOLE[name][index]
    contract = CONTRACTS[name]
    used = {fact for finding in _judge(contract, values).findings for fact in finding.evidence}
    assert used
    for fact in sorted(used):
        judgement = _judge(contract, values, fact)
        if judgement.verdict is Verdict.YES:
            # Only where another group of an any_of holds by itself may a fact be missed.
            assert _another_group_holds(contract, values, fact), f"{name} is yes without {fact}"
            continue
        assert judgement.verdict is Verdict.UNKNOWN, f"{name} without {fact}"
        assert fact in judgement.missing
        found = report(facts_of(values).without(fact), all_contracts(), [name])
        assert found.exit_code == ExitCode.UNKNOWN
        assert fact in found.missing


def _another_group_holds(contract: Contract, values: dict[str, Any], fact: str) -> bool:
    facts = facts_of(values).without(fact)
    asking = [item for item in contract.requirements if fact in item.facts]
    for item in asking:
        if any(fact in condition.names for condition in (*item.when, *item.needs)):
            applies = check_all(tuple(c for c in item.when if fact not in c.names), facts)
            if applies.verdict is not Verdict.NO and item.level == "require":
                return False
        elif item.any_of and not any(check_all(group, facts).verdict is Verdict.YES for group in item.any_of):
            return False
    return True


REQUIREMENTS = [(contract, item) for contract in CONTRACTS.values() for item in contract.requirements]


@pytest.mark.parametrize(("contract", "item"), REQUIREMENTS, ids=[f"{c.name}-{r.id}" for c, r in REQUIREMENTS])
def test_every_requirement_can_be_met_and_is_unknown_without_its_facts(contract: Contract, item: Requirement) -> None:
    sets = [*WHOLE[contract.name], *([ALONE[item.id]] if item.id in ALONE else [])]
    if item.level == "warn":
        assert any(check_all(item.when, facts_of(values)).verdict is Verdict.YES for values in _all_sets()), (
            "never applies"
        )
        return
    met = [values for values in sets if _status(contract, item, values) is Verdict.YES]
    if not met:  # a shared requirement that another contract meets
        met = [values for values in [*_all_sets(), *ALONE.values()] if _status(contract, item, values) is Verdict.YES]
    assert met, f"no set meets {item.id}"
    values = met[0]
    for fact in item.facts:
        if fact not in values:
            continue  # in a group of any_of that was not needed
        status = _status(contract, item, values, fact)
        if status is Verdict.YES:
            assert any(fact in c.names for group in item.any_of for c in group) or _only_unproven(item, fact)
        else:
            assert status is Verdict.UNKNOWN, fact
            assert fact in _missing(contract, item, values, fact)
    everything = [fact for fact in item.facts if fact in values]
    assert _status(contract, item, values, *everything) is not Verdict.YES


def _all_sets() -> list[dict[str, Any]]:
    return [values for sets in WHOLE.values() for values in sets]


def _only_unproven(item: Requirement, fact: str) -> bool:
    return not any(fact in c.names for c in (*item.when, *item.needs))


def _find(contract: Contract, item: Requirement, values: dict[str, Any], *without: str) -> verdict.Finding | None:
    return next((f for f in _judge(contract, values, *without).findings if f.id == item.id), None)


def _status(contract: Contract, item: Requirement, values: dict[str, Any], *without: str) -> Verdict | None:
    finding = _find(contract, item, values, *without)
    return finding.verdict if finding else None


def _missing(contract: Contract, item: Requirement, values: dict[str, Any], *without: str) -> tuple[str, ...]:
    finding = _find(contract, item, values, *without)
    return tuple(finding.missing) if finding else ()


def test_an_assumed_fact_is_marked_wherever_it_is_used() -> None:
    for name, sets in WHOLE.items():
        for values in sets:
            facts = facts_of(values)
            stated = facts.assuming({fact: facts[fact].value for fact in values}, "--assume")  # type: ignore[misc]
            found = report(stated, all_contracts(), [name])
            for judgement in found.judgements:
                for finding in judgement.findings:
                    assert set(finding.evidence) == set(finding.assumed)
                    body = finding.to_json()
                    assert all(row["assumed"] for row in body["evidence"].values())
            assert found.assumed


def test_no_faults_are_there_in_the_whole_sets() -> None:
    for name, sets in WHOLE.items():
        for values in sets:
            there = {finding.id for finding in verdict.fault_findings(faults(), facts_of(values))}
            assert [fault.code for fault in faults() if fault.code in there and name in fault.breaks] == []
