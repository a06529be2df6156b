"""A probe's result as table, JSON and JUnit; and what changed since an older one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from rich.table import Table
from rich.text import Text

from zerogap import __version__
from zerogap.console import out, printable
from zerogap.errors import UsageError
from zerogap.probe import verdict
from zerogap.probe.advice import advise
from zerogap.probe.dialects import Engine
from zerogap.probe.outcome import Finding
from zerogap.probe.run import NOT_ASKED, Result

SCHEMA = "zerogap.probe"
VERSION = 1
_STYLE = {"pass": "green", "fail": "red", "unknown": "yellow"}
_OLD_BYTES = 16 << 20


def body(result: Result, changes: list[str] | None = None) -> dict[str, Any]:
    """Return the result as JSON holds it; no prompt and no generated text is in it."""
    engine = result.engine
    found: dict[str, Any] = {
        "zerogap_version": __version__,
        "address": result.address,
        "engine": None if engine is None else {"kind": engine.kind, "version": engine.version, "model": engine.model,
                                               "facts": dict(engine.facts)},
        "full": result.full,
        "deterministic": verdict.deterministic(result),
        "meaning": verdict.meaning(result),
        "exit_code": int(verdict.exit_code(result)),
        "requests": result.requests,
        "seconds": round(result.seconds, 2),
        "fingerprint": result.fingerprint,
        "findings": [
            {
                "name": f.check.name,
                "group": f.check.group,
                "status": f.outcome.status,
                "needed": f.check.needed,
                "expected": f.check.expected,
                "observed": f.outcome.observed,
                "code": f.outcome.code,
                "numbers": dict(f.outcome.numbers),
                "warnings": [{"code": code, "text": text} for code, text in f.outcome.warnings],
                "hint": _hint(f),
                "source": f.check.source,
                "requests": f.requests,
                "seconds": round(f.seconds, 2),
                "recheck": f.recheck,
            }
            for f in result.findings
        ],
        "unproven": verdict.unproven(result),
        "notes": list(result.notes),
    }  # fmt: skip
    if engine is not None:
        advice = advise(engine, result.address)
        found["advice"] = {"contract": advice.contract, "switches": list(advice.switches), "costs": list(advice.costs),
                           "notes": list(advice.notes), "refused": advice.refused}  # fmt: skip
    if changes is not None:
        found["changes"] = changes
    return found


def _hint(finding: Finding) -> str:
    return "" if finding.outcome.status == "pass" else finding.outcome.hint or finding.check.hint


def show(result: Result, changes: list[str] | None = None) -> None:
    """Print the result for people."""
    console = out()
    engine = result.engine
    name = "no engine" if engine is None else " ".join(filter(None, (engine.kind, engine.version, engine.model)))
    console.print(f"{result.address}: {name}", soft_wrap=True)
    if engine is None:
        console.print(f"deterministic: unknown: {result.findings[0].outcome.observed}", soft_wrap=True)
        return
    for group, findings in verdict.by_group(result).items():
        asked = [finding for finding in findings if not finding.outcome.observed.startswith(NOT_ASKED)]
        if not asked:
            continue
        table = Table(title=group, title_justify="left", box=None, pad_edge=False, expand=False)
        for column in ("check", "status", "observed"):
            table.add_column(column, no_wrap=column != "observed", overflow="fold")
        for finding in asked:
            table.add_row(
                finding.check.name,
                Text(finding.outcome.status, _STYLE[finding.outcome.status]),
                Text(_observed(finding)),
            )
        console.print()
        console.print(table)
        for finding in asked:
            if finding.outcome.status != "pass":
                _show_more(finding)
    silent = sum(finding.outcome.observed.startswith(NOT_ASKED) for finding in result.findings)
    if silent:
        console.print(f"\n{silent} checks were not asked: the engine gives no token")
    warnings = verdict.warnings(result)
    if warnings:
        console.print("\nwarnings")
        for code, text in warnings:
            console.print(f"  {code}: {text}", soft_wrap=True)
    _show_end(result, changes)


def _observed(finding: Finding) -> str:
    code, text = finding.outcome.code, finding.outcome.observed
    return printable(text if not code or code in text else f"{code}: {text}")


def _show_more(finding: Finding) -> None:
    """Print what was expected, what to do, and the command that asks again."""
    hint = _hint(finding) if finding.outcome.status == "fail" else ""
    text = f"  {finding.check.name}: expected {finding.check.expected}" + (f"; {hint}" if hint else "")
    out().print(f"{text}; again: {finding.recheck}", soft_wrap=True)


def _show_end(result: Result, changes: list[str] | None) -> None:
    console = out()
    if changes is not None:
        console.print("\nsince the older probe")
        for change in changes or ["nothing changed"]:
            console.print(f"  {printable(change)}", soft_wrap=True)
    if result.engine is not None and verdict.deterministic(result) != "yes":
        _show_advice(
            result.engine, result.address, dead=any(f.outcome.observed.startswith(NOT_ASKED) for f in result.findings)
        )
    console.print("\nnot proven by this")
    for text in verdict.unproven(result):
        console.print(f"  {printable(text)}", soft_wrap=True)
    for text in result.notes:
        console.print(f"  {printable(text)}", soft_wrap=True)
    said = verdict.meaning(result)
    if said:
        console.print(f"\nlog-probs: {said}", soft_wrap=True)
    console.print(
        f"deterministic: {verdict.deterministic(result)} ({result.requests} requests, {result.seconds:.1f} s)",
        soft_wrap=True,
    )


def _show_advice(engine: Engine, address: str, dead: bool) -> None:
    """Print what to switch on and what it costs; of a dead engine only what may explain it."""
    console, advice = out(), advise(engine, address)
    if not dead:
        console.print("\nto make it deterministic" + (f" ({advice.contract})" if advice.contract else ""))
        if advice.refused:
            console.print(f"  not on this machine: {advice.refused}", soft_wrap=True)
        for text in advice.switches:
            console.print(f"  switch on: {text}", soft_wrap=True)
        for text in advice.costs:
            console.print(f"  costs: {text}", soft_wrap=True)
    else:
        console.print(f"\nknown of {engine.kind}")
    for text in advice.notes:
        console.print(f"  note: {text}", soft_wrap=True)


def junit(result: Result) -> str:
    """Return the findings as JUnit XML: a needed unknown is an error, another unknown is skipped."""
    suite = ElementTree.Element("testsuite", name="zerogap probe", tests=str(len(result.findings)))
    counts = {"failures": 0, "errors": 0, "skipped": 0}
    for finding in result.findings:
        case = ElementTree.SubElement(
            suite,
            "testcase",
            classname=f"probe.{finding.check.group}",
            name=finding.check.name,
            time=f"{finding.seconds:.3f}",
        )
        text = _xml(finding.outcome.observed)
        if finding.outcome.status == "fail":
            counts["failures"] += 1
            ElementTree.SubElement(case, "failure", message=text, type=finding.outcome.code or "fail")
        elif finding.outcome.status == "unknown":
            tag = "error" if finding.check.needed else "skipped"
            counts["errors" if tag == "error" else "skipped"] += 1
            ElementTree.SubElement(case, tag, message=text)
        else:
            ElementTree.SubElement(case, "system-out").text = text
    for name, count in counts.items():
        suite.set(name, str(count))
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"


def _xml(text: str) -> str:
    """Return text without what XML cannot hold."""
    return "".join(
        c
        for c in printable(text)
        if c in "\t\n" or 0x20 <= ord(c) <= 0xD7FF or 0xE000 <= ord(c) <= 0xFFFD or ord(c) > 0xFFFF
    )


def read_old(path: Path) -> dict[str, Any]:
    """Return an older probe's JSON.

    Raises:
        UsageError: it is none.
    """
    try:
        if path.stat().st_size > _OLD_BYTES:
            raise UsageError(
                f"--against {path}: larger than any probe's report; give the output of zerogap probe --json"
            )
        old = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"--against {path}: cannot be read ({error.strerror}); give the output of zerogap probe --json"
        ) from None
    except (ValueError, RecursionError):
        raise UsageError(f"--against {path}: not JSON; give the output of zerogap probe --json") from None
    if not isinstance(old, dict) or old.get("schema") != SCHEMA or not isinstance(old.get("findings"), list):
        raise UsageError(f"--against {path}: not a probe's report; give the output of zerogap probe --json")
    if old.get("schema_version") != VERSION:
        raise UsageError(
            f"--against {path}: schema version {old.get('schema_version')}, this reads {VERSION}; probe again"
        )
    return old


def changes_since(old: dict[str, Any], result: Result) -> list[str]:
    """Return what differs from an older report: engine, status of each check, bits of the fixed prompts."""
    new = body(result)
    said: list[str] = []
    for key in ("kind", "version", "model"):
        before, now = ((side.get("engine") or {}).get(key) for side in (old, new))
        if before != now:
            said.append(f"engine {key}: {before} before, {now} now")
    before_by_name = {f.get("name"): f for f in old["findings"] if isinstance(f, dict)}
    for finding in new["findings"]:
        before = before_by_name.get(finding["name"])
        if before is None:
            said.append(f"{finding['name']}: {finding['status']}, was not asked before")
        elif (before.get("status"), before.get("code")) != (finding["status"], finding["code"]):
            was = f"{before.get('status')} {before.get('code') or ''}".strip()
            said.append(f"{finding['name']}: {was} before, {finding['status']} {finding['code']}".strip() + " now")
    if old.get("fingerprint") and result.fingerprint and old["fingerprint"] != result.fingerprint:
        said.append(
            "the fixed prompts give other bits than before: model, version, flags or hardware changed the numerics"
        )
    return said
