"""Facts: one observed thing each, with where it was read; what is not a fact is unknown."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from zerogap.errors import UsageError, nearest

Scalar = str | int | float | bool
Value = Scalar | tuple[str, ...]

ABSENT = "absent"  # looked for and not there; a fact that is missing altogether is unknown


@dataclass(frozen=True)
class EachOf:
    """Several values that stand side by side, such as two unequal GPUs: a rule must hold for every one."""

    values: tuple[Value, ...]

    def __str__(self) -> str:
        return " and ".join(show(value) for value in self.values)


@dataclass(frozen=True)
class Fact:
    """One observed thing.

    Attributes:
        value: the value, of the type that ``names.toml`` gives for the fact's name.
        source: where it was read, such as ``run.sh line 12`` or ``NVML``.
        assumed: stated by a person (``--assume``, ``--gpu``, ``--stack``), not read from a machine.
    """

    value: Value | EachOf
    source: str
    assumed: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the fact as JSON types."""
        value: Any = self.value
        if isinstance(value, EachOf):
            value = {"each_of": [list(item) if isinstance(item, tuple) else item for item in value.values]}
        elif isinstance(value, tuple):
            value = list(value)
        return {"value": value, "source": self.source, "assumed": self.assumed}


class Facts(Mapping[str, Fact]):
    """An immutable set of facts by name, and why some others are unknown."""

    def __init__(self, known: Mapping[str, Fact] | None = None, unknown: Mapping[str, str] | None = None) -> None:
        self._known = dict(known or {})
        self.unknown = {name: why for name, why in (unknown or {}).items() if name not in self._known}

    def __getitem__(self, name: str) -> Fact:
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def over(self, base: Facts) -> Facts:
        """Return ``base`` with these facts in front: what is known or known to be hidden here hides the base's."""
        known = {name: fact for name, fact in base._known.items() if name not in self.unknown}
        return Facts({**known, **self._known}, {**base.unknown, **self.unknown})

    def without(self, *names: str) -> Facts:
        """Return the facts with these ones unknown."""
        return Facts({name: fact for name, fact in self._known.items() if name not in names}, self.unknown)

    def assuming(self, values: Mapping[str, Value], source: str) -> Facts:
        """Return the facts with these values stated instead, marked as assumed."""
        return Facts({name: Fact(value, source, assumed=True) for name, value in values.items()}).over(self)


@dataclass(frozen=True)
class Name:
    """What ``names.toml`` says of a fact."""

    name: str
    type: str  # version, text, integer, number, flag or list
    what: str
    values: tuple[str, ...] = ()


@cache
def names() -> dict[str, Name]:
    """Return every fact name that exists; a name that ends in ``.*`` stands for all with that beginning."""
    table = tomllib.loads((files("zerogap.facts") / "names.toml").read_text(encoding="utf-8"))
    both: dict[str, Name] = {}
    for name, entry in table.items():
        for role in ("engine", "trainer") if "<role>" in name else ("",):
            full = name.replace("<role>", role)
            both[full] = Name(
                full, entry["type"], entry["what"].replace("<role>", role), tuple(entry.get("values", ()))
            )
    return both


def describe(name: str) -> Name:
    """Return what is known about a fact name, or raise ``UsageError`` with the nearest names."""
    table = names()
    if name in table:
        return table[name]
    family = f"{name.partition('.')[0]}.*"
    if family in table and re.fullmatch(r"[A-Za-z_]\w*", name.partition(".")[2]):
        return replace(table[family], name=name)
    raise UsageError(f"no fact is named {name!r}{nearest(name, table)} (docs/check.md lists them)")


def expand(name: str) -> tuple[str, ...]:
    """Return the fact names that a shorthand stands for: ``gpu.capability`` is both sides' GPU."""
    head, _, rest = name.partition(".")
    if head == "gpu" and rest and f"gpu.engine.{rest}" in names() and name not in names():
        return (f"gpu.engine.{rest}", f"gpu.trainer.{rest}")
    return (describe(name).name,)


_TRUE, _FALSE = frozenset(("true", "1", "yes", "on")), frozenset(("false", "0", "no", "off"))


def convert(name: str, raw: object, where: str) -> Value:
    """Return ``raw`` as the type that the fact has.

    Args:
        name: the fact's name.
        raw: text from a command line, or a value from TOML, JSON or YAML.
        where: what to name in the error.

    Raises:
        UsageError: the value does not fit the type.
    """
    known = describe(name)
    text = raw.strip() if isinstance(raw, str) else raw
    value: Value | None = None
    if known.type == "flag":
        lowered = str(text).lower()
        value = True if lowered in _TRUE else False if lowered in _FALSE else None
    elif known.type in ("integer", "number"):
        value = _number(text, known.type)
    elif known.type == "list":
        if isinstance(text, list | tuple) and all(isinstance(item, str) for item in text):
            value = tuple(text)
        elif isinstance(text, str):
            value = tuple(part for part in re.split(r"[,\s]+", text.strip("[]")) if part)
    elif known.type == "version":
        value = _version_text(name, text)
    elif isinstance(text, str | int | float) and str(text) and len(str(text)) <= 4096:
        value = str(text).lower() if isinstance(text, bool) else str(text)
    if value is None:
        raise UsageError(f"{where}: {name} is a {known.type}, and {str(raw)[:80]!r} is none")
    if known.values and value not in known.values:
        raise UsageError(f"{where}: {name} is one of {', '.join(known.values)}, not {str(raw)[:80]!r}")
    return value


def _number(text: object, kind: str) -> int | float | None:
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        return None
    try:
        number = float(text)
        whole = abs(number) <= 1e15 and number == int(number)
        return (int(number) if whole else None) if kind == "integer" else (number if abs(number) <= 1e15 else None)
    except (ValueError, OverflowError):
        return None


def _version_text(name: str, text: object) -> str | None:
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        return None
    written = str(text)
    if name.endswith(".capability") and written != ABSENT:
        # sm_121, sm121a, 121 and 12.1 are the same device.
        found = re.fullmatch(r"(?:sm_?)?(\d{1,2})\.?(\d)[af]?", written, re.IGNORECASE)
        return f"{found[1]}.{found[2]}" if found else None
    return written if written == ABSENT or re.fullmatch(r"[vV]?\d[\w.+!-]{0,99}", written) else None


def show(value: Value | EachOf) -> str:
    """Return a value as a person writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ", ".join(value) if value else "(empty)"
    return str(value)


def parse_assumptions(texts: list[str]) -> Facts:
    """Return the facts stated as ``NAME=VALUE``; a later one replaces an earlier one."""
    known: dict[str, Fact] = {}
    for text in texts:
        name, equals, raw = text.partition("=")
        if not equals or not raw.strip():
            raise UsageError(f"--assume {text[:80]!r}: write FACT=VALUE, such as software.flash_attn_3=3.0.0")
        for full in expand(name.strip()):
            known[full] = Fact(convert(full, raw, "--assume"), "--assume", assumed=True)
    return Facts(known)
