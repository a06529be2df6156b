"""Facts: names, types, assumptions, layers, and the facts file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerogap.errors import UsageError
from zerogap.facts import collect
from zerogap.facts.fact import EachOf, Fact, Facts, convert, describe, names, parse_assumptions


def test_names_have_types_and_a_description() -> None:
    for name in names().values():
        assert name.type in ("version", "text", "integer", "number", "flag", "list")
        assert name.what[0].isupper() or name.what[0].islower()
        assert "<role>" not in name.what


def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"did you mean 'software\.flash_attn_3'"):
        describe("software.flash_atn_3")
    assert describe("env.NCCL_ALGO").type == "text"
    for wrong in ("env.", "env.a b", "nothing", ""):
        with pytest.raises(UsageError):
            describe(wrong)


CONVERSIONS = [
    ("gpu.engine.capability", "sm_121a", "12.1"),
    ("gpu.engine.capability", "90", "9.0"),
    ("gpu.engine.capability", 8.9, "8.9"),
    ("engine.tp", "2", 2),
    ("engine.deterministic", "1", True),
    ("engine.deterministic", "off", False),
    ("rollout.temperature", "0.95", 0.95),
    ("software.sgl_kernel_cubins", "sm_80, sm_90a", ("sm_80", "sm_90a")),
    ("software.sgl_kernel_cubins", "[]", ()),
    ("software.torch", "absent", "absent"),
    ("software.torch", "2.11.0+cu130", "2.11.0+cu130"),
]


@pytest.mark.parametrize(("name", "raw", "value"), CONVERSIONS)
def test_conversions(name: str, raw: object, value: object) -> None:
    assert convert(name, raw, "x") == value


WRONG = [
    ("gpu.engine.capability", "hopper"),
    ("engine.tp", "two"),
    ("engine.tp", "1.5"),
    ("engine.tp", "inf"),
    ("engine.tp", True),
    ("engine.deterministic", "perhaps"),
    ("rollout.temperature", "nan"),
    ("rollout.temperature", "warm"),
    ("software.torch", "newest"),
    ("model.kind", "sparse"),
    ("software.libraries", [1]),
    ("engine.attention_backend", ""),
    ("engine.tp", None),
    ("engine.tp", "9" * 400),
    ("model.name", "x" * 5000),
]


@pytest.mark.parametrize(("name", "raw"), WRONG)
def test_wrong_values(name: str, raw: object) -> None:
    with pytest.raises(UsageError, match=name):
        convert(name, raw, "x")


def test_assumptions() -> None:
    facts = parse_assumptions(["software.flash_attn_3=3.0.0", "gpu.capability=9.0", "engine.tp=1", "engine.tp=2"])
    assert facts["gpu.engine.capability"].value == facts["gpu.trainer.capability"].value == "9.0"
    assert facts["engine.tp"].value == 2
    assert all(fact.assumed and fact.source == "--assume" for fact in facts.values())
    for wrong in ("", "=", "engine.tp", "engine.tp=", "=2", "engine.tpp=2"):
        with pytest.raises(UsageError):
            parse_assumptions([wrong])


@given(st.text(max_size=60))
def test_any_assumption_is_a_fact_or_an_error(text: str) -> None:
    for whole in (text, f"engine.tp={text}", f"gpu.engine.capability={text}", f"software.libraries={text}"):
        try:
            facts = parse_assumptions([whole])
        except UsageError:
            continue
        assert all(fact.assumed for fact in facts.values())


def test_layers() -> None:
    base = Facts({"engine.tp": Fact(1, "base"), "engine.dp": Fact(1, "base")}, {"engine.pp": "base"})
    front = Facts({"engine.pp": Fact(2, "front")}, {"engine.tp": "hidden by ${TP}"})
    both = front.over(base)
    assert "engine.tp" not in both, "what is known to be hidden hides what lies below"
    assert both.unknown == {"engine.tp": "hidden by ${TP}"}
    assert both["engine.pp"].value == 2
    assert set(base) == {"engine.tp", "engine.dp"}


def test_facts_file_and_back(tmp_path: Path) -> None:
    facts = Facts(
        {
            "gpu.engine.capability": Fact(EachOf(("9.0", "8.9")), "NVML"),
            "software.libraries": Fact(("a", "b"), "x"),
            "engine.tp": Fact(2, "y", assumed=True),
            "engine.deterministic": Fact(True, "z"),
        }
    )
    file = tmp_path / "facts.json"
    file.write_text(json.dumps({"schema": "zerogap.facts", "schema_version": 1, **collect.to_file(facts)}))
    back = collect.read_file(file)
    assert {name: (fact.value, fact.assumed) for name, fact in back.items()} == {
        name: (fact.value, fact.assumed) for name, fact in facts.items()
    }
    assert back["gpu.engine.capability"].source == "facts.json: NVML"


BODIES = [
    "",
    "{",
    "[]",
    "{}",
    '{"schema": "other", "schema_version": 1, "facts": {}}',
    '{"schema": "zerogap.facts", "schema_version": 2, "facts": {}}',
    '{"schema": "zerogap.facts", "schema_version": 1, "facts": []}',
    '{"schema": "zerogap.facts", "schema_version": 1, "facts": {"engine.tpp": {"value": 1}}}',
    '{"schema": "zerogap.facts", "schema_version": 1, "facts": {"engine.tp": 1}}',
    '{"schema": "zerogap.facts", "schema_version": 1, "facts": {"engine.tp": {"value": [1]}}}',
    '{"schema": "zerogap.facts", "schema_version": 1, "facts": {"engine.tp": {"value": {"each_of": []}}}}',
    "[" * 100_000,
    '{"schema": "zerogap.facts", "schema_version": 1, "facts": {"engine.tp": {"value": 1, "source": 2}}}',
]


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_wrong_facts_files(body: str, tmp_path: Path) -> None:
    file = tmp_path / "facts.json"
    file.write_text(body)
    with pytest.raises(UsageError):
        collect.read_file(file)
    with pytest.raises(UsageError):
        collect.read_file(tmp_path / "nowhere.json")


def test_a_planned_gpu_takes_nothing_of_this_machine() -> None:
    facts = collect.gather(collect.Question(gpus=("H200",)))
    assert not [name for name in facts if name.startswith(("software.", "host.", "env."))]
    here = collect.gather(collect.Question())
    assert "software.python" in here
    assert "host.os" in here
    assert here["launch.given"].value is False
