"""From findings to one answer, and what stays unproven."""

from __future__ import annotations

from zerogap.errors import ExitCode
from zerogap.probe.outcome import Finding, checks
from zerogap.probe.run import Result

_DETERMINISM = "determinism"
_NO_PART = ("rescore", "ties")  # an engine can be deterministic and still score otherwise than it decodes
_MEANINGS = {
    "temperature": {"raw": "before temperature", "temperature": "after temperature"},
    "truncation": {
        "raw": "before top-p, top-k and min-p",
        "renormalised": "after top-p, top-k and min-p, renormalised over what is kept",
        "masked": "after top-p, top-k and min-p, not renormalised",
    },
}


def exit_code(result: Result) -> ExitCode:
    """Return 1 if anything failed, else 3 if something needed is unknown, else 0."""
    if any(f.outcome.status == "fail" for f in result.findings):
        return ExitCode.DOES_NOT_HOLD
    if any(f.outcome.status == "unknown" and f.check.needed for f in result.findings):
        return ExitCode.UNKNOWN
    return ExitCode.HOLDS


def deterministic(result: Result) -> str:
    """Return yes, no or unknown: does the engine give the same bits whatever else it does."""
    asked = {f.check.name: f.outcome.status for f in result.findings}
    names = [c.name for c in checks().values() if c.group == _DETERMINISM and c.name not in _NO_PART]
    if any(asked.get(name) == "fail" for name in names):
        return "no"
    return "yes" if all(asked.get(name) == "pass" for name in names if checks()[name].needed) else "unknown"


def meaning(result: Result) -> str:
    """Return what a log-prob of this engine is, in one line."""
    by_name = {f.check.name: f for f in result.findings}
    if "temperature" not in by_name:
        return ""
    said = []
    for name in ("temperature", "truncation", "penalties", "precision"):
        finding = by_name.get(name)
        if finding is None or finding.outcome.status == "unknown":
            said.append(f"{name} unknown")
            continue
        numbers = finding.outcome.numbers
        if name == "precision":
            said.append(str(numbers.get("grid", "")))
        elif name == "penalties":
            said.append("penalties in" if finding.outcome.code == "PENALTIES_IN" else "penalties out")
        else:
            said.append(_MEANINGS[name].get(numbers.get("semantics", ""), f"unclear under {name}"))
    return "; ".join(said)


def unproven(result: Result) -> list[str]:
    """Return the claims that this probe leaves open, whatever it found."""
    asked = {f.check.name: f for f in result.findings}
    said: list[str] = []
    silent: list[str] = []
    for name, check in checks().items():
        finding = asked.get(name)
        if finding is None:
            if check.group != "trainer":
                said.append(
                    f"{check.title}: not asked" + (" (only with --full)" if check.full and not result.full else "")
                )
        elif finding.outcome.status == "unknown":
            silent.append(name)
        elif finding.outcome.status == "pass" and check.unproven:
            said.append(check.unproven)
    if silent:
        said.insert(0, f"unknown: {', '.join(silent)}")
    if "trainer-gap" not in asked:
        said.append("equality with a trainer: no model was given (--trainer-model)")
    said.append("other versions, flags, GPUs, tensor-parallel degrees, and loads than those of this probe")
    return said


def warnings(result: Result) -> list[tuple[str, str]]:
    """Return what spoils a run without being a failure of the engine."""
    return list(dict.fromkeys(warning for f in result.findings for warning in f.outcome.warnings))


def by_group(result: Result) -> dict[str, list[Finding]]:
    """Return the findings in groups, in the order of the table."""
    found: dict[str, list[Finding]] = {}
    for finding in result.findings:
        found.setdefault(finding.check.group, []).append(finding)
    return found
