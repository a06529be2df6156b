"""The small files of a run folder: who the pump and its command are, what ended, what happened."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

from zerogap.watchdog.processes import read_stat
from zerogap.watchdog.redact import redact
from zerogap.watchdog.scan import Hit

EVENT_BYTES = 64 << 20


class EventLog:
    """Appends events to a file as they happen, up to a limit.

    Args:
        path: of ``events.jsonl``.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def add(self, kind: str, text: str, phase: str, hit: Hit | None = None) -> None:
        """Append one event, redacted."""
        if self._file.tell() > EVENT_BYTES:
            return
        entry: dict[str, Any] = {"at": round(time.time(), 3), "kind": kind, "text": redact(text), "phase": phase}
        if hit is not None:
            entry |= {"rule": hit.rule.id, "source": hit.source}
        with contextlib.suppress(OSError):
            self._file.write(json.dumps(entry) + "\n")


def identity(folder: Path, name: str) -> tuple[int, int] | None:
    """Return pid and start time of ``pump`` or ``command``, None where nothing is recorded."""
    try:
        entry = json.loads((folder / "pump.json").read_text())[name]
        return int(entry["pid"]), int(entry["started"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def load(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file, empty when there is none."""
    try:
        body = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return body if isinstance(body, dict) else {}


def alive(identity: tuple[int, int]) -> bool:
    """Whether the process with this pid and start time lives."""
    stat = read_stat(identity[0])
    return stat is not None and stat.started == identity[1] and stat.state != "Z"
