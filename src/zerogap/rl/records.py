"""JSONL files of a run: one object per line, ASCII, a torn last line does not count."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from zerogap.console import finite
from zerogap.errors import UsageError
from zerogap.files import write_atomic


def to_line(record: Mapping[str, Any]) -> str:
    """Return one line of JSON with its line end; NaN and infinities become ``"nan"``, ``"inf"``, ``"-inf"``.

    Finite floats are written so that reading them gives the same bits.
    """
    return json.dumps(finite(record), allow_nan=False, separators=(",", ":")) + "\n"


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file; none if it is missing. What a killed process left half-written is skipped.

    Raises:
        UsageError: a whole line is no JSON object, by file and line.
    """
    try:
        lines = path.open("rb")
    except FileNotFoundError:
        return
    with lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if not isinstance(record, dict):
                raise UsageError(f"{path}:{number}: is damaged, not a JSON object; remove that line")
            yield record


def read_steps(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (step, record) of a file whose records belong to steps.

    Raises:
        UsageError: as `read_records`, or a record has no step.
    """
    for number, record in enumerate(read_records(path), start=1):
        step = record.get("step")
        if type(step) is not int:
            raise UsageError(f"{path}:{number}: is damaged, it has no step; remove that line")
        yield step, record


def open_to_append(path: Path) -> IO[str]:
    """Open a file for further records, after cutting off a torn last line."""
    if path.exists():
        with path.open("r+b") as file:
            end = file.seek(0, os.SEEK_END)
            keep = end
            while keep > 0:
                size = min(keep, 65536)
                file.seek(keep - size)
                newline = file.read(size).rfind(b"\n")
                if newline >= 0:
                    keep = keep - size + newline + 1
                    break
                keep -= size
            if keep != end:
                file.truncate(keep)
    return path.open("a", encoding="ascii")


def drop_steps_from(path: Path, step: int) -> None:
    """Remove the records of ``step`` and later, whole or not at all; they belong to work after the checkpoint."""
    if not path.exists():
        return

    def write(temporary: Path) -> None:
        with temporary.open("w", encoding="ascii") as kept:
            kept.writelines(to_line(record) for at, record in read_steps(path) if at < step)

    write_atomic(path, write)
