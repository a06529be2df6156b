"""What to switch on to make this engine deterministic, flag by flag, and what that costs: from the contracts."""

from __future__ import annotations

import ipaddress
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any
from urllib.parse import urlsplit

from zerogap.contracts.check import check
from zerogap.contracts.rules import Verdict
from zerogap.contracts.schema import all_contracts
from zerogap.errors import UsageError
from zerogap.probe.dialects import Engine

_VERSION = re.compile(r"\d+(\.\d+)+([.+\-]?\w+)*")


@dataclass(frozen=True)
class Advice:
    """What can be done with this kind of engine.

    Attributes:
        contract: the contract that promises determinism, "" when there is none.
        switches: what to write, in order; empty when this machine cannot do it.
        costs: what it costs, each with its source.
        notes: what has to be known besides.
        refused: why the contract cannot hold on this machine, when the engine runs here; else "".
    """

    contract: str
    switches: tuple[str, ...]
    costs: tuple[str, ...]
    notes: tuple[str, ...]
    refused: str = ""


@cache
def _table() -> Mapping[str, Any]:
    return tomllib.loads(resources.files("zerogap.probe").joinpath("advice.toml").read_text(encoding="utf-8"))


def advise(engine: Engine, address: str) -> Advice:
    """Return the advice for this engine: contract requirements as switches, costs and notes from ``advice.toml``.

    An engine at a loopback address runs on this machine, so what its GPU cannot do is not suggested.
    """
    entry = _table().get(engine.kind, _table()["openai"])
    contract = entry.get("contract", "")
    costs, notes = tuple(entry.get("costs", ())), tuple(entry.get("notes", ()))
    if not contract:
        return Advice("", (), costs, notes)
    refused = _refused_here(engine, contract) if is_local(address) else ""
    if refused:
        return Advice(contract, (), (), notes, refused)
    where = "" if is_local(address) else " (run it there)"
    notes = (*notes, f"zerogap check --contract {contract} says whether its machine and launch can do it{where}")
    return Advice(contract, switches_of(contract), costs, notes)


def is_local(address: str) -> bool:
    """Whether an address is this machine's own loopback."""
    host = urlsplit(address).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _refused_here(engine: Engine, contract: str) -> str:
    """Return why the contract's GPU requirement fails on this machine, "" when it does not or is not known."""
    assumed = [f"software.{engine.kind}={engine.version}"] if _VERSION.fullmatch(engine.version) else []
    try:
        report = check(contracts=contract, assume=assumed, only="gpu")
    except UsageError:  # this contract asks nothing of the GPU
        return ""
    findings = [finding for judgement in report.judgements for finding in judgement.findings]
    return next((finding.says or finding.observed for finding in findings if finding.verdict is Verdict.NO), "")


def switches_of(name: str) -> tuple[str, ...]:
    """Return what the requirements of a contract say to write, each flag once."""
    contract = next((item for item in all_contracts() if item.name == name), None)
    if contract is None:
        return ()
    said: dict[str, str] = {}
    for requirement in contract.requirements:
        if requirement.level == "require" and requirement.fixes:
            flag = requirement.fixes[0].says
            said.setdefault(flag.partition(" (")[0], f"{flag}: {requirement.what}")
    return tuple(said.values())
