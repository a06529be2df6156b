"""Taking secrets out of everything that is written or printed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

HIDDEN = "[redacted]"
_NAME = (
    r"(?:[\w.\-]{0,40}(?:api[_\-]?key|access[_\-]?key|secret|token|passw(?:or)?d|passphrase|credential|"
    r"auth(?:orization)?|private[_\-]?key|wandb[_\-]?key)[\w.\-]{0,40})"
)
# Names that hold such a word and are no secret: counts, limits and paths of tokenizers.
_HARMLESS = re.compile(
    r"tokens|tokeniz|token[_\-]?(?:id|type|count|usage|rate|level|mean|len|budget)|max[_\-]|num[_\-]|author|\bauth[_\-]?(?:type|mode)",
    re.IGNORECASE,
)
_ASSIGNED = re.compile(
    rf"""(?P<name>{_NAME})(?P<between>["']?\s*(?:=|:)\s*["']?)(?P<value>(?:Bearer\s+|Basic\s+)?[^\s"',;&}}]+)""",
    re.IGNORECASE,
)
_FLAG = re.compile(rf"(?P<flag>--?{_NAME})(?P<between>\s+)(?P<value>(?!-)\S+)", re.IGNORECASE)
_SHAPES = (
    re.compile(r"\b(?:hf|ghp|gho|ghs|glpat|xox[abprs]|npm|pypi)[_\-][A-Za-z0-9_\-]{12,}"),
    re.compile(r"\bgithub_pat_[A-Za-z0-9_]{20,}"),
    re.compile(r"\bsk-[A-Za-z0-9_\-]{16,}"),
    re.compile(r"\bAKIA[0-9A-Z]{16}\b"),
    re.compile(r"\beyJ[A-Za-z0-9_\-]{6,}\.[A-Za-z0-9_\-]{6,}\.[A-Za-z0-9_\-]*"),
    re.compile(r"(?<=Bearer )[A-Za-z0-9._~+/\-]{8,}=*"),
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)", re.DOTALL),
)
_URL = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.\-]*://)(?P<user>[^\s/@:]*):(?P<password>[^\s/@]+)@", re.IGNORECASE)
_NUMBER = re.compile(r"^[\d.]{1,11}%?$")
_SECRET_FLAG = re.compile(rf"^--?{_NAME}$", re.IGNORECASE)


def redact(text: str) -> str:
    """Return ``text`` with what looks like a secret replaced, names and everything else kept."""
    text = _URL.sub(lambda found: f"{found['scheme']}{HIDDEN}@", text)
    for shape in _SHAPES:
        text = shape.sub(HIDDEN, text)
    text = _FLAG.sub(_hide, text)
    return _ASSIGNED.sub(_hide, text)


def _hide(found: re.Match[str]) -> str:
    name = found.groupdict().get("name") or found.groupdict().get("flag") or ""
    counted = "token" in name.lower() and _NUMBER.match(found["value"])  # `#token: 4096` counts, it hides nothing
    if (
        counted
        or _HARMLESS.search(name)
        or found["value"] in (HIDDEN, "None", "null", "true", "false", "True", "False")
    ):
        return found.group()
    return f"{name}{found['between']}{HIDDEN}"


def redact_argv(argv: Sequence[str]) -> list[str]:
    """Return a command line without its secrets, also where flag and value are two arguments."""
    shown, hide = [], False
    for word in argv:
        shown.append(HIDDEN if hide else redact(word))
        hide = bool(_SECRET_FLAG.match(word)) and not _HARMLESS.search(word)
    return shown


def redact_tree(value: Any) -> Any:
    """Redact every text in a tree of dicts and lists."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {key: redact_tree(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact_tree(item) for item in value]
    return value
