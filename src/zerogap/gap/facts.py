"""Facts about a setup that stand beside the numbers: ``key=value`` pairs, configuration of both sides, short notes.

``--set top_p=0.8``, ``--facts FILE`` (TOML, JSON or text) and what a log states all end here. Text is read leniently:
``key=value``, ``key: value``, ``a -> b``, lists in brackets, and lines that open with ``engine:`` or ``trainer:``.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerogap.errors import UsageError

_LIMIT = 1 << 20
# Names that the rules look at; a text without any of them is no note about a gap.
_KNOWN = re.compile(
    r"(?:^|_)(?:gap|abs_diff|logps?|logprobs?|logprob_mode|mode|checksum|sync|adapter|lora|bucket|success|ids|retracted|"
    r"left_pad|cached_tokens|mismatch_count|cap|mask_sum|ladder|pipeline|prefill_prefill|vocab(?:_size)?|identical_prompts|"
    r"rope\w*|rl_on_policy_target|model_profiles|old_new|cos|max_diff|temperature|top_p|top_k|min_p|tie_word_embeddings|"
    r"after_merge|seq|generation_config|positions?|mean|true_on_policy)(?:$|_)"
)
NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_PAIR = re.compile(
    r"(?P<key>[A-Za-z_][\w.|/-]*(?:\([^()]*\))?)\s*[=~]\s*"
    r"(?P<value>\[[^\]]*\]|\{[^}]*\}|\"[^\"]*\"|'[^']*'|[^\s;,\[{\"']+)"
)
_NUMBER_LIST = re.compile(
    rf"(?P<key>[A-Za-z_][\w /|.-]*?)\s*(?::|=|->)\s*\[?(?P<values>(?:{NUMBER}|null|None|nan|NaN|-?inf)"
    rf"(?:\s*,\s*(?:{NUMBER}|null|None|nan|NaN|-?inf)){{1,}})"
)
_BRACKET_LIST = re.compile(r"(?P<key>[A-Za-z_][\w .-]*?)\s*(?:=|:|->)\s*\[(?P<values>[^\]]*)\]")
_ARROW = re.compile(rf"(?P<key>[A-Za-z_]\w*)\s*[:=]?\s*(?P<a>{NUMBER})\s*(?:->|→)\s*(?P<b>{NUMBER})")
_SIDE = re.compile(r"(?P<side>engine|trainer|rollout|train)\s*:\s*(?P<rest>.*)", re.IGNORECASE)


@dataclass
class Facts:
    """Stated facts by normalised name, and the text they stand in.

    Attributes:
        values: name -> last value (number, bool, text or list).
        text: everything that was written, for rules that look for words.
        rows: ``key=value`` pairs line by line, for small tables written as text.
        sides: "engine" / "trainer" -> name -> value.
    """

    values: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)
    sides: dict[str, dict[str, Any]] = field(default_factory=lambda: {"engine": {}, "trainer": {}})

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and normal(key) in self.values

    def first(self, *names: str) -> Any:
        """Return the first of several names that is stated, or None."""
        return next((self.values[normal(name)] for name in names if normal(name) in self.values), None)

    def number(self, *names: str) -> float | None:
        """Return the first of several names as a number, or None."""
        value = self.first(*names)
        return as_number(value)

    def search(self, pattern: str) -> re.Match[str] | None:
        """Look for words in the text."""
        return re.search(pattern, self.text, re.IGNORECASE | re.DOTALL)

    def find(self, pattern: str) -> float | None:
        """Return the number that a pattern's first group catches in the text."""
        found = self.search(pattern)
        return as_number(found.group(1)) if found else None

    def update(self, more: Mapping[str, Any]) -> None:
        """Take further facts; later ones win."""
        for key, value in more.items():
            name = normal(key)
            self.values[name] = value
            for side in ("engine", "trainer"):
                if name.startswith(f"{side}_"):
                    self.sides[side][name.removeprefix(f"{side}_")] = value
            if not isinstance(value, dict | list):
                self.text += f"\n{key}={value}"

    def known(self) -> bool:
        """Whether a note states anything that the diagnoses look at."""
        words = r"checksum|retract|adapter|lora|update_weights|\bsuccess\b|\bsync\b|\bengine\s*:|\btrainer\s*:"
        return any(_KNOWN.search(name) for name in self.values) or self.search(words) is not None

    def absorb(self, other: Facts) -> None:
        """Take everything another set states; it wins."""
        self.values.update(other.values)
        self.text += other.text
        self.rows += other.rows
        for side in self.sides:
            self.sides[side].update(other.sides[side])

    def add_text(self, text: str) -> None:
        """Read a note."""
        self.text += f"\n{text}"
        for line in text.splitlines():
            self._line(line)

    def _line(self, line: str) -> None:
        row: dict[str, Any] = {}
        for found in _NUMBER_LIST.finditer(line):
            self.values[normal(found["key"])] = [parse_value(v.strip()) for v in found["values"].split(",")]
        for found in _BRACKET_LIST.finditer(line):
            self.values[normal(found["key"])] = _list(found["values"])
        for found in _ARROW.finditer(line):
            self.values[normal(found["key"])] = [float(found["a"]), float(found["b"])]
        for found in _PAIR.finditer(line):
            name, value = normal(found["key"]), parse_value(found["value"])
            row[name] = value
            self.values[name] = value
        for part in re.split(r"[;]", line):
            side = _SIDE.match(part.strip())
            if side:
                key = "trainer" if side["side"].lower().startswith("train") else "engine"
                for found in _PAIR.finditer(side["rest"]):
                    self.sides[key][normal(found["key"])] = parse_value(found["value"])
        if row:
            self.rows.append(row)


def normal(name: str) -> str:
    """Return a fact's name in small letters with single underscores."""
    return re.sub(r"_+", "_", re.sub(r"[^a-z0-9]+", "_", name.lower())).strip("_")


def as_number(value: Any) -> float | None:
    """Return a value as a number, or None if it is none."""
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, str):
        try:
            return float(value.rstrip("%,.;"))
        except ValueError:
            return None
    return None


def is_on(value: Any) -> bool:
    """Whether a stated value means yes."""
    if isinstance(value, str):
        return value.strip().lower() not in ("", "0", "false", "no", "off", "none", "unset", "null")
    return bool(value)


def claims_contract(facts: Facts) -> bool:
    """Whether a bit-exact contract is stated to be in force."""
    return is_on(facts.first("true_on_policy", "contract", "true_on_policy_mode")) or bool(
        facts.search(r"\btrue_on_policy\b(?!\s*[=:]\s*(?:0|false|no|off))")
    )


def parse_value(text: str) -> Any:
    """Return a number, bool, None, list or text from how it is written."""
    text = text.strip()
    if text[:1] in "[{":
        try:
            return json.loads(text.replace("'", '"'))
        except ValueError:
            return _list(text[1:-1]) if text[:1] == "[" else text
    if text[:1] in "\"'" and text[-1:] == text[:1] and len(text) > 1:
        return text[1:-1]
    lower = text.lower()
    if lower in ("true", "yes", "on"):
        return True
    if lower in ("false", "no", "off"):
        return False
    if lower in ("none", "null"):
        return None
    if lower in ("nan", "inf", "-inf"):
        return float(lower)
    try:
        number = float(text.rstrip("."))
    except ValueError:
        return text
    return int(number) if re.fullmatch(r"[-+]?\d+", text) and math.isfinite(number) else number


def _list(text: str) -> list[Any]:
    return [parse_value(part) for part in text.split(",") if part.strip()]


def read_facts(path: Path, named: str = "--facts ") -> Facts:
    """Read a facts file: TOML, JSON or text.

    Args:
        path: the file.
        named: what stands before its name in an error: the option, or nothing for a source.

    Raises:
        UsageError: it cannot be read, or is no text.
    """
    try:
        raw = path.read_bytes()[: _LIMIT + 1]
    except OSError as error:
        raise UsageError(f"{named}{path}: cannot be read: {error.strerror}; check the path") from None
    if len(raw) > _LIMIT:
        raise UsageError(f"{named}{path}: over 1 MiB; give the facts alone")
    if b"\0" in raw:
        raise UsageError(f"{named}{path}: not a text file; write TOML, JSON or key=value lines")
    text = raw.decode("utf-8-sig", "replace")
    facts = Facts()
    try:
        content = json.loads(text) if text.lstrip()[:1] == "{" else tomllib.loads(text)
    except (ValueError, RecursionError):
        facts.add_text(text)
        return facts
    facts.update(_flat(content))
    return facts


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            made.update(_flat(value, f"{prefix}{key}."))
        else:
            made[f"{prefix}{key}"] = value
    return made


def pairs(arguments: list[str]) -> dict[str, Any]:
    """Return ``KEY=VALUE`` arguments as a dictionary.

    Raises:
        UsageError: an argument has no ``=``.
    """
    made: dict[str, Any] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"--set {argument}: write KEY=VALUE, such as --set top_p=0.8")
        made[key.strip()] = parse_value(value)
    return made
