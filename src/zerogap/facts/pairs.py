"""Settings that programs print: Python reprs, JSON and YAML, read as pairs without evaluating anything."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from zerogap.errors import UsageError
from zerogap.facts.shellwords import HIDDEN

YAML_LIMIT = 2**20
_PAIR_LIMIT = 5000
_DEPTH_LIMIT = 6
_TOKEN = re.compile(r"[\"'()\[\]{},]|\\.")
_OPEN, _CLOSE = frozenset("([{"), frozenset(")]}")


def split_top(text: str, start: int = 0) -> tuple[list[str], int]:
    """Split at the commas of the outermost level until its bracket closes or the text ends.

    Args:
        text: such as ``a='x', b=[1, 2])`` with ``start`` after the opening bracket.
        start: where to begin.

    Returns:
        the parts, and the position after the closing bracket (the end of the text when it never closes).
    """
    parts: list[str] = []
    depth, begin, place = 0, start, start
    while found := _TOKEN.search(text, place):
        character, place = found[0], found.end()
        if character in "\"'":
            place = _after_string(text, place, character)
        elif character in _OPEN:
            depth += 1
        elif character in _CLOSE:
            if depth == 0:
                parts.append(text[begin : found.start()])
                return parts, place
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[begin : found.start()])
            begin = place
            if len(parts) > _PAIR_LIMIT:
                break
    parts.append(text[begin:])
    return parts, len(text)


def _after_string(text: str, place: int, quote: str) -> int:
    pattern = re.compile(rf"[^{quote}\\]*(?:\\.[^{quote}\\]*)*{quote}", re.DOTALL)
    found = pattern.match(text, place)
    return found.end() if found else len(text)


def call_pairs(text: str, start: int = 0) -> dict[str, str]:
    """Return the ``key=value`` pairs of a call's repr, values without their quotes."""
    pairs: dict[str, str] = {}
    for part in split_top(text, start)[0]:
        if found := re.match(r"\s*([A-Za-z_]\w*)\s*=\s*(.*)$", part, re.DOTALL):
            pairs[found[1]] = unquoted(found[2])
    return pairs


def unquoted(text: str) -> str:
    """Return a repr's text without its quotes."""
    stripped = text.strip()
    if len(stripped) >= 2 and stripped[0] in "\"'" and stripped[-1] == stripped[0]:
        return stripped[1:-1]
    # <CompilationMode.VLLM_COMPILE: 3> and 'torch.bfloat16' are printed names.
    if found := re.fullmatch(r"<\w+\.(\w+): .*>", stripped):
        return found[1]
    return stripped.removeprefix("torch.")


def flatten(text: str, depth: int = 0) -> dict[str, str]:
    """Return the leaves of a JSON object or Python dict repr by dotted key; what cannot be read has none."""
    try:
        loaded = json.loads(text)
    except (ValueError, RecursionError):
        return _flatten_repr(text, depth)
    return _leaves(loaded) if isinstance(loaded, dict) else {}


def _leaves(value: dict[str, Any], prefix: str = "", depth: int = 0) -> dict[str, str]:
    leaves: dict[str, str] = {}
    for key, item in list(value.items())[:_PAIR_LIMIT]:
        name = f"{prefix}{key}"
        if isinstance(item, dict) and depth < _DEPTH_LIMIT:
            leaves.update(_leaves(item, f"{name}.", depth + 1))
        elif isinstance(item, bool | int | float | str) or item is None:
            leaves[name] = str(item)
    return leaves


def _flatten_repr(text: str, depth: int) -> dict[str, str]:
    leaves: dict[str, str] = {}
    start = text.find("{") + 1
    if start == 0 or depth > _DEPTH_LIMIT:
        return leaves
    for part in split_top(text, start)[0]:
        if found := re.match(r"\s*(['\"]?)([\w.]+)\1\s*:\s*(.*)$", part, re.DOTALL):
            value = found[3].strip()
            if value.startswith("{"):
                leaves.update({f"{found[2]}.{key}": item for key, item in _flatten_repr(value, depth + 1).items()})
            else:
                leaves[found[2]] = unquoted(value)
    return leaves


def json_object(text: str) -> dict[str, Any] | None:
    """Return a JSON object, with hidden pieces left in its strings, or None."""
    try:
        loaded = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return loaded if isinstance(loaded, dict) else None


def read_yaml(path: Path) -> Any:
    """Return a YAML file's content by the safe loader.

    Raises:
        UsageError: it cannot be read, is too large, or is not YAML.
    """
    try:
        if path.stat().st_size > YAML_LIMIT:
            raise UsageError(f"{path} is larger than {YAML_LIMIT // 2**20} MiB; it is no launch configuration")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read ({type(error).__name__})") from None
    return parse_yaml(text, str(path))


def parse_yaml(text: str, name: str) -> Any:
    """Return YAML text by the safe loader; see ``read_yaml``."""
    import yaml

    if HIDDEN in text:
        raise UsageError(f"{name} holds NUL bytes; it is no YAML file")
    try:
        return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        place = getattr(error, "problem_mark", None)
        raise UsageError(
            f"{name}{f' line {place.line + 1}' if place else ''}: not YAML ({type(error).__name__})"
        ) from None


def yaml_settings(value: Any) -> dict[str, str]:
    """Return the scalar settings of a YAML mapping by dotted key."""
    return _leaves({str(key): item for key, item in value.items()}) if isinstance(value, dict) else {}
