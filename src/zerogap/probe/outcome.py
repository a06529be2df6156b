"""What one check of the probe found."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, Literal

Status = Literal["pass", "fail", "unknown"]


@dataclass(frozen=True)
class Outcome:
    """The answer to one check.

    Attributes:
        status: "unknown" is never taken for "pass".
        observed: what was seen, one line.
        code: the name of what was found, such as SEED_IGNORED; "" for nothing to name.
        numbers: the figures behind it.
        warnings: true things that are no failure of the engine and still spoil a run, as (code, text).
        hint: what to do; "" takes the check's own.
    """

    status: Status
    observed: str
    code: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[tuple[str, str], ...] = ()
    hint: str = ""


@dataclass(frozen=True)
class Check:
    """A check as the table ``checks.toml`` describes it.

    Attributes:
        group: "alive", "determinism", "seeds", "meaning", "form" or "trainer".
        needed: an unknown here leaves the whole answer unknown.
        full: asked with ``--full`` only.
        unproven: what a pass does not show, for the list of claims that stay unproven.
    """

    name: str
    group: str
    title: str
    expected: str
    needed: bool = True
    full: bool = False
    hint: str = ""
    unproven: str = ""
    source: str = ""


@dataclass(frozen=True)
class Finding:
    """A check together with what it found and what it cost."""

    check: Check
    outcome: Outcome
    requests: int
    seconds: float
    recheck: str


@cache
def checks() -> dict[str, Check]:
    """Return the documented checks in the order in which they are asked."""
    text = resources.files("zerogap.probe").joinpath("checks.toml").read_text(encoding="utf-8")
    return {name: Check(name=name, **entry) for name, entry in tomllib.loads(text).items()}


def unknown(reason: str, **numbers: Any) -> Outcome:
    """Return an outcome that says why nothing could be established."""
    return Outcome("unknown", reason, numbers=numbers)
