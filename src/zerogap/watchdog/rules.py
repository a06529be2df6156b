"""Log rules as data: what a line means, which framework prints it, and what to do about it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerogap.errors import UsageError, nearest

FOLDER = Path(__file__).parent / "rules"
NOT_RULES = ("roles.toml", "phases.toml", "causes.toml")

KINDS = {
    "cause": "names why a run cannot go on, once an exit, a failed probe or missing progress shows that it does not",
    "symptom": "a consequence of something earlier; never hides a cause",
    "phase": "the run enters `phase`",
    "timer": "a named span begins or ends (groups `name`, `edge`)",
    "progress": "work went on, on the clock `clock`",
    "metric": "a line of numbers of a finished step (groups `n`, `metrics`)",
    "pair": "opens or closes a state that must be left again (sleep and wake)",
    "wait": "someone waits for someone (`waits`, or groups `joined` and `missing`)",
    "exit": "the line says that a process ended (groups `who`, `code`)",
    "activity": "a sample of the GPUs (groups `gpu`, or `sm` and `mem`)",
    "notice": "worth telling, never a reason to stop",
    "info": "a fact of the run: an address, a version, the launch line",
}
CLOCKS = ("startup", "token", "request", "step", "sync", "checkpoint")
WORK = frozenset({"token", "request", "step", "sync"})  # clocks that only a working run moves
VERDICTS = ("failed-to-start", "died", "unresponsive", "stalled", "lost-peer", "bad-metric", "preempted")


@dataclass(frozen=True)
class Rule:
    """One log rule; see docs/watch.md for the fields as a user writes them."""

    id: str
    kind: str
    literals: tuple[str, ...]  # one of them stands in every line that `pattern` matches
    pattern: re.Pattern[str]
    framework: str
    source: str = ""
    since: str = ""  # first version of the framework that prints it, where known
    summary: str = "{line}"
    hint: str = ""
    side: str = ""  # whose line it is: engine, trainer, orchestrator, environment
    phase: str = ""
    clock: str = ""
    busy: str = ""  # the name of the long silent work that the line announces
    opens: str = ""
    closes: str = ""
    verdict: str = ""  # where the cause itself fixes the verdict
    weak: bool = False  # names the failure but not its reason: any other cause goes first
    generic: bool = False  # any exception at all: even later than `weak`
    fatal: bool = False  # whoever prints it is finished for good, so silence after it needs no long proof
    retry: bool = False  # the symptom of a request that is repeated
    starting: bool = False  # a symptom that is normal while an engine starts
    check: bool = False  # `zerogap check` can say more
    identical: int = 1  # how many equal readings it takes
    key: tuple[str, ...] | None = None  # the groups that make two readings equal; all of them by default
    waits: tuple[tuple[str, str], ...] = ()
    examples: tuple[str, ...] = ()

    @property
    def rank(self) -> int:
        """How little the rule explains: 0 a reason, 1 a failure without its reason, 2 any exception."""
        return 2 if self.generic else 1 if self.weak else 0


@dataclass(frozen=True)
class Role:
    """Who a process is when ``pattern`` is found in its command line."""

    name: str
    pattern: re.Pattern[str]


@dataclass(frozen=True)
class Phase:
    """One phase of a run and how long it may show no progress before its own median is known."""

    name: str
    names: tuple[str, ...]
    budget_s: float
    engine: bool


@dataclass(frozen=True)
class Judged:
    """A cause that the judge finds without a line that names it."""

    id: str
    summary: str
    hint: str


@dataclass(frozen=True)
class RuleBook:
    """All rules in force, the literals that point to them, roles and phases."""

    rules: tuple[Rule, ...]
    roles: tuple[Role, ...]
    phases: tuple[Phase, ...]
    judged: Mapping[str, Judged]
    by_literal: Mapping[str, tuple[Rule, ...]] = field(repr=False)

    def cause(self, name: str) -> Rule | None:
        """Return the first rule with this id, or None."""
        return next((rule for rule in self.rules if rule.id == name), None)

    def role(self, command_line: str) -> str:
        """Return the role of a process with this command line, ``"other"`` if no pattern is found in it."""
        return next((role.name for role in self.roles if role.pattern.search(command_line)), "other")


_FIELDS = {name for name in Rule.__dataclass_fields__ if name not in ("framework",)}
_LISTS = {"literals", "examples", "key"}


def load_rules(extra: Iterable[Path] = (), folder: Path = FOLDER) -> RuleBook:
    """Read the rules of ``folder`` and of the user's own files.

    Raises:
        UsageError: naming the file, the rule and what is wrong with it.
    """
    own: list[Rule] = []
    for path in extra:
        own += _read(path)
    shipped: list[Rule] = []
    for path in sorted(folder.glob("*.toml")):
        if path.name not in NOT_RULES:
            shipped += _read(path)
    rules = tuple(own + shipped)  # a user's rule is asked before ours
    by_literal: dict[str, list[Rule]] = {}
    for rule in rules:
        for literal in rule.literals:
            by_literal.setdefault(literal, []).append(rule)
    roles = tuple(Role(entry["role"], re.compile(entry["program"])) for entry in _toml(folder / "roles.toml")["role"])
    phases = tuple(
        Phase(entry["name"], tuple(entry["names"]), float(entry["budget_s"]), bool(entry["engine"]))
        for entry in _toml(folder / "phases.toml")["phase"]
    )
    judged = {entry["id"]: Judged(**entry) for entry in _toml(folder / "causes.toml")["cause"]}
    return RuleBook(rules, roles, phases, judged, {literal: tuple(found) for literal, found in by_literal.items()})


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the rules file {path}: {error.strerror}; give the path of a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not valid TOML ({error}); see docs/watch.md for the form of a rule") from None


def _read(path: Path) -> list[Rule]:
    table = _toml(path)
    entries = table.get("rule", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(f"{path}: `rule` must be a list of tables; write each rule under [[rule]]")
    unknown = set(table) - {"rule", "framework"}
    if unknown or not entries:
        what = f"unknown key {sorted(unknown)[0]!r}" if unknown else "no rule in it"
        raise UsageError(f"{path}: {what}; write each rule under [[rule]]")
    return [_rule(path, number, entry, str(table.get("framework", "user"))) for number, entry in enumerate(entries, 1)]


def _rule(path: Path, number: int, entry: dict[str, Any], framework: str) -> Rule:
    where = f"{path}: rule {number} ({entry.get('id', 'without id')})"

    def refuse(what: str) -> UsageError:
        return UsageError(f"{where}: {what}")

    for name in entry:
        if name not in _FIELDS:
            raise refuse(f"unknown key {name!r}{nearest(name, _FIELDS)}")
    for name in ("id", "kind", "literals", "pattern"):
        if not entry.get(name):
            raise refuse(f"{name!r} is missing; a rule needs id, kind, literals and pattern")
    for name, value in entry.items():
        expected: type | tuple[type, ...]
        if name in _LISTS or name == "waits":
            expected = list
        elif name in ("weak", "generic", "fatal", "retry", "starting", "check"):
            expected = bool
        else:
            expected = int if name == "identical" else str
        if not isinstance(value, expected):
            kind = getattr(expected, "__name__", expected)
            raise refuse(f"{name!r} must be of type {kind}, not {type(value).__name__}")
    if entry["kind"] not in KINDS:
        raise refuse(f"unknown kind {entry['kind']!r}{nearest(entry['kind'], KINDS)} Kinds: {', '.join(KINDS)}")
    if entry.get("clock", "") not in ("", *CLOCKS):
        raise refuse(f"unknown clock {entry['clock']!r}; one of {', '.join(CLOCKS)}")
    if entry.get("verdict", "") not in ("", *VERDICTS):
        raise refuse(f"unknown verdict {entry['verdict']!r}{nearest(entry['verdict'], VERDICTS)}")
    if not all(isinstance(literal, str) and len(literal) >= 4 for literal in entry["literals"]):
        raise refuse("each of 'literals' must be a text of at least 4 characters, or it would stop at every line")
    if any("\n" in literal[:-1] for literal in entry["literals"]):
        raise refuse("a literal cannot span lines (a newline may only end it)")
    try:
        pattern = re.compile(entry["pattern"])
    except re.error as error:
        raise refuse(f"'pattern' is not a regular expression: {error}") from None
    waits = entry.get("waits", [])
    if not all(isinstance(edge, list) and len(edge) == 2 for edge in waits):
        raise refuse("'waits' must be a list of [who, whom] pairs")
    if entry["kind"] in ("progress", "metric") and not entry.get("clock"):
        raise refuse(f"a rule of kind {entry['kind']!r} needs a 'clock': one of {', '.join(CLOCKS)}")
    values = {**entry, "pattern": pattern, "waits": tuple((str(a), str(b)) for a, b in waits)}
    for name in _LISTS & set(values):
        values[name] = tuple(values[name])
    return Rule(framework=framework, **values)
