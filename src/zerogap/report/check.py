"""The verdict of ``zerogap check`` that a run folder keeps in ``check.json``: what it said, and about which machine."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerogap.report.text import clean

_LEVELS = {"yes": "healthy", "no": "fault", "unknown": "unknown"}


@dataclass
class Check:
    """The stored verdict, as rows for a table; ``raw`` is set instead when the file has another form."""

    verdict: str = ""
    level: str = "unknown"
    contracts: list[tuple[str, str, str]] = field(default_factory=list)  # name, verdict, level
    rows: list[tuple[str, str, str, str, str]] = field(default_factory=list)  # name, verdict, level, expected, observed
    notes: list[str] = field(default_factory=list)
    raw: str = ""


def _content(folder: Path | None) -> Any:
    if folder is None:
        return None
    try:
        text = (folder / "check.json").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def read_check(folder: Path | None) -> Check | None:
    """Return the check that a run folder keeps, or None."""
    content = _content(folder)
    if content is None:
        return None
    try:
        verdict = str(content["verdict"])
        made = Check(clean(verdict), _LEVELS.get(verdict, "unknown"), notes=[clean(str(n)) for n in content["notes"]])
        for contract in content["contracts"]:
            name, said = clean(str(contract["name"])), str(contract["verdict"])
            made.contracts.append((name, clean(said), _LEVELS.get(said, "unknown")))
            if contract["name"] not in content["decisive"]:
                continue
            for item in contract["requirements"]:
                status = str(item["status"])
                made.rows.append(
                    (clean(str(item["name"])), clean(status), _LEVELS.get(status, "unknown"),
                     clean(str(item["expected"])), clean(str(item["observed"])))
                )  # fmt: skip
    except (KeyError, TypeError):
        return Check(raw=clean(content if isinstance(content, str) else json.dumps(content, indent=1, sort_keys=True)))
    return made


def machine_facts(folder: Path | None) -> str:
    """Return what the check knew about the machine, one fact a line."""
    content = _content(folder)
    facts = content.get("facts") if isinstance(content, dict) else None
    if not isinstance(facts, dict):
        return ""
    lines = [
        f"{name} = {fact.get('value')}  ({fact.get('source')})"
        for name, fact in sorted(facts.items())
        if isinstance(fact, dict) and fact.get("value") not in ("absent", None)
    ]
    return "\n".join(lines)
