"""Secrets out of everything that is printed or written: values of names that look like secrets, and known shapes."""

from __future__ import annotations

import re

_NAMED = re.compile(
    r"(?i)((?:api[_-]?key|access[_-]?key|wandb[_-]?key|[\w-]*token(?!s|_id|izer|_count)|secret|password|passwd|credential|authorization)"
    r"[\w-]*[\"']?(?:\s*[:=]\s*|\s+(?=\S{12,})))(\"[^\"]*\"|'[^']*'|\S+)"
)
_SHAPED = re.compile(r"\b(?:hf_[A-Za-z0-9]{8,}|sk-[A-Za-z0-9_-]{8,}|gh[pousr]_[A-Za-z0-9]{8,}|AKIA[A-Z0-9]{12,})")


def redacted(text: str) -> str:
    """Return text with the values of secrets replaced."""
    return _SHAPED.sub("[redacted]", _NAMED.sub(r"\1[redacted]", text))
