"""What a contract, a requirement, a known fault and a derived fact are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zerogap.contracts.rules import Condition
from zerogap.facts.fact import Value

PROMISES = ("bit-exact", "deterministic")


@dataclass(frozen=True)
class Fix:
    """A change that would meet a requirement; it is only offered when the same checker accepts it.

    Attributes:
        set: facts as they would be.
        says: what to write in the launch.
    """

    set: Mapping[str, Value]
    says: str


@dataclass(frozen=True)
class Requirement:
    """One thing that a contract requires.

    Attributes:
        id: name within the contract, for ``--only``.
        what: what is required, in words.
        when: it applies only when all of these hold.
        needs: all of these must hold.
        any_of: one of these groups must hold.
        unproven: when all of these hold the answer is unknown although nothing speaks against it.
        level: "require", or "warn" for a trap that is told but changes no verdict.
        says: what to tell when the answer is no (or unproven); ``{fact}`` and ``{fact:source}`` are filled in.
        prints: the line that the engine or trainer will print.
    """

    id: str
    what: str
    when: tuple[Condition, ...] = ()
    needs: tuple[Condition, ...] = ()
    any_of: tuple[tuple[Condition, ...], ...] = ()
    unproven: tuple[Condition, ...] = ()
    level: str = "require"
    expected: str = ""
    says: str = ""
    hint: str = ""
    prints: str = ""
    source: str = ""
    fixes: tuple[Fix, ...] = ()

    @property
    def facts(self) -> tuple[str, ...]:
        """Every fact that the requirement looks at."""
        groups = (self.when, self.needs, *self.any_of, self.unproven)
        return tuple(dict.fromkeys(name for group in groups for condition in group for name in condition.names))


@dataclass(frozen=True)
class VersionRange:
    """Versions that a contract was read at: below ``first`` it does not hold, above ``tested_to`` it is unknown."""

    fact: str
    first: str
    tested_to: str


@dataclass(frozen=True)
class Alternative:
    """What to use instead, checked by the same code with ``set`` in the facts."""

    contract: str
    says: str
    set: Mapping[str, Value]


@dataclass(frozen=True)
class Contract:
    """A named promise and what it requires.

    Attributes:
        promise: "bit-exact" (engine and trainer agree in every bit) or "deterministic".
        as_of: when its sources were read, as YYYY-MM-DD.
        asked_by: a launch asks for this contract when every condition of one of these groups holds.
        instead: what to say before the alternatives.
    """

    name: str
    title: str
    promise: str
    as_of: str
    summary: str
    sources: tuple[str, ...]
    versions: tuple[VersionRange, ...]
    asked_by: tuple[tuple[Condition, ...], ...]
    requirements: tuple[Requirement, ...]
    alternatives: tuple[Alternative, ...]
    instead: str = ""


@dataclass(frozen=True)
class Fault:
    """A known fault: when all of ``when`` hold it is there, whatever a version list or a library claims.

    Attributes:
        status: "fail" or "warn".
        breaks: contracts that do not hold while it is there.
        doubt: when the first sign is there and another unknown, those contracts are unknown, not untouched.
    """

    code: str
    title: str
    when: tuple[Condition, ...]
    status: str
    breaks: tuple[str, ...]
    says: str
    hint: str
    source: str
    fixes: tuple[Fix, ...] = ()
    doubt: bool = False


@dataclass(frozen=True)
class Derived:
    """A fact that follows from others, such as the backend that an engine picks when none is set."""

    fact: str
    value: Value
    when: tuple[Condition, ...]
    source: str
