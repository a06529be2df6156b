"""Logs of any framework: step dictionaries, ``key:value`` lines, JSON lines, and the lines that explain a gap.

A line is looked at only when it holds a fragment of a known metric name or signature, which keeps a log of any size at
the speed of reading lines.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from zerogap.gap.names import hint_fragments, known_name_pattern, metric_for
from zerogap.gap.series import SeriesBuilder

_ANSI = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07")
_RAY = re.compile(r"^\s*\((?P<name>[\w.:-]+)(?: pid=(?P<pid>\d+))?(?:, ip=(?P<ip>[\d.:a-f]+))?\)\s?")
_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf(?:inity)?|NaN|Infinity|None|null)"
_PAIR = re.compile(
    r"""['"]?(?P<key>[A-Za-z][\w./@-]*(?:\s[A-Za-z][\w./@-]*){0,2})['"]?\s*[:=]\s*"""
    r"""(?:(?:np\.float\d+|tensor|array)\()?['"]?(?P<value>""" + _NUMBER + r""")(?=[\s,;|}\])'"%]|$)"""
)
_STEP = re.compile(
    r"(?P<kind>\b(?:[\w-]+-)?(?:step|rollout|perf|eval|iteration|iter))s?(?:['\"]?\s*[:=]\s*|\s+|\s*\[)"
    r"(?P<step>\d+)(?=[\s,:;|/}\])'\"-]|$)",
    re.IGNORECASE,
)
_STEP_KEYS = ("step", "global_step", "train/step", "training/global_step", "_step", "trainer/global_step",
              "rollout/step", "training_step", "rollout_id", "iteration")  # fmt: skip


@dataclass
class LogHit:
    """A line that says something about the gap: which signature, where, and what the pattern caught."""

    finding: str
    line_number: int
    line: str
    groups: tuple[str, ...]


@dataclass(frozen=True)
class _Signature:
    needle: bytes
    pattern: re.Pattern[str]
    finding: str
    fact: str
    value: str


@cache
def _signatures() -> tuple[_Signature, ...]:
    text = resources.files("zerogap.gap").joinpath("log_signatures.toml").read_text(encoding="utf-8")
    return tuple(
        _Signature(
            entry["needle"].encode(),
            re.compile(entry["pattern"]),
            entry.get("finding", ""),
            entry.get("fact", ""),
            entry.get("value", ""),
        )
        for entry in tomllib.loads(text)["signature"]
    )


@dataclass
class LogResult:
    """What a log held."""

    series: SeriesBuilder
    hits: list[LogHit] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    lines: int = 0
    metric_lines: int = 0
    near_names: set[str] = field(default_factory=set)


_HITS_LIMIT = 200


class LogParser:
    """Takes text in blocks of whole lines, so that a file and a log that still grows are read by the same code."""

    def __init__(self, source: str = "") -> None:
        self.result = LogResult(SeriesBuilder(source))
        needles = {s.needle for s in _signatures()} - {b"--"}
        self._rare = tuple(sorted(needles | {b"train.py"}))
        self._metrics = hint_fragments()

    def feed(self, block: bytes) -> None:
        """Take whole lines: look up the few that hold a fragment, leave the rest."""
        starts: set[int] = set()
        for fragment in (*self._metrics, *self._rare):
            at = block.find(fragment)
            while at >= 0:
                starts.add(block.rfind(b"\n", 0, at) + 1)
                end = block.find(b"\n", at)
                at = block.find(fragment, end) if end >= 0 else -1
        done, before = 0, self.result.lines
        for start in sorted(starts):
            before += block.count(b"\n", done, start)
            done = start
            end = block.find(b"\n", start)
            self.result.lines = before + 1
            self._line(block[start : end if end >= 0 else len(block)])
        self.result.lines = before + block.count(b"\n", done) + (not block.endswith(b"\n"))

    def _line(self, raw: bytes) -> bool:
        if b"\x1b" in raw:
            raw = _ANSI.sub(b"", raw)
        if b"\r" in raw:
            raw = raw.rstrip(b"\r").rsplit(b"\r", 1)[-1]
        raw = raw[:1_000_000]
        text = raw.decode("utf-8", "replace")
        self._explain(raw, text)
        if not known_name_pattern().search(raw):
            return False
        process = ""
        ray = _RAY.match(text)
        if ray:
            process = f"{ray['name']} {ray['pid'] or ''} {ray['ip'] or ''}".strip()
            text = text[ray.end() :]
        step, found = parse_metrics(text)
        if not found:
            return False
        if step is None and "{" not in text:
            return False  # prose that mentions a number, not a metrics line
        self.result.series.add(process, step, found)
        self.result.metric_lines += 1
        return True

    def _explain(self, raw: bytes, text: str) -> None:
        for signature in _signatures():
            if signature.needle not in raw:
                continue
            caught = signature.pattern.search(text)
            if not caught:
                continue
            if signature.finding and len(self.result.hits) < _HITS_LIMIT:
                groups = tuple(group or "" for group in caught.groups())
                self.result.hits.append(LogHit(signature.finding, self.result.lines, text[:500], groups))
            if signature.fact:
                facts = self.result.facts
                if signature.value == "count":
                    facts[signature.fact] = facts.get(signature.fact, 0) + 1
                else:
                    facts[signature.fact] = signature.value or caught.group(1)


def parse_metrics(text: str) -> tuple[int | None, dict[str, float]]:
    """Return (step, {metric name: value}) of one log line; an empty dict when it holds no known gap metric."""
    found: dict[str, float] = {}
    step: int | None = None
    brace = text.find("{")
    record = _json_object(text[brace:]) if brace >= 0 else None
    if record is not None:
        found = dict(flatten(record))
    else:
        for pair in _PAIR.finditer(text):
            found[_key(pair["key"])] = number(pair["value"])
    known = {name: value for name, value in found.items() if metric_for(name) is not None}
    if not known:
        return None, {}
    for key in _STEP_KEYS:
        if key in found and math.isfinite(found[key]):
            step = int(found[key])
            break
    head = text[:brace] if brace >= 0 else text
    stated = list(_STEP.finditer(head))
    if stated and (step is None or brace >= 0):
        step = int(stated[-1]["step"])
    for name in [*_STEP_KEYS, "epoch"]:
        found.pop(name, None)
    return step, {name: value for name, value in found.items() if "/" in name or name in known}


def _key(text: str) -> str:
    """Return a metric name for ``Mismatch KL``-like words: the last words that are known, joined by underscores."""
    if " " not in text:
        return text
    words = text.split()
    for start in range(len(words)):
        joined = "_".join(words[start:]).lower()
        if metric_for(joined) is not None:
            return joined
    return words[-1]


def _json_object(text: str) -> Mapping[str, Any] | None:
    end = text.rfind("}")
    if end < 0:
        return None
    try:
        value = json.loads(text[: end + 1])
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def flatten(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield (path/name, number) of every number in nested dictionaries; None counts as NaN."""
    for key, value in record.items():
        name = f"{prefix}{key}"
        if isinstance(value, bool):
            continue
        if isinstance(value, int | float):
            yield name, float(value)
        elif value is None and metric_for(name) is not None:
            yield name, math.nan
        elif isinstance(value, str):
            # TRL and others print numbers as strings in their dictionaries.
            if len(value) < 32 and re.fullmatch(_NUMBER, value.strip()):
                yield name, number(value.strip())
        elif isinstance(value, Mapping):
            yield from flatten(value, prefix if key in ("data", "metrics", "log", "values") else f"{name}/")


def number(text: str) -> float:
    """Return the number a log wrote; None and null count as NaN."""
    return math.nan if text in ("None", "null") else float(text)


def parse_log(source: Iterable[bytes], name: str) -> LogResult:
    """Read a whole log, given in blocks of whole lines."""
    parser = LogParser(name)
    for block in source:
        parser.feed(block)
    return parser.result
