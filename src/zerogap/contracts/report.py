"""The report of a check: judgements, known faults, exit code; as JSON and as text for people."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerogap.console import finite
from zerogap.contracts.rules import Verdict, all_of, any_of
from zerogap.contracts.verdict import Finding, Judgement
from zerogap.errors import ExitCode
from zerogap.facts.fact import Facts
from zerogap.files import write_text_atomic

SCHEMA, SCHEMA_VERSION = "zerogap.check", 1

_EXIT = {Verdict.YES: ExitCode.HOLDS, Verdict.NO: ExitCode.DOES_NOT_HOLD, Verdict.UNKNOWN: ExitCode.UNKNOWN}
_SECRET = re.compile(r"key|token|secret|passw|credential|auth", re.IGNORECASE)


@dataclass(frozen=True)
class Difference:
    """One setting that a run's log shows otherwise than planned."""

    fact: str
    planned: str
    resolved: str
    where: str

    def to_json(self) -> dict[str, Any]:
        """Return the difference as JSON types."""
        return {"fact": self.fact, "planned": self.planned, "resolved": self.resolved, "where": self.where}


@dataclass(frozen=True)
class Report:
    """What a check found.

    Attributes:
        judgements: one per contract that was asked about, bit-exact ones first.
        faults: known faults that are there.
        decisive: names of the contracts that decide the exit code.
        every: whether all of the decisive ones must hold; else one is enough.
        facts: everything that was known.
        differences: against a run's log, when one was given.
        compared: how many settings were compared with the log, or None without one.
        notes: what a reader should know beside the verdicts.
        only: one requirement or fault was asked about; a fault that is there then decides, even a warning.
    """

    judgements: tuple[Judgement, ...]
    faults: tuple[Finding, ...]
    decisive: tuple[str, ...]
    every: bool
    facts: Facts
    differences: tuple[Difference, ...] = ()
    compared: int | None = None
    notes: tuple[str, ...] = ()
    only: bool = False

    @property
    def verdict(self) -> Verdict:
        """The verdict over the decisive contracts (and the log, when one was compared)."""
        verdicts = [item.verdict for item in self.judgements if item.contract.name in self.decisive]
        verdict = all_of(verdicts) if self.every else any_of(verdicts)
        return Verdict.NO if self.differences or (self.only and self.faults) else verdict

    @property
    def exit_code(self) -> ExitCode:
        """0 holds, 1 does not hold, 3 unknown."""
        return _EXIT[self.verdict]

    @property
    def missing(self) -> tuple[str, ...]:
        """Facts that are unknown and keep a decisive contract from being decided."""
        return tuple(
            dict.fromkeys(
                name
                for item in self.judgements
                if item.contract.name in self.decisive and item.verdict is Verdict.UNKNOWN
                for name in item.missing
            )
        )

    @property
    def assumed(self) -> tuple[str, ...]:
        """Facts that a person stated and that an answer stands on."""
        used = (name for item in self.judgements for finding in item.findings for name in finding.assumed)
        return tuple(sorted(set(used)))

    def __bool__(self) -> bool:
        """True only when it holds: unknown is never yes."""
        return self.verdict is Verdict.YES

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON types, without schema name and version."""
        return {
            "verdict": str(self.verdict),
            "exit_code": int(self.exit_code),
            "decisive": list(self.decisive),
            "missing": list(self.missing),
            "assumed": list(self.assumed),
            "contracts": [item.to_json() for item in self.judgements],
            "faults": [finding.to_json() for finding in self.faults],
            "differences": [difference.to_json() for difference in self.differences],
            "compared": self.compared,
            "notes": list(self.notes),
            "facts": {name: self.facts[name].to_json() for name in sorted(self.facts)},
            "unknown": dict(sorted(self.facts.unknown.items())),
        }


def store_check(report: Report, folder: Path) -> Path:
    """Write a report into a run folder as ``check.json``, whole or not at all, and return its path."""
    path = folder / "check.json"
    body = finite({"schema": SCHEMA, "schema_version": SCHEMA_VERSION, **report.to_json()})
    write_text_atomic(path, json.dumps(body, sort_keys=True, indent=1) + "\n")
    return path


def recheck(command: Sequence[str], contract: str, identity: str) -> str:
    """Return the command that checks one finding again; values that look like secrets are left out.

    Args:
        command: the command line that says what is checked.
        contract: the contract's name, or "" for a fault.
        identity: the finding's name.
    """
    options = list(command)
    after: list[str] = []
    if "--" in options:
        place = options.index("--")
        options, after = options[:place], options[place:]
    if contract:
        options += ["--contract", contract]
    return shlex.join([*options, "--only", identity, *redacted(after)])


def redacted(words: Sequence[str]) -> list[str]:
    """Return a command with the values of flags and variables that look like secrets replaced."""
    shown: list[str] = []
    hide = False
    for word in words:
        head, equals, _ = word.partition("=")
        if hide and not word.startswith("-"):
            shown.append("***")
        elif equals and _SECRET.search(head):
            shown.append(f"{head}=***")
        else:
            shown.append(_JSON_SECRET.sub(r"\1***\2", word) if word.lstrip().startswith("{") or "={" in word else word)
        hide = word.startswith("-") and not equals and bool(_SECRET.search(word)) and not _NO_SECRET.search(word)
    return shown


_JSON_SECRET = re.compile(r'("[^"]*(?:KEY|TOKEN|SECRET|PASSW)[^"]*"\s*:\s*")[^"]*(")', re.IGNORECASE)
_NO_SECRET = re.compile(r"max-tokens|tokens-per|tokenizer|(input|label|metadata|reward|tool)-key$", re.IGNORECASE)
