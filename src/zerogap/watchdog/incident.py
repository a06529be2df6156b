"""The record of an incident: ``incident.json`` for programs, ``incident.md`` for people."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from zerogap.console import printable
from zerogap.files import write_text_atomic
from zerogap.watchdog.redact import redact_tree

SCHEMA, VERSION = "zerogap.incident", 1
CHECK_S = 20.0


def check_launch(argv: Sequence[str]) -> dict[str, Any] | None:
    """Return what ``zerogap check`` says of a launch line, None where it cannot answer.

    A line that it does not know (a script of one's own) is read as a file where it names one; else the machine alone
    is checked.
    """
    files = [
        ["--launch", word] for word in argv if Path(word).suffix in (".sh", ".py", ".yaml") and Path(word).is_file()
    ]
    for arguments in ([["--", *argv]] if argv else []) + files[:1] + [[]]:
        answer = _ask_check(arguments)
        if answer is not None:
            return answer
    return None


def _ask_check(arguments: Sequence[str]) -> dict[str, Any] | None:
    command = [sys.executable, "-P", "-m", "zerogap", "check", "--json", *arguments]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=CHECK_S, check=False)
        answer = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    if done.returncode not in (0, 1, 3) or not isinstance(answer, dict):
        return None
    return {**answer, "exit_code": done.returncode, "asked": ["zerogap", "check", *arguments]}


def check_lines(check: dict[str, Any]) -> list[str]:
    """Return the answer of ``zerogap check`` in lines: each contract with what it fails on."""
    lines = [
        f"asked: {' '.join(check['asked'])}",
        f"verdict: {check.get('verdict', '?')} (exit code {check['exit_code']})",
    ]
    for contract in check.get("contracts") or []:
        lines.append(f"{contract.get('name', '?')}: {contract.get('verdict', '?')}")
        for item in contract.get("requirements") or []:
            if item.get("verdict", item.get("status")) == "no":
                wanted, found = str(item.get("expected", ""))[:160], str(item.get("observed", ""))[:160]
                lines.append(f"  {item.get('name', '?')}: expected {wanted}; observed {found}")
        if contract.get("instead") and contract.get("verdict") == "no":
            lines.append(f"  {contract['instead']}")
    return lines


def write_incident(folder: Path, incident: dict[str, Any]) -> None:
    """Write both forms, secrets redacted; each file is whole or absent."""
    clean = redact_tree({"schema": SCHEMA, "schema_version": VERSION, **incident})
    write_text_atomic(folder / "incident.json", json.dumps(clean, indent=2, sort_keys=True, default=str) + "\n")
    write_text_atomic(folder / "incident.md", markdown(clean))


def clock(at: float) -> str:
    """Return a time as a person reads it, with milliseconds, since the order of lines matters."""
    moment = datetime.fromtimestamp(at)
    return f"{moment:%Y-%m-%d %H:%M:%S}.{moment.microsecond // 1000:03}"


def block(text: str) -> str:
    """Return text as an indented code block: nothing in it can end the block or act as Markdown or HTML."""
    return "\n".join(f"    {printable(line)}" for line in text.splitlines() or [""])


def markdown(incident: dict[str, Any]) -> str:
    """Return the incident as Markdown."""
    verdict = incident["verdict"]
    lines = [
        f"# {verdict['verdict']}: {verdict['cause']}",
        "",
        block(verdict["summary"]),
        "",
        f"- seen: {clock(verdict['at'])}, trouble since {clock(verdict['since'])}",
        f"- phase: {verdict['phase']}",
        f"- action: {printable(incident['action']['taken'])}",
    ]
    if verdict["waiting_circle"]:
        lines.append(f"- who waits for whom: `{printable(' -> '.join(verdict['waiting_circle'])).replace('`', '')}`")
    if verdict["hint"]:
        lines += ["", "## What to do", "", printable(verdict["hint"])]
    lines += _section("What shows it", [_evidence(item) for item in verdict["evidence"]])
    lines += _section("What was looked at in vain", verdict["checked"])
    lines += _section("Last word of each side", [f"{side}: {text}" for side, text in verdict["sides"].items()])
    lines += _section("Consequences, not causes", verdict["victims"])
    lines += _section("Noticed before", verdict["notices"])
    if incident.get("check") is not None:
        lines += _section("zerogap check", check_lines(incident["check"]))
    elif verdict.get("check_command"):
        lines += ["", "## Check it yourself", "", block(verdict["check_command"])]
    moved = sorted(incident["last_progress"].items(), key=lambda item: item[1])
    lines += _section("Last progress", [f"{clock(at)}  {name}" for name, at in moved])
    lines += _section("Phases", [f"{clock(item['since'])}  {item['phase']}" for item in incident["phases"][-40:]])
    action = incident["action"]
    for title, key in (("Ended by SIGTERM", "terminated"), ("Ended by SIGKILL", "killed"), ("Still alive", "left")):
        lines += _section(title, action.get(key, []))
    lines += _section("GPU memory holders", [json.dumps(item) for item in incident.get("gpu_memory_holders", [])])
    lines += _section("Orphaned engines of other runs (not touched)", incident.get("orphans", []))
    lines += _section("Machine", [f"{name}: {value}" for name, value in incident["machine"].items()])
    for name, text in incident.get("stacks", {}).items():
        lines += ["", "## Stack", "", block(f"{name}\n{text}")]
    if incident.get("command"):
        lines += ["", "## Command", "", block(" ".join(incident["command"]))]
    return "\n".join(lines) + "\n"


def _evidence(item: dict[str, Any]) -> str:
    rule = f"  [{item['rule']}]" if item["rule"] else ""
    return f"{clock(item['at'])}  {item['source']}: {item['text']}{rule}"


def _section(title: str, items: Sequence[str]) -> list[str]:
    return ["", f"## {title}", "", block("\n".join(items))] if items else []
