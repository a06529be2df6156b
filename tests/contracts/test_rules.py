"""Operators: yes, no and unknown, with values side by side and versions in plain order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerogap.contracts.rules import (
    OPERATORS,
    Condition,
    Verdict,
    all_of,
    any_of,
    check,
    check_all,
    check_any,
    parse_spec,
)
from zerogap.contracts.schema import read_condition
from zerogap.errors import UsageError
from zerogap.facts.fact import EachOf, Fact, Facts

YES, NO, UNKNOWN = Verdict.YES, Verdict.NO, Verdict.UNKNOWN


def _facts(**values: Any) -> Facts:
    return Facts({name.replace("__", "."): Fact(value, "test") for name, value in values.items()})


TABLE: list[tuple[list[Any], dict[str, Any], Verdict]] = [
    (["engine.tp", "is", 1], {"engine__tp": 1}, YES),
    (["engine.tp", "is", 1], {"engine__tp": 2}, NO),
    (["engine.tp", "above", 1], {"engine__tp": 2}, YES),
    (["rollout.temperature", "is", 1], {"rollout__temperature": 1.0}, YES),
    (["engine.deterministic", "is", True], {"engine__deterministic": False}, NO),
    (["gpu.engine.capability", "between", "8.0", "9.0"], {"gpu__engine__capability": "8.9"}, YES),
    (["gpu.engine.capability", "between", "8.0", "9.0"], {"gpu__engine__capability": "10.0"}, NO),
    (["gpu.engine.capability", "between", "8.0", "9.0"], {"gpu__engine__capability": "absent"}, NO),
    (["gpu.engine.capability", "at_least", "9.0"], {"gpu__engine__capability": "12.1"}, YES),
    (["gpu.engine.capability", "is", "9.0"], {"gpu__engine__capability": EachOf(("9.0", "9.0"))}, YES),
    (["gpu.engine.capability", "is", "9.0"], {"gpu__engine__capability": EachOf(("9.0", "8.9"))}, NO),
    (["software.torch", "version", ">=2.11,<3"], {"software__torch": "2.11.0+cu130"}, YES),
    (["software.torch", "version", "==2.11.0"], {"software__torch": "2.11.0+cu130"}, YES),
    (["software.torch", "version", "<3.0.0"], {"software__torch": "3.0.0b1"}, YES),
    (["software.torch", "version", ">=2.11"], {"software__torch": "2.11.0rc1"}, NO),
    (["software.torch", "version", "==2.11.*"], {"software__torch": "2.11.3"}, YES),
    (["software.torch", "version", "==2.11.*"], {"software__torch": "2.110.3"}, NO),
    (["software.torch", "version", "~=2.11.0"], {"software__torch": "2.11.9"}, YES),
    (["software.torch", "version", "~=2.11.0"], {"software__torch": "2.12.0"}, NO),
    (["software.torch", "version", ">=2"], {"software__torch": "absent"}, NO),
    (["software.torch", "version", ">=2"], {"software__torch": "branch-x"}, UNKNOWN),
    (["software.torch", "present"], {"software__torch": "absent"}, NO),
    (["software.torch", "absent"], {"software__torch": "absent"}, YES),
    (["software.libraries", "present"], {"software__libraries": ()}, NO),
    (["model.attention", "has", "mla"], {"model__attention": ("gqa", "mla")}, YES),
    (["model.attention", "has_none", "mla", "linear"], {"model__attention": ("gqa",)}, YES),
    (["model.attention", "has_any", "mla", "linear"], {"model__attention": ("linear",)}, YES),
    (["engine.kv_cache_dtype", "like", "fp8*"], {"engine__kv_cache_dtype": "FP8_e5m2"}, YES),
    (["engine.kv_cache_dtype", "not_like", "fp8*"], {"engine__kv_cache_dtype": "auto"}, YES),
    (["trainer.tp", "same_as", "engine.tp"], {"trainer__tp": 2, "engine__tp": 2}, YES),
    (["trainer.tp", "same_as", "engine.tp"], {"trainer__tp": 2}, UNKNOWN),
    (
        ["probe.perplexity", "above_times", "probe.reference_perplexity", 2.0],
        {"probe__perplexity": 20.0, "probe__reference_perplexity": 7.9},
        YES,
    ),
    (
        ["software.torch", "violates", "software.sgl_kernel_needs_torch"],
        {"software__torch": "2.12.1+cu130", "software__sgl_kernel_needs_torch": "==2.11.0"},
        YES,
    ),
    (
        ["software.torch", "violates", "software.sgl_kernel_needs_torch"],
        {"software__torch": "2.11.0", "software__sgl_kernel_needs_torch": ">=2.8,<2.12"},
        NO,
    ),
    (
        ["software.torch", "violates", "software.sgl_kernel_needs_torch"],
        {"software__torch": "2.11.0", "software__sgl_kernel_needs_torch": "any"},
        NO,
    ),
    (
        ["software.torch", "violates", "software.sgl_kernel_needs_torch"],
        {"software__torch": "2.11.0", "software__sgl_kernel_needs_torch": "whatever"},
        UNKNOWN,
    ),
]


@pytest.mark.parametrize(("row", "values", "verdict"), TABLE, ids=[f"{r[0]} {v} {a}" for r, v, a in TABLE])
def test_operators(row: list[Any], values: dict[str, Any], verdict: Verdict) -> None:
    assert check(read_condition(row, "test"), _facts(**values)).verdict is verdict


KERNELS = [
    (("sm_80",), "8.9", True, False),
    (("sm_80",), "8.0", True, True),
    (("sm_90a",), "9.0", True, True),
    (("sm_90a",), "10.0", False, False),
    (("sm_120a",), "12.1", False, False),
    (("sm_120",), "12.1", True, False),
    (("sm_121a",), "12.1", True, True),
    (("sm_100f",), "10.3", True, False),
    (("sm_103",), "10.0", False, False),
    ((), "9.0", False, False),
    (("compute_90",), "9.0", False, False),
    (("nonsense",), "9.0", False, False),
]


@pytest.mark.parametrize(("archs", "capability", "plain", "fa3"), KERNELS)
def test_which_kernels_run_where(archs: tuple[str, ...], capability: str, plain: bool, fa3: bool) -> None:
    facts = _facts(software__sgl_kernel_cubins=archs, gpu__engine__capability=capability)
    for operator, wanted in (
        ("kernel_for", plain),
        ("no_kernel_for", not plain),
        ("fa3_kernel_for", fa3),
        ("no_fa3_kernel_for", not fa3),
    ):
        condition = Condition("software.sgl_kernel_cubins", operator, "gpu.engine.capability")
        assert check(condition, facts).verdict is (YES if wanted else NO), operator


def test_ptx_runs_on_newer_devices_only_without_a_suffix() -> None:
    for archs, capability, runs in (
        (("compute_90",), "12.1", True),
        (("sm_90",), "12.1", True),
        (("compute_90a",), "12.1", False),
        (("compute_120",), "9.0", False),
    ):
        facts = _facts(software__sgl_kernel_ptx=archs, gpu__engine__capability=capability)
        condition = Condition("software.sgl_kernel_ptx", "ptx_for", "gpu.engine.capability")
        assert check(condition, facts).verdict is (YES if runs else NO)


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_operator_is_unknown_without_its_fact(operator: str) -> None:
    value = {"fact": "engine.tp", "fact-factor": "engine.tp", "pair": ("1", "2"), "list": ("1",)}.get(
        OPERATORS[operator].value, "1"
    )
    outcome = check(Condition("engine.dp", operator, value), Facts())
    assert outcome.verdict is UNKNOWN
    assert "engine.dp" in outcome.missing


_VERDICTS = st.lists(st.sampled_from(list(Verdict)), max_size=6)


@given(_VERDICTS)
def test_all_and_any_are_dual(verdicts: list[Verdict]) -> None:
    flip = {YES: NO, NO: YES, UNKNOWN: UNKNOWN}
    assert any_of(verdicts) is flip[all_of([flip[verdict] for verdict in verdicts])]
    assert (all_of(verdicts) is YES) == all(verdict is YES for verdict in verdicts), "unknown is never yes"
    assert (any_of(verdicts) is YES) == any(verdict is YES for verdict in verdicts)


def test_a_decided_answer_names_no_missing_facts() -> None:
    conditions = (Condition("engine.tp", "is", 1), Condition("engine.dp", "is", 1))
    assert check_all(conditions, _facts(engine__tp=2)).missing == ()
    assert check_all(conditions, _facts(engine__tp=1)).missing == ("engine.dp",)
    assert check_any(((conditions[0],), (conditions[1],)), _facts(engine__tp=1)).verdict is YES
    assert check_any(((conditions[0],), (conditions[1],)), _facts(engine__tp=2)).missing == ("engine.dp",)


@given(st.text(max_size=30))
def test_any_text_is_a_range_or_none(text: str) -> None:
    parse_spec(text)
    try:
        read_condition(["software.torch", "version", text], "x")
    except UsageError:
        assert parse_spec(text) is None
