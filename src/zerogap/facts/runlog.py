"""What a run's log says: commands after ``EXEC:``, SGLang's and vLLM's resolved arguments, known error lines."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

from zerogap.facts import flags as flag_reader
from zerogap.facts.fact import Fact, Facts
from zerogap.facts.pairs import call_pairs, flatten, unquoted

LIMIT = 64 * 2**20  # bytes of a log that are read; arguments stand near its beginning
_LINE_LIMIT = 2**20
_CONTINUATION_LIMIT = 3000

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PREFIX = re.compile(r"^\([^()\n]{1,200}\) ")
_EXEC = re.compile(r"^(?:\[[^\]\n]{1,80}\] )?(?:\S{1,80}:\d+ - )?EXEC: (.*)$")
_NEW_ENTRY = re.compile(r"^(?:\[\d{4}-|\(\w|EXEC: |\d{4}-\d\d-\d\d|[A-Z]{4,8} \d|Traceback )")
_SERVER_ARGS = re.compile(r"\bserver_args=ServerArgs\(")
_VLLM_ARGS = re.compile(r"\bnon-default args: (\{.*)$")
_VLLM_ENGINE = re.compile(r"\bInitializing a V\d LLM engine \(v?([^)\s]{1,80})\) with config: (.*)$")
_MARKER = re.compile(
    r"server_args=ServerArgs\(|non-default args: \{|Initializing a V\d LLM engine \("
    r"|^(?:\([^()\n]{1,200}\) )?(?:\[[^\]\n]{1,80}\] )?(?:\S{1,80}:\d+ - )?EXEC: ",
    re.MULTILINE,
)


@dataclass
class RunLog:
    """What a log shows.

    Attributes:
        commands: line number and text of each command after ``EXEC:``.
        engines: program and facts of each engine that printed its arguments.
    """

    commands: list[tuple[int, str]] = field(default_factory=list)
    engines: list[tuple[str, Facts]] = field(default_factory=list)


def is_log(text: str) -> bool:
    """Whether a text holds a line that only logs hold."""
    return _MARKER.search(text) is not None


def _lines(text: str) -> list[str]:
    return [_PREFIX.sub("", _ANSI.sub("", line)) if len(line) <= _LINE_LIMIT else "" for line in text.split("\n")]


def read(text: str, name: str) -> RunLog:
    """Read a log.

    Args:
        text: the log.
        name: what to call it in evidence.
    """
    log = RunLog()
    lines = _lines(text.replace("\0", ""))
    for number, line in enumerate(lines, start=1):
        where = f"{name} line {number}"
        if found := _EXEC.match(line):
            log.commands.append((number, _whole_command(found[1], lines, number)))
        elif found := _SERVER_ARGS.search(line):
            arguments = flag_reader.from_mapping(call_pairs(line, found.end()), where)
            log.engines.append(("sglang", flag_reader.facts_of(arguments, "sglang", resolved=True)))
        elif found := _VLLM_ARGS.search(line):
            arguments = flag_reader.from_mapping(flatten(found[1]), where)
            log.engines.append(("vllm", flag_reader.facts_of(arguments, "vllm", resolved=True)))
        elif found := _VLLM_ENGINE.search(line):
            log.engines.append(("vllm", _vllm_engine(found[1], found[2], where)))
    return log


def _whole_command(first: str, lines: list[str], number: int) -> str:
    """A printed command may run over several lines, until the next log entry."""
    parts = [first]
    for line in lines[number : number + _CONTINUATION_LIMIT]:
        if not line.strip() or _NEW_ENTRY.match(line):
            break
        parts.append(line)
    return " ".join(part.rstrip("\\") for part in parts)


def _vllm_engine(version: str, text: str, where: str) -> Facts:
    pairs = call_pairs(text + ")")
    settings: dict[str, str] = {}
    for key, value in pairs.items():
        if value.startswith("{"):
            settings.update({f"{key}.{inner}": item for inner, item in flatten(value).items()})
        else:
            settings[key] = unquoted(value)
    facts = flag_reader.facts_of(flag_reader.from_mapping(settings, where), "vllm", defaults=False, resolved=True)
    known = {"software.vllm": Fact(version, where)} if re.match(r"\d", version) else {}
    return Facts(known).over(facts)


@cache
def _error_table() -> tuple[tuple[str, re.Pattern[str]], ...]:
    rows = tomllib.loads((files("zerogap.facts") / "errors.toml").read_text(encoding="utf-8"))["error"]
    return tuple((row["code"], re.compile(row["line"])) for row in rows)


def error_facts(text: str, name: str) -> Facts:
    """Return which known error lines a log holds, by code."""
    found: dict[str, int] = {}
    for number, line in enumerate(_lines(text.replace("\0", "")), start=1):
        for code, pattern in _error_table():
            if code not in found and pattern.search(line):
                found[code] = number
    source = ", ".join(f"{name} line {number}" for number in found.values()) or name
    return Facts({"log.errors": Fact(tuple(found), source)})
