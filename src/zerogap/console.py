"""Where words go: tables for people and ``--json`` on stdout, messages on stderr, hostile text made inert."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console

# C0 and C1 controls except tab and newline, and the bidirectional overrides that reorder what a terminal shows.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def out() -> Console:
    """Console for results; rich honours NO_COLOR and writes plain text when piped."""
    return Console(highlight=False, markup=False, emoji=False)


def message(text: str) -> None:
    """Print one message line on stderr."""
    print(printable(text), file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """Return ``text`` with control and reordering characters escaped: what a model wrote is hostile to a terminal."""
    return _CONTROLS.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


def print_json(schema: str, version: int, body: Mapping[str, Any]) -> None:
    """Write one JSON object with sorted keys to stdout; non-finite numbers become strings, since JSON has none."""
    print(json.dumps(finite({"schema": schema, "schema_version": version, **body}), sort_keys=True, allow_nan=False))


def finite(value: Any) -> Any:
    """Return ``value`` with NaN and infinities as the texts ``nan``, ``inf`` and ``-inf``, at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
