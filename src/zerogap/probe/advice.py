"""What to switch on to make this engine deterministic, flag by flag, and what that costs: from the contracts."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.util import find_spec
from typing import Any

from zerogap.probe.dialects import Engine


@dataclass(frozen=True)
class Advice:
    """What can be done with this kind of engine.

    Attributes:
        contract: the contract that promises determinism, "" when there is none.
        switches: what to write, in order.
        costs: what it costs, each with its source.
        notes: what has to be known besides.
    """

    contract: str
    switches: tuple[str, ...]
    costs: tuple[str, ...]
    notes: tuple[str, ...]


@cache
def _table() -> Mapping[str, Any]:
    return tomllib.loads(resources.files("zerogap.probe").joinpath("advice.toml").read_text(encoding="utf-8"))


def advise(engine: Engine) -> Advice:
    """Return the advice for this engine: contract requirements as switches, costs and notes from ``advice.toml``."""
    entry = _table().get(engine.kind, _table()["openai"])
    contract = entry.get("contract", "")
    switches = _from_contract(contract) if contract else ()
    notes = list(entry.get("notes", ()))
    if contract:
        notes.append(f"zerogap check --contract {contract} says beforehand whether a machine and a launch can do it")
    return Advice(contract, switches, tuple(entry.get("costs", ())), tuple(notes))


def _from_contract(name: str) -> tuple[str, ...]:
    """Return what the requirements of a contract say to write, without repeating one."""
    if find_spec("zerogap.contracts") is None:
        return ()
    from zerogap.contracts.schema import all_contracts

    contract = next((item for item in all_contracts() if item.name == name), None)
    if contract is None:
        return ()
    said: list[str] = []
    for requirement in contract.requirements:
        if requirement.level != "require":
            continue
        if requirement.fixes:
            said.append(f"{requirement.fixes[0].says} ({requirement.what})")
        elif requirement.hint and requirement.id not in ("gpu", "torch", "model"):
            said.append(f"{requirement.hint} ({requirement.what})")
    return tuple(dict.fromkeys(said))
