"""Contract files: what is wrong is refused with the place and the nearest name."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerogap import check
from zerogap.contracts.check import read_stack, stacks
from zerogap.contracts.page import contracts_page
from zerogap.contracts.schema import (
    all_contracts,
    built_in,
    derived,
    faults,
    load_folder,
    parse_contract,
    shared_requirements,
)
from zerogap.errors import UsageError

GOOD = """
schema_version = 1
name = "mine/house-rule"
title = "Our house rule"
promise = "deterministic"
as_of = "2026-11-30"
summary = "What we want."
sources = ["our wiki"]

[versions]
"software.torch" = { first = "2.8", tested_to = "2.13" }

[[requirement]]
id = "gpu"
what = "a Hopper GPU"
needs = [["gpu.engine.capability", "is", "9.0"]]
source = "our wiki"
"""


def test_the_built_in_contracts() -> None:
    names = {contract.name for contract in built_in()}
    assert names == {
        "miles/qwen3-dense-v1",
        "sglang/deterministic-inference",
        "vllm/batch-invariant",
        "torchtitan/bitwise",
        "slime/topp-replay",
        "zerogap/exact",
    }
    for contract in all_contracts():
        assert contract.sources
        assert all(item.source for item in contract.requirements)
    assert len(faults()) == len({fault.code for fault in faults()})
    assert derived()
    assert shared_requirements()


def test_every_fault_breaks_contracts_that_exist() -> None:
    names = {contract.name for contract in built_in()}
    for fault in faults():
        assert set(fault.breaks) <= names
        assert fault.status in ("fail", "warn")
        assert bool(fault.breaks) == (fault.status == "fail"), fault.code
        assert fault.when


def test_every_file_is_a_contract_a_table_of_faults_or_rules() -> None:
    files_there = {entry.name for entry in files("zerogap.contracts").iterdir() if entry.name.endswith(".toml")}
    assert len(files_there) == len(built_in()) + 2


def test_a_contract_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(GOOD)
    report = check(gpu="H100", own=tmp_path, contracts="mine/house-rule", assume=["software.torch=2.11.0"])
    assert report.exit_code == 0
    assert check(gpu="A100", own=tmp_path, contracts="mine/house-rule").exit_code == 1
    assert check(gpu="H100", own=tmp_path, contracts="mine/house-rule", assume=["software.torch=2.7"]).exit_code == 1
    assert check(gpu="H100", own=tmp_path, contracts="mine/house-rule", assume=["software.torch=2.99"]).exit_code == 3
    (tmp_path / "again.toml").write_text(GOOD)
    with pytest.raises(UsageError, match="two contracts are named"):
        check(gpu="H100", own=tmp_path)


WRONG = {
    'promise = "deterministic"': ('promise = "deterministik"', "did you mean 'deterministic'"),
    'as_of = "2026-11-30"': ('as_of = "last week"', "2026-08-21"),
    'name = "mine/house-rule"': ('name = "House rule"', "miles/qwen3-dense-v1"),
    "schema_version = 1": ("schema_version = 2", "schema_version is 1"),
    'sources = ["our wiki"]': ("sources = []", "not empty"),
    'summary = "What we want."': ("", "'summary' is missing"),
    'title = "Our house rule"': ('titel = "Our house rule"', "'title' is missing"),
    'what = "a Hopper GPU"': (
        'what = "a Hopper GPU"\nwhat_else = "x"',
        "no key is named 'what_else'; did you mean 'what'",
    ),
    '"is", "9.0"': ('"iss", "9.0"', "no operator is named 'iss'; did you mean 'is'"),
    '"gpu.engine.capability"': ('"gpu.engine.capabilities"', "did you mean 'gpu.engine.capability'"),
    '"9.0"]]': ('"hopper"]]', "gpu.engine.capability is a version"),
    'needs = [["gpu.engine.capability", "is", "9.0"]]': ("", "needs or any_of"),
    '[["gpu.engine.capability", "is", "9.0"]]': ('["gpu.engine.capability", "is", "9.0"]', "a condition is"),
    '"is", "9.0"]]': ('"is"]]', "takes 1 value"),
    'id = "gpu"': ('id = "The GPU"', "small letters"),
    'first = "2.8", ': ("", "'first' is missing"),
    '"software.torch" = {': ('"engine.tp" = {', "no version"),
    "[[requirement]]": ("[requirement]", "requirement is a list"),
    'source = "our wiki"\n': ('source = "our wiki"\nlevel = "maybe"\n', "require or warn"),
    "[versions]": ('include = ["sglang-atention"]\n[versions]', "did you mean 'sglang-attention'"),
}


@pytest.mark.parametrize("old", WRONG)
def test_a_wrong_contract_is_refused(old: str) -> None:
    new, text = WRONG[old]
    assert old in GOOD
    with pytest.raises(UsageError, match=r"mine\.toml") as caught:
        parse_contract(GOOD.replace(old, new), "mine.toml", shared_requirements())
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_wrong_folders(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        load_folder(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"no \.toml file"):
        load_folder(tmp_path)
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="cannot be read"):
        load_folder(tmp_path)
    (tmp_path / "x.toml").write_text("a = [" * 5000)
    with pytest.raises(UsageError, match="not TOML"):
        load_folder(tmp_path)


def test_an_alternative_must_exist(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(GOOD + '\n[[alternative]]\ncontract = "zerogap/exakt"\nsays = "x"\n')
    with pytest.raises(UsageError, match="did you mean 'zerogap/exact'"):
        check(own=tmp_path)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=80))
def test_any_text_is_a_contract_or_an_error(text: str) -> None:
    for whole in (text, GOOD + text):
        try:
            parse_contract(whole, "x.toml")
        except UsageError:
            continue


def test_stacks() -> None:
    assert "miles-2026-08" in stacks()
    for name in stacks():
        assert all(fact.assumed for fact in read_stack(name).values())
        table = tomllib.loads((files("zerogap.contracts") / "stacks" / f"{name}.toml").read_text())
        assert set(table) == {"title", "as_of", "source", "facts"}
    with pytest.raises(UsageError, match="did you mean 'miles-2026-08'"):
        read_stack("miles-2026-8")


def test_the_page_of_contracts_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "contracts.md"
    assert page.read_text() == contracts_page(), "write it again: python -m zerogap.contracts.page docs/contracts.md"
    for contract in built_in():
        assert contract.name in page.read_text()
