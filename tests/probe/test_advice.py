"""What to switch on: from the contracts, and never what the same checker refuses."""

from __future__ import annotations

import pytest

from zerogap.contracts.schema import all_contracts
from zerogap.probe import advice
from zerogap.probe.dialects import Engine


@pytest.mark.parametrize("kind", ["vllm", "sglang", "zerogap", "llama.cpp", "tgi", "openai"])
def test_every_kind_has_advice(kind: str) -> None:
    found = advice.advise(Engine(kind, "1.0", "m", {}), "http://gpu-box:8000")
    assert found.notes
    assert not found.refused
    assert found.contract in {"", *(contract.name for contract in all_contracts())}


def test_switches_are_the_contracts_own() -> None:
    found = advice.advise(Engine("sglang", "0.5.19", "m", {}), "http://gpu-box:8000")
    assert found.switches[0].startswith("--enable-deterministic-inference")
    flags = [text.split(":")[0].partition(" (")[0] for text in found.switches]
    assert len(flags) == len(set(flags))
    assert found.costs


def test_what_this_machine_refuses_is_not_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "_refused_here", lambda engine, contract: "no GPU")
    here = advice.advise(Engine("vllm", "0.32.0", "m", {}), "http://127.0.0.1:8000")
    assert (here.switches, here.refused) == ((), "no GPU")
    there = advice.advise(Engine("vllm", "0.32.0", "m", {}), "http://10.0.0.7:8000")
    assert there.switches


@pytest.mark.parametrize("version", ["", "0.32.0", "0.32.0+cpu", "\x1b[2J", "b6000", "nonsense version"])
def test_any_version_text_is_survived(version: str) -> None:
    assert advice.advise(Engine("vllm", version, "m", {}), "http://127.0.0.1:8000").contract == "vllm/batch-invariant"


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("http://127.0.0.1:1", True),
        ("http://localhost:1", True),
        ("http://[::1]:1", True),
        ("http://10.0.0.1:1", False),
    ],
)
def test_local_addresses(address: str, local: bool) -> None:
    assert advice.is_local(address) is local
