"""From the words of a command to facts: the last of duplicate flags wins, hidden values are unknown."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from zerogap.errors import UsageError
from zerogap.facts.fact import Fact, Facts, Value, convert, describe, show
from zerogap.facts.pairs import flatten
from zerogap.facts.shellwords import HIDDEN, Word

_ARGUMENT_NAMES = re.compile(r"ARGS|EXTRA|FLAGS|OPT|PARAM|OVERRIDE|CMD|@|\*", re.IGNORECASE)
_BOOLEAN = frozenset(("true", "false", "1", "0", "yes", "no"))


@dataclass(frozen=True)
class Flag:
    """One flag as it stands in a command.

    Attributes:
        name: without leading dashes, "_" as "-".
        value: its value; None for a bare flag; ``HIDDEN`` in it for unknown pieces.
        where: such as ``run.sh line 12``.
        order: position among the words, to see what comes later.
        hidden: what hides the value.
    """

    name: str
    value: str | None
    where: str
    order: int
    hidden: tuple[str, ...] = ()


@dataclass(frozen=True)
class Arguments:
    """The flags of one command, and the places where unknown words may add more."""

    flags: tuple[Flag, ...]
    opaque: tuple[Flag, ...] = ()

    def last(self, names: Iterable[str]) -> list[Flag]:
        """Return the flags of these names in order of appearance."""
        wanted = frozenset(names)
        return [flag for flag in self.flags if flag.name in wanted]


@cache
def table() -> dict[str, Any]:
    """Return ``flags.toml``."""
    return tomllib.loads((files("zerogap.facts") / "flags.toml").read_text(encoding="utf-8"))


def plain(name: str) -> str:
    """Return a flag's name as it is compared: ``--tp_size`` is ``tp-size``."""
    return name.lstrip("-+~").replace("_", "-").lower()


@cache
def _bare_flags(program: str) -> frozenset[str]:
    bare = set(table()["switches"])
    for row in rows(program):
        bare |= {*row.get("off", ()), *(row.get("flags", ()) if _is_switch(row) else ())}
    return frozenset(bare)


def _is_switch(row: dict[str, Any]) -> bool:
    return describe(row["fact"]).type == "flag" or isinstance(row.get("value"), str)


@cache
def rows(program: str) -> tuple[dict[str, Any], ...]:
    """Return the flag rows of a program; Miles and slime have SGLang's behind ``--sglang-``, too."""
    if program not in ("miles", "slime"):
        return tuple(table().get(program, ()))
    own = table()["miles"]
    behind = []
    for row in table()["sglang"]:
        renamed = {key: [f"sglang-{name}" for name in row[key]] for key in ("flags", "off") if key in row}
        if row["fact"] not in ("engine.model", "engine.tp"):
            behind.append({**row, **renamed})
    return (*own, *behind)


def parse(words: Sequence[Word], program: str, name: str) -> Arguments:
    """Return the flags among the words of a command.

    Args:
        words: the words after the program.
        program: whose flags they are (``miles``, ``sglang`` …), which tells the bare ones.
        name: the script's name, for evidence.
    """
    bare = _bare_flags(program)
    several = frozenset(table()["several"])
    flags: list[Flag] = []
    opaque: list[Flag] = []
    index = 0
    # Whether a word here may be one more value of the flag before it, or a positional model.
    more_values = program in ("vllm", "sglang")
    while index < len(words):
        word = words[index]
        where = f"{name} line {word.line}" if word.line else name
        index += 1
        text = word.text
        if text == HIDDEN and (not more_values or _named_like_flags(word)):
            opaque.append(Flag("", None, where, index, word.hidden))
            continue
        hydra = not text.startswith("-") and re.match(r"[+~]{0,2}[A-Za-z_][\w.]*(?=[=])", text)
        if not hydra and not re.match(r"--?[A-Za-z]", text):
            continue
        head, equals, value = text.partition("=")
        if HIDDEN in head:
            opaque.append(Flag("", None, where, index, word.hidden))
            continue
        taken: str | None = value if equals else None
        hidden = word.hidden if equals else ()
        key = plain(head)
        if not equals and index < len(words):
            following = words[index]
            if key in bare:
                takes = following.text.lower() in _BOOLEAN
            else:
                takes = not re.match(r"--?[A-Za-z]", following.text) and not _may_be_flags(following)
            if takes:
                taken, hidden = following.text, following.hidden
                index += 1
        more_values = key in several
        flags.extend(_nested(Flag(key, taken, where, index, hidden)))
    return Arguments(tuple(flags), tuple(opaque))


def _named_like_flags(word: Word) -> bool:
    return any(
        "[@]" in name or "[*]" in name or "the array" in name or _ARGUMENT_NAMES.search(name) for name in word.hidden
    )


def _may_be_flags(word: Word) -> bool:
    """Whether a word behind a flag may stand for flags rather than for its value."""
    return word.many and word.text == HIDDEN and _named_like_flags(word)


def _nested(flag: Flag) -> list[Flag]:
    """``--compilation-config '{"pass_config": {…}}'`` also stands for its dotted inner flags."""
    if not flag.value or not flag.value.lstrip().startswith("{"):
        return [flag]
    inner = flatten(flag.value)
    return [flag, *(Flag(f"{flag.name}.{plain(key)}", value, flag.where, flag.order) for key, value in inner.items())]


def from_mapping(values: dict[str, str], where: str) -> Arguments:
    """Return settings that are read as pairs (YAML, ``ServerArgs(…)``, JSON) as if they were flags."""
    return Arguments(tuple(Flag(plain(key), value, where, index) for index, (key, value) in enumerate(values.items())))


def facts_of(arguments: Arguments, program: str, *, defaults: bool = True, resolved: bool = False) -> Facts:
    """Return the facts that a command's flags tell.

    Args:
        arguments: the flags.
        program: whose flags they are.
        defaults: whether what is not set has the program's default (false for a set of overrides).
        resolved: the values are what a program printed as resolved, so "None" is its unset.
    """
    known: dict[str, Fact] = {}
    unknown: dict[str, str] = {}
    for row in rows(program):
        name = row["fact"]
        found = arguments.last((*row.get("flags", ()), *row.get("off", ())))
        if resolved and found and str(found[-1].value) in ("None", "null", ""):
            found = []
        if found:
            _take(row, found, arguments, known, unknown)
        elif name in known or name in unknown:
            continue
        elif arguments.opaque:
            unknown[name] = f"it may be set inside {_shown(arguments.opaque[0])} ({arguments.opaque[0].where})"
        elif defaults and "default" in row:
            known[name] = Fact(convert(name, row["default"], "flags.toml"), f"not set; {program}'s default")
    return Facts(known, unknown)


def _take(
    row: dict[str, Any], found: list[Flag], arguments: Arguments, known: dict[str, Fact], unknown: dict[str, str]
) -> None:
    name, last = row["fact"], found[-1]
    known.pop(name, None)
    later = next((opaque for opaque in arguments.opaque if opaque.order > last.order), None)
    if later is not None:
        unknown[name] = f"{last.where} sets it, but {_shown(later)} ({later.where}) comes later and may change it"
        return
    if last.value is not None and HIDDEN in last.value:
        unknown[name] = f"{last.where}: --{last.name} is {_shown(last)}, which only the run tells"
        return
    try:
        value = _value(row, last)
    except UsageError as error:
        unknown[name] = str(error)
        return
    if value is None:
        unknown[name] = f"{last.where}: --{last.name} has no value"
        return
    unknown.pop(name, None)
    others = [flag for flag in found[:-1] if flag.value != last.value or flag.name != last.name]
    note = ""
    if others:
        earlier = ", ".join(
            f"{flag.value if flag.value is not None else flag.name} ({flag.where})" for flag in others[:4]
        )
        note = f"; given {len(found)} times, the last wins over {earlier.replace(HIDDEN, '…')}"
    known[name] = Fact(value, f"{last.where}: --{last.name}{'' if last.value is None else ' ' + last.value[:80]}{note}")


def _value(row: dict[str, Any], flag: Flag) -> Value | None:
    name = row["fact"]
    if flag.name in row.get("off", ()):
        return flag.value is not None and convert(name, flag.value, flag.where) is False
    if "value" in row:
        stated = flag.value is None or flag.value.lower() not in ("false", "0", "no")
        if not stated:
            return convert(name, row["default"], flag.where) if "default" in row else None
        return convert(name, row["value"], flag.where)
    if flag.value is None:
        return True if describe(name).type == "flag" else None
    return convert(name, _SPELLINGS.get(name, {}).get(flag.value.lower(), flag.value), flag.where)


# One name for one thing: engines and trainers spell types and backends in several ways.
_SPELLINGS: dict[str, dict[str, str]] = {
    "engine.attention_backend": {"fa": "fa", "none": "unset", "flash_attn": "FLASH_ATTN"},
    "engine.dtype": {"bf16": "bfloat16", "half": "float16", "fp16": "float16", "float": "float32", "fp32": "float32"},
    "trainer.backend": {"fsdp2": "fsdp"},
}


def _shown(flag: Flag) -> str:
    return show(tuple(dict.fromkeys(flag.hidden))) if flag.hidden else "something hidden"


def implied(facts: Facts, program: str) -> Facts:
    """Return the facts with what one setting makes of another."""
    known = dict(facts)
    for rule in table()["implies"]:
        if program not in rule["programs"]:
            continue
        holds = all(name in known and known[name].value == value for name, value in rule.get("when", {}).items())
        holds = holds and all(
            name in known and known[name].value != value for name, value in rule.get("when_not", {}).items()
        )
        if holds:
            for name, value in rule["set"].items():
                if name not in known or known[name].value != value:
                    known[name] = Fact(value, rule["source"])
    return Facts(known, facts.unknown)
