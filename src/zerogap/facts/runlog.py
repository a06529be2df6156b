"""What a run's log says: commands after ``EXEC:``, SGLang's and vLLM's resolved arguments, known error lines."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path

from zerogap.facts import flags as flag_reader
from zerogap.facts.fact import Fact, Facts
from zerogap.facts.pairs import call_pairs, flatten, unquoted

LIMIT = 64 * 2**20  # bytes of a log that are read: arguments stand near its beginning, errors near its end
TAIL = 16 * 2**20
_LINE_LIMIT = 2**20
_CONTINUATION_LIMIT = 256 * 1024  # characters of a command after its first line
_ENTRY_LIMIT = 2000

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PREFIX = re.compile(r"^\([^()\n]{1,200}\) ")
_EXEC = re.compile(r"^(?:\[[^\]\n]{1,80}\] )?(?:\S{1,80}:\d+ - )?EXEC: (.*)$")
_NEW_ENTRY = re.compile(r"^(?:\[\d{4}-|\(\w|EXEC: |\d{4}-\d\d-\d\d|[A-Z]{4,8} \d|Traceback )")
_SERVER_ARGS = re.compile(r"\bserver_args=ServerArgs\(")
_VLLM_ARGS = re.compile(r"\bnon-default args: (\{.*)$")
_VLLM_ENGINE = re.compile(r"\bInitializing a V\d LLM engine \(v?([^)\s]{1,80})\) with config: (.*)$")
_MARKER = re.compile(r"server_args=ServerArgs\(|non-default args: \{|Initializing a V\d LLM engine \(|EXEC: ")


@dataclass
class RunLog:
    """What a log shows.

    Attributes:
        commands: line number and text of each command after ``EXEC:``.
        engines: program and facts of each engine that printed its arguments.
    """

    commands: list[tuple[int, str]] = field(default_factory=list)
    engines: list[tuple[str, Facts]] = field(default_factory=list)


def load(path: Path) -> str:
    """Return a log's text: all of it, or the beginning and the end of one that is larger than ``LIMIT``."""
    with open(path, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        data = stream.read(LIMIT if size <= LIMIT else LIMIT - TAIL)
        if size > LIMIT:
            stream.seek(size - TAIL)
            data += b"\n" + stream.read(TAIL)
    return data.decode("utf-8", "replace")


def _plain(text: str) -> str:
    text = text.replace("\0", "") if "\0" in text else text
    return _ANSI.sub("", text) if "\x1b" in text else text


def _marked_lines(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield number, end and text of each line that holds a marker; the text without Ray's prefix."""
    number, counted, past = 1, 0, 0
    for found in _MARKER.finditer(text):
        if found.start() < past:
            continue  # a second marker of one line
        begin = text.rfind("\n", 0, found.start()) + 1
        end = text.find("\n", found.end())
        past = len(text) if end < 0 else end
        number, counted = number + text.count("\n", counted, begin), begin
        if past - begin <= _LINE_LIMIT:
            yield number, past, _PREFIX.sub("", text[begin:past])


def is_log(text: str) -> bool:
    """Whether a text holds a line that only logs hold."""
    lines = _marked_lines(_plain(text))
    return any("EXEC: " not in line or _EXEC.match(line) for _, _, line in lines)


def read(text: str, name: str) -> RunLog:
    """Read a log.

    Args:
        text: the log.
        name: what to call it in evidence.
    """
    log = RunLog()
    text = _plain(text)
    for number, end, line in _marked_lines(text):
        where = f"{name} line {number}"
        if found := _EXEC.match(line):
            log.commands.append((number, _whole_command(found[1], text, end + 1)))
        elif found := _SERVER_ARGS.search(line):
            arguments = flag_reader.from_mapping(call_pairs(line, found.end()), where)
            log.engines.append(("sglang", flag_reader.facts_of(arguments, "sglang", resolved=True)))
        elif found := _VLLM_ARGS.search(line):
            arguments = flag_reader.from_mapping(flatten(found[1]), where)
            log.engines.append(("vllm", flag_reader.facts_of(arguments, "vllm", resolved=True)))
        elif found := _VLLM_ENGINE.search(line):
            log.engines.append(("vllm", _vllm_engine(found[1], found[2], where)))
        if len(log.commands) + len(log.engines) >= _ENTRY_LIMIT:
            break
    return log


def _whole_command(first: str, text: str, start: int) -> str:
    """A printed command may run over several lines, until the next log entry."""
    parts = [first]
    for line in text[start : start + _CONTINUATION_LIMIT].split("\n"):
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
    text = _plain(text)
    hits = {code: hit for code, pattern in _error_table() if (hit := pattern.search(text))}
    found = {code: text.count("\n", 0, hit.start()) + 1 for code, hit in hits.items()}
    source = ", ".join(f"{name} line {number}" for number in found.values()) or name
    return Facts({"log.errors": Fact(tuple(found), source)})
