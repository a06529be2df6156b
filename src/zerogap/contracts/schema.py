"""Reads contracts from TOML; unknown keys, operators and facts are refused with the nearest name."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from zerogap.contracts.contract import (
    PROMISES,
    Alternative,
    Contract,
    Derived,
    Fault,
    Fix,
    Requirement,
    VersionRange,
)
from zerogap.contracts.rules import OPERATORS, Condition, parse_spec
from zerogap.errors import UsageError, nearest
from zerogap.facts.fact import Value, convert, describe

SCHEMA_VERSION = 1
_FILE_LIMIT = 2**20


class _Table:
    """Takes keys out of a TOML table and refuses what is left."""

    def __init__(self, table: object, where: str) -> None:
        if not isinstance(table, dict):
            raise UsageError(f"{where}: a table is wanted here")
        self.table, self.where, self.known = dict(table), where, set[str]()

    def take(self, key: str, kind: type, default: Any = None) -> Any:
        self.known.add(key)
        if key not in self.table:
            if default is None:
                raise UsageError(f"{self.where}: the key {key!r} is missing (docs/contracts.md shows the schema)")
            return default
        value = self.table.pop(key)
        if not isinstance(value, kind) or (kind is str and not value):
            raise UsageError(f"{self.where}: {key} is a {_KINDS[kind]}, not {str(value)[:60]!r}")
        return value

    def close(self) -> None:
        for key in self.table:
            raise UsageError(f"{self.where}: no key is named {key!r}{nearest(key, self.known)}")


_KINDS = {str: "text", list: "list", dict: "table", int: "whole number", bool: "yes or no"}


def read_condition(row: object, where: str) -> Condition:
    """Read ``["fact", "operator", value…]``."""
    if not isinstance(row, list) or len(row) < 2 or not all(isinstance(item, str) for item in row[:2]):
        raise UsageError(f'{where}: a condition is ["fact", "operator", value], not {str(row)[:80]!r}')
    fact, name, values = row[0], row[1], row[2:]
    if name not in OPERATORS:
        raise UsageError(f"{where}: no operator is named {name!r}{nearest(name, OPERATORS)}")
    try:
        describe(fact)
        wanted = OPERATORS[name].value
        counts = {"none": 0, "pair": 2, "list": None, "fact-factor": 2}
        count = counts.get(wanted, 1)
        if (count is not None and len(values) != count) or (count is None and not values):
            raise UsageError(
                f"{name} takes {'some values' if count is None else f'{count} value(s)'}, not {len(values)}"
            )
        if wanted == "none":
            return Condition(fact, name)
        if wanted.startswith("fact"):
            describe(str(values[0]))
            factor = float(values[1]) if wanted == "fact-factor" else 1.0
            return Condition(fact, name, str(values[0]), factor)
        if wanted == "spec":
            if parse_spec(str(values[0])) is None:
                raise UsageError(f"{values[0]!r} is no version range such as >=0.5.3,<0.6")
            return Condition(fact, name, str(values[0]))
        # An item of a list is a text, whatever the operator.
        plain = describe(fact).type == "list" or name in ("like", "not_like")
        typed = tuple(str(value) if plain else convert(fact, value, name) for value in values)
        return Condition(fact, name, typed[0] if wanted == "one" else typed)
    except (UsageError, ValueError) as error:
        raise UsageError(f"{where}: {error}") from None


def _conditions(table: _Table, key: str) -> tuple[Condition, ...]:
    return tuple(read_condition(row, f"{table.where}, {key}") for row in table.take(key, list, []))


def _groups(table: _Table, key: str) -> tuple[tuple[Condition, ...], ...]:
    groups = table.take(key, list, [])
    if not all(isinstance(group, list) and group for group in groups):
        raise UsageError(f"{table.where}: {key} is a list of lists of conditions")
    return tuple(tuple(read_condition(row, f"{table.where}, {key}") for row in group) for group in groups)


def _fixes(table: _Table) -> tuple[Fix, ...]:
    fixes = []
    for index, row in enumerate(table.take("fix", list, [])):
        inner = _Table(row, f"{table.where}, fix {index + 1}")
        fixes.append(Fix(_settings(inner), inner.take("says", str)))
        inner.close()
    return tuple(fixes)


def _settings(table: _Table, default: Any = None) -> dict[str, Value]:
    return {name: convert(name, value, table.where) for name, value in table.take("set", dict, default).items()}


def _requirement(row: object, where: str) -> Requirement:
    table = _Table(row, where)
    identity = table.take("id", str)
    table.where = f"{where} {identity!r}"
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", identity):
        raise UsageError(f"{table.where}: an id is made of small letters, digits and dashes")
    level = table.take("level", str, "require")
    if level not in ("require", "warn"):
        raise UsageError(f"{table.where}: level is require or warn, not {level!r}")
    requirement = Requirement(
        identity,
        table.take("what", str),
        when=_conditions(table, "when"),
        needs=_conditions(table, "needs"),
        any_of=_groups(table, "any_of"),
        unproven=_conditions(table, "unproven"),
        level=level,
        expected=table.take("expected", str, "") or "",
        says=table.take("says", str, "") or "",
        hint=table.take("hint", str, "") or "",
        prints=table.take("prints", str, "") or "",
        source=table.take("source", str),
        fixes=_fixes(table),
    )
    table.close()
    if not requirement.needs and not requirement.any_of:
        raise UsageError(f"{table.where}: needs or any_of must hold a condition")
    return requirement


def parse_contract(text: str, where: str, shared: Mapping[str, tuple[Requirement, ...]] | None = None) -> Contract:
    """Read one contract.

    Args:
        text: the TOML text.
        where: the file's name, for errors.
        shared: sets of requirements that ``include`` may name.

    Raises:
        UsageError: not TOML, a missing or unknown key, an unknown operator or fact, a value of the wrong type.
    """
    table = _Table(_toml(text, where), where)
    if table.take("schema_version", int) != SCHEMA_VERSION:
        raise UsageError(f"{where}: schema_version is {SCHEMA_VERSION}")
    name = table.take("name", str)
    if not re.fullmatch(r"[a-z0-9.-]+/[a-z0-9.-]+", name):
        raise UsageError(f"{where}: a contract's name is like miles/qwen3-dense-v1, not {name!r}")
    promise = table.take("promise", str)
    if promise not in PROMISES:
        raise UsageError(
            f"{where}: promise is one of {', '.join(PROMISES)}, not {promise!r}{nearest(promise, PROMISES)}"
        )
    as_of = table.take("as_of", str)
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", as_of):
        raise UsageError(f"{where}: as_of is a date like 2026-08-21, not {as_of!r}")
    included: list[Requirement] = []
    sets = shared or {}
    for set_name in table.take("include", list, []):
        if set_name not in sets:
            raise UsageError(f"{where}: no shared set is named {set_name!r}{nearest(str(set_name), sets)}")
        included.extend(sets[set_name])
    requirements = [_requirement(row, f"{where}, requirement") for row in table.take("requirement", list, [])]
    contract = Contract(
        name,
        table.take("title", str),
        promise,
        as_of,
        table.take("summary", str),
        _texts(table, "sources"),
        _versions(table),
        _groups(table, "asked_by"),
        (*requirements, *included),
        tuple(_alternative(row, f"{where}, alternative") for row in table.take("alternative", list, [])),
        table.take("instead", str, "") or "",
    )
    table.close()
    ids = [requirement.id for requirement in contract.requirements]
    if not ids:
        raise UsageError(f"{where}: a contract without requirements would always hold")
    for identity in ids:
        if ids.count(identity) > 1:
            raise UsageError(f"{where}: two requirements are named {identity!r}")
    return contract


def _texts(table: _Table, key: str) -> tuple[str, ...]:
    values = table.take(key, list)
    if not values or not all(isinstance(value, str) for value in values):
        raise UsageError(f"{table.where}: {key} is a list of texts and not empty")
    return tuple(values)


def _versions(table: _Table) -> tuple[VersionRange, ...]:
    ranges = []
    for fact, row in table.take("versions", dict, {}).items():
        inner = _Table(row, f"{table.where}, versions {fact!r}")
        if describe(fact).type != "version":
            raise UsageError(f"{inner.where}: the fact is no version")
        ranges.append(VersionRange(fact, inner.take("first", str), inner.take("tested_to", str)))
        inner.close()
    return tuple(ranges)


def _alternative(row: object, where: str) -> Alternative:
    table = _Table(row, where)
    alternative = Alternative(table.take("contract", str), table.take("says", str), _settings(table, {}))
    table.close()
    return alternative


def _toml(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{where}: not TOML ({str(error)[:200] or type(error).__name__})") from None


@cache
def shared_requirements() -> dict[str, tuple[Requirement, ...]]:
    """Return the sets of requirements that several contracts include."""
    folder = files("zerogap.contracts") / "shared"
    sets = {}
    for entry in folder.iterdir():
        if entry.name.endswith(".toml"):
            table = _Table(_toml(entry.read_text(encoding="utf-8"), entry.name), entry.name)
            rows = table.take("requirement", list)
            table.close()
            sets[entry.name.removesuffix(".toml")] = tuple(
                _requirement(row, f"{entry.name}, requirement") for row in rows
            )
    return sets


@cache
def built_in() -> tuple[Contract, ...]:
    """Return the contracts of this package, bit-exact ones first."""
    folder = files("zerogap.contracts")
    found = [
        parse_contract(entry.read_text(encoding="utf-8"), entry.name, shared_requirements())
        for entry in folder.iterdir()
        if entry.name.endswith(".toml") and entry.name not in ("faults.toml", "derived.toml")
    ]
    return tuple(sorted(found, key=lambda contract: (PROMISES.index(contract.promise), contract.name)))


def load_folder(folder: Path) -> tuple[Contract, ...]:
    """Return the contracts of a person's own folder.

    Raises:
        UsageError: it is no folder, holds no contract, or one of them is wrong.
    """
    if not folder.is_dir():
        raise UsageError(f"--contracts {folder}: no such folder")
    paths = sorted(folder.glob("*.toml"))
    if not paths:
        raise UsageError(f"--contracts {folder}: no .toml file in it")
    contracts = []
    for path in paths:
        try:
            if path.stat().st_size > _FILE_LIMIT:
                raise UsageError(f"{path}: larger than {_FILE_LIMIT // 2**20} MiB")
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path} cannot be read ({type(error).__name__})") from None
        contracts.append(parse_contract(text, str(path), shared_requirements()))
    return tuple(contracts)


def all_contracts(own: Iterable[Contract] = ()) -> tuple[Contract, ...]:
    """Return the built-in contracts with a person's own; two of one name are refused."""
    contracts = (*built_in(), *own)
    names = [contract.name for contract in contracts]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two contracts are named {name!r}; give your own another name")
    for contract in contracts:
        for alternative in contract.alternatives:
            if alternative.contract not in names:
                close = nearest(alternative.contract, names)
                raise UsageError(f"{contract.name}: the alternative {alternative.contract!r} does not exist{close}")
    return contracts


@cache
def faults() -> tuple[Fault, ...]:
    """Return the known faults."""
    rows = _toml((files("zerogap.contracts") / "faults.toml").read_text(encoding="utf-8"), "faults.toml")["fault"]
    found = []
    for row in rows:
        table = _Table(row, "faults.toml")
        code = table.take("code", str)
        table.where = f"faults.toml {code}"
        found.append(
            Fault(
                code,
                table.take("title", str),
                _conditions(table, "when"),
                table.take("status", str),
                tuple(table.take("breaks", list, [])),
                table.take("says", str),
                table.take("hint", str),
                table.take("source", str),
                _fixes(table),
                table.take("doubt", bool, False),
            )
        )
        table.close()
    return tuple(found)


@cache
def derived() -> tuple[Derived, ...]:
    """Return the rules for facts that follow from others."""
    rows = _toml((files("zerogap.contracts") / "derived.toml").read_text(encoding="utf-8"), "derived.toml")["derive"]
    found = []
    for row in rows:
        table = _Table(row, "derived.toml")
        fact = table.take("fact", str)
        value = convert(fact, table.table.pop("value", ""), "derived.toml")
        found.append(Derived(fact, value, _conditions(table, "when"), table.take("source", str)))
        table.close()
    return tuple(found)
