"""Rules over facts: one condition is a fact, an operator and a value; the answer is yes, no or unknown."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from packaging.version import InvalidVersion, Version

from zerogap.facts.fact import ABSENT, EachOf, Facts, Value, show


class Verdict(StrEnum):
    """The answer to a rule; unknown is never yes."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


def all_of(verdicts: list[Verdict]) -> Verdict:
    """Return no if any is no, else unknown if any is unknown, else yes."""
    return next((v for v in (Verdict.NO, Verdict.UNKNOWN) if v in verdicts), Verdict.YES)


def any_of(verdicts: list[Verdict]) -> Verdict:
    """Return yes if any is yes, else unknown if any is unknown, else no."""
    return next((v for v in (Verdict.YES, Verdict.UNKNOWN) if v in verdicts), Verdict.NO)


@dataclass(frozen=True)
class Condition:
    """One condition of a contract.

    Attributes:
        fact: the fact's name.
        operator: a key of ``OPERATORS``.
        value: what to compare with, already of the right type; for operators that compare two facts, the other's name.
        factor: for ``above_times``: how many times the other fact.
    """

    fact: str
    operator: str
    value: Value | tuple[Value, ...] | None = None
    factor: float = 1.0

    @property
    def names(self) -> tuple[str, ...]:
        """The facts that the condition looks at."""
        return (self.fact, str(self.value)) if OPERATORS[self.operator].second_fact else (self.fact,)

    def __str__(self) -> str:
        words = OPERATORS[self.operator].words
        shown = ""
        if self.value is not None and self.value != ():
            shown = show(self.value) if not isinstance(self.value, tuple) else ", ".join(show(v) for v in self.value)
        return f"{self.fact} {words.format(shown)}" if "{}" in words else f"{self.fact} {words} {shown}".rstrip()


@dataclass(frozen=True)
class Outcome:
    """A verdict with the facts it stands on.

    Attributes:
        missing: facts that are unknown and were needed.
        reasons: why a fact that is known could not be judged.
    """

    verdict: Verdict
    missing: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()


def check(condition: Condition, facts: Facts) -> Outcome:
    """Judge one condition; each of several values standing side by side must meet it."""
    missing = tuple(name for name in condition.names if name not in facts)
    if missing:
        return Outcome(Verdict.UNKNOWN, missing)
    operator = OPERATORS[condition.operator]
    second: Value | EachOf | tuple[Value, ...] | None = condition.value
    if operator.second_fact:
        second = facts[str(condition.value)].value
    verdicts = [
        operator.judge(one, other, condition) for one in _each(facts[condition.fact].value) for other in _each(second)
    ]
    verdict = all_of(verdicts)
    if verdict is Verdict.UNKNOWN:
        observed = show(facts[condition.fact].value)
        return Outcome(verdict, (), (f"{condition.fact} {observed!r} cannot be compared",))
    return Outcome(verdict)


def check_all(conditions: tuple[Condition, ...], facts: Facts) -> Outcome:
    """Judge conditions that must all hold; the missing facts are those that keep it from being decided."""
    outcomes = [check(condition, facts) for condition in conditions]
    verdict = all_of([outcome.verdict for outcome in outcomes])
    open_ones = [outcome for outcome in outcomes if outcome.verdict is Verdict.UNKNOWN]
    return _with_open(verdict, open_ones)


def check_any(groups: tuple[tuple[Condition, ...], ...], facts: Facts) -> Outcome:
    """Judge groups of which one must hold."""
    outcomes = [check_all(group, facts) for group in groups]
    verdict = any_of([outcome.verdict for outcome in outcomes])
    return _with_open(verdict, [outcome for outcome in outcomes if outcome.verdict is Verdict.UNKNOWN])


def _with_open(verdict: Verdict, open_ones: list[Outcome]) -> Outcome:
    if verdict is not Verdict.UNKNOWN:
        return Outcome(verdict)
    missing = dict.fromkeys(name for outcome in open_ones for name in outcome.missing)
    return Outcome(verdict, tuple(missing), tuple(reason for outcome in open_ones for reason in outcome.reasons))


def _each(value: object) -> tuple[object, ...]:
    return value.values if isinstance(value, EachOf) else (value,)


def _answer(holds: bool | None) -> Verdict:
    return Verdict.UNKNOWN if holds is None else Verdict.YES if holds else Verdict.NO


Judge = Callable[[object, object, Condition], Verdict]


@dataclass(frozen=True)
class Operator:
    """How a condition is judged.

    Attributes:
        value: what a contract must give: "one", "list", "pair", "none", "spec", "fact" or "fact-factor".
        words: how it reads after the fact's name.
    """

    judge: Judge
    value: str
    words: str

    @property
    def second_fact(self) -> bool:
        """Whether the value names a second fact."""
        return self.value.startswith("fact")


def _order(one: object, other: object) -> int | None:
    """Compare numbers, or versions by their public part; None when they cannot be compared."""
    if isinstance(one, bool) or isinstance(other, bool):
        return None
    if isinstance(one, int | float) and isinstance(other, int | float):
        return (one > other) - (one < other)
    try:
        first, second = Version(Version(str(one)).public), Version(Version(str(other)).public)
    except InvalidVersion:
        return None
    return (first > second) - (first < second)


def _same(one: object, other: object) -> bool:
    if isinstance(one, int | float) and isinstance(other, int | float):
        return float(one) == float(other)
    return one == other


def _compare(test: Callable[[int], bool]) -> Judge:
    def judge(one: object, other: object, _: Condition) -> Verdict:
        if one == ABSENT:
            return Verdict.NO
        order = _order(one, other)
        return _answer(None if order is None else test(order))

    return judge


def _between(one: object, pair: object, _: Condition) -> Verdict:
    assert isinstance(pair, tuple)
    if one == ABSENT:
        return Verdict.NO
    low, high = _order(one, pair[0]), _order(one, pair[1])
    return _answer(None if low is None or high is None else low >= 0 and high <= 0)


_COMPARATOR = re.compile(r"\s*(>=|<=|==|!=|~=|>|<)\s*([\w.+!*-]+)\s*")


def parse_spec(text: str) -> list[tuple[str, str]] | None:
    """Return the comparators of a version range such as ``>=0.5.3,<0.6``, or None when it is none."""
    pairs = []
    for part in text.split(","):
        found = _COMPARATOR.fullmatch(part)
        if not found or not _valid(found[2].removesuffix(".*")):
            return None
        pairs.append((found[1], found[2]))
    return pairs


def _valid(text: str) -> bool:
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def _in_range(version: object, spec: object) -> bool | None:
    """Whether a version lies in a range; pre-releases stand in plain order, so 3.0.0b1 is below 3.0.0."""
    pairs = parse_spec(str(spec))
    if pairs is None:
        return None
    for sign, text in pairs:
        if text.endswith(".*"):
            inside = str(version).lstrip("vV").startswith(text[:-1]) or str(version) == text[:-2]
            if inside is not (sign == "=="):
                return False
            continue
        order = _order(version, text)
        if order is None:
            return None
        if sign == "~=":
            prefix = text.rpartition(".")[0] + "."
            if order < 0 or not str(version).startswith(prefix):
                return False
        elif not {
            ">=": order >= 0,
            "<=": order <= 0,
            "==": order == 0,
            "!=": order != 0,
            ">": order > 0,
            "<": order < 0,
        }[sign]:
            return False
    return True


def _version(one: object, spec: object, _: Condition) -> Verdict:
    return Verdict.NO if one == ABSENT else _answer(_in_range(one, spec))


def _violates(one: object, spec: object, _: Condition) -> Verdict:
    if ABSENT in (one, spec) or spec == "any":
        return Verdict.NO
    inside = _in_range(one, spec)
    return _answer(None if inside is None else not inside)


def _has(test: Callable[[str, str], bool], wanted: bool = True) -> Judge:
    def judge(one: object, other: object, _: Condition) -> Verdict:
        items = one if isinstance(one, tuple) else (str(one),)
        options = other if isinstance(other, tuple) else (str(other),)
        return _answer(any(test(str(item), str(option)) for item in items for option in options) is wanted)

    return judge


def _like(one: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(one.lower(), pattern.lower())


def _above_times(one: object, other: object, condition: Condition) -> Verdict:
    if isinstance(one, int | float) and isinstance(other, int | float):
        return _answer(one > other * condition.factor)
    return Verdict.UNKNOWN


_ARCH = re.compile(r"(?:sm_|compute_|sm|compute)(\d{1,2})(\d)([af]?)")


def _kernels(archs: object, capability: object, exact: bool) -> bool | None:
    """Whether binaries for these architectures run on a device.

    ``sm_90a`` runs on 9.0 only, ``sm_100f`` on its family from that minor on, ``sm_80`` on every 8.x. FlashAttention 3
    (``exact``) picks tiles by device, so a kernel built for 8.0 fails on 8.6 and 8.9 although the hardware accepts it.
    """
    device = re.fullmatch(r"(\d+)\.(\d)", str(capability))
    if not isinstance(archs, tuple) or not device:
        return None
    major, minor = int(device[1]), int(device[2])
    for arch in archs:
        found = _ARCH.fullmatch(arch)
        if not found or arch.startswith("compute"):
            continue
        same_minor = int(found[2]) == minor
        older = int(found[2]) <= minor and not exact and found[3] != "a"
        if int(found[1]) == major and (same_minor or older):
            return True
    return False


def _ptx(archs: object, capability: object) -> bool | None:
    device = re.fullmatch(r"(\d+)\.(\d)", str(capability))
    if not isinstance(archs, tuple) or not device:
        return None
    numbers = [(int(f[1]), int(f[2])) for arch in archs if (f := _ARCH.fullmatch(arch)) and not f[3]]
    return any(number <= (int(device[1]), int(device[2])) for number in numbers)


def _kernel(exact: bool, wanted: bool) -> Judge:
    def judge(one: object, other: object, _: Condition) -> Verdict:
        runs = _kernels(one, other, exact)
        return _answer(None if runs is None else runs is wanted)

    return judge


def _ptx_judge(wanted: bool) -> Judge:
    def judge(one: object, other: object, _: Condition) -> Verdict:
        runs = _ptx(one, other)
        return _answer(None if runs is None else runs is wanted)

    return judge


def _membership(wanted: bool) -> Judge:
    def judge(one: object, other: object, _: Condition) -> Verdict:
        options = other if isinstance(other, tuple) else (other,)
        return _answer(any(_same(one, option) for option in options) is wanted)

    return judge


OPERATORS: dict[str, Operator] = {
    "is": Operator(_membership(True), "one", "is"),
    "is_not": Operator(_membership(False), "one", "is not"),
    "in": Operator(_membership(True), "list", "is one of"),
    "not_in": Operator(_membership(False), "list", "is none of"),
    "at_least": Operator(_compare(lambda order: order >= 0), "one", "is at least"),
    "at_most": Operator(_compare(lambda order: order <= 0), "one", "is at most"),
    "above": Operator(_compare(lambda order: order > 0), "one", "is above"),
    "below": Operator(_compare(lambda order: order < 0), "one", "is below"),
    "between": Operator(_between, "pair", "is between"),
    "version": Operator(_version, "spec", "is in the range"),
    "present": Operator(lambda one, _o, _c: _answer(one != ABSENT and one != ()), "none", "is there"),
    "absent": Operator(lambda one, _o, _c: _answer(one == ABSENT or one == ()), "none", "is not there"),
    "has": Operator(_has(lambda item, option: item == option), "one", "has"),
    "has_not": Operator(_has(lambda item, option: item == option, wanted=False), "one", "has no"),
    "has_any": Operator(_has(lambda item, option: item == option), "list", "has one of"),
    "has_none": Operator(_has(lambda item, option: item == option, wanted=False), "list", "has none of"),
    "like": Operator(_has(_like), "list", "is like"),
    "not_like": Operator(_has(_like, wanted=False), "list", "is not like"),
    "same_as": Operator(lambda one, other, _c: _answer(_same(one, other)), "fact", "is the same as"),
    "violates": Operator(_violates, "fact", "is outside of"),
    "above_times": Operator(_above_times, "fact-factor", "is too far above"),
    "kernel_for": Operator(_kernel(exact=False, wanted=True), "fact", "hold a kernel for"),
    "no_kernel_for": Operator(_kernel(exact=False, wanted=False), "fact", "hold no kernel for"),
    "fa3_kernel_for": Operator(_kernel(exact=True, wanted=True), "fact", "hold a FlashAttention 3 kernel for"),
    "no_fa3_kernel_for": Operator(_kernel(exact=True, wanted=False), "fact", "hold no FlashAttention 3 kernel for"),
    "ptx_for": Operator(_ptx_judge(True), "fact", "can be compiled for"),
    "no_ptx_for": Operator(_ptx_judge(False), "fact", "cannot be compiled for"),
}
