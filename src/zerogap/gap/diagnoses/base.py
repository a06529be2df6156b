"""What a diagnosis is, and the texts that go with each cause (``causes.toml``)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

# What a level does to the verdict: a fault means exit 1; unknown means that nothing can be said (exit 3).
LEVELS = ("fault", "unknown", "warn", "note", "info")


@dataclass(frozen=True)
class Cause:
    """The fixed part of a diagnosis."""

    name: str
    code: str
    title: str
    level: str
    expected: str
    confirm: str
    hint: str


@dataclass(frozen=True)
class Finding:
    """One diagnosis of one source.

    Attributes:
        name: class/cause, an entry of ``causes.toml``.
        confidence: 0..1; how much of the signature was seen.
        observed: what was seen, in one sentence with its numbers.
        numbers: the numbers behind it.
        evidence: rows, steps or lines that show it.
        level: overrides the cause's level.
        code: overrides the cause's code where a variant has its own.
    """

    name: str
    confidence: float
    observed: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    evidence: tuple[str, ...] = ()
    level: str = ""
    code: str = ""
    hint: str = ""

    def __post_init__(self) -> None:
        cause = self.cause
        object.__setattr__(self, "level", self.level or cause.level)
        object.__setattr__(self, "code", self.code or cause.code)
        object.__setattr__(self, "hint", self.hint or cause.hint)

    @property
    def cause(self) -> Cause:
        """The fixed texts."""
        return causes()[self.name]

    @property
    def group(self) -> str:
        """The class: sampler, inputs-differ, weights-differ, ..."""
        return self.name.split("/", 1)[0]

    def as_dict(self, recheck: str = "") -> dict[str, Any]:
        """Return plain values for JSON."""
        cause = self.cause
        return {
            "name": self.name,
            "class": self.group,
            "code": self.code,
            "status": self.level,
            "confidence": round(self.confidence, 3),
            "title": cause.title,
            "expected": cause.expected,
            "observed": self.observed,
            "numbers": dict(self.numbers),
            "evidence": list(self.evidence),
            "confirm": cause.confirm,
            "hint": self.hint,
            "recheck": recheck,
        }


@cache
def causes() -> dict[str, Cause]:
    """Return every known cause by name."""
    text = resources.files("zerogap.gap.diagnoses").joinpath("causes.toml").read_text(encoding="utf-8")
    return {
        name: Cause(name, e["code"], e["title"], e["level"], e["expected"], e["confirm"], e["hint"])
        for name, e in tomllib.loads(text).items()
    }
