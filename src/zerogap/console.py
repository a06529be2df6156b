"""Where words go: tables for people and ``--json`` on stdout, messages on stderr, hostile text made inert."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from zerogap.errors import UsageError

# C0 and C1 controls except tab and newline, and the bidirectional overrides that reorder what a terminal shows.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def out() -> Console:
    """Console for results; rich honours NO_COLOR and writes plain text when piped."""
    return Console(highlight=False, markup=False, emoji=False)


def message(text: str) -> None:
    """Print one message line on stderr; without a stderr that can be written there is nobody to tell."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(printable(text), file=sys.stderr, flush=True)


@contextlib.contextmanager
def counted(what: str) -> Iterator[Callable[[int, int, str], None]]:
    """Show on stderr how far a long piece of work is: a bar on a terminal, elsewhere its first and its last line.

    Args:
        what: is done, such as ``building kernels``.

    Yields:
        what is told (parts done, parts in all, name of the next; empty at the end).
    """
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)

        def tell(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, description=f"{what}: {name}" if name else what)
            if not console.is_terminal and done in (0, total):
                message(f"{what}: {done} of {total}")

        yield tell


def printable(text: str) -> str:
    """Return ``text`` with control and reordering characters escaped: what a model wrote is hostile to a terminal."""
    return _CONTROLS.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


def prepare_streams() -> None:
    """Make the standard streams safe to use: closed ones lead nowhere, no character is an error in any encoding."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, so that no file of ours gets it
    if sys.stdout is not None and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")


def discard_stdout() -> None:
    """Lead stdout nowhere from now on, after it could not be written; else the interpreter complains at its end."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, sys.stdout.fileno())
        os.close(descriptor)


def finish_stdout() -> str | None:
    """Write out what is left for stdout; return what went wrong, or None. A reader that went away is no problem."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        discard_stdout()
    except OSError as error:
        discard_stdout()
        return f"cannot be written ({error.strerror})"
    return None


def print_json(schema: str, version: int, body: Mapping[str, Any]) -> None:
    """Write one JSON object with sorted keys to stdout; non-finite numbers become strings, since JSON has none.

    Raises:
        UsageError: stdout cannot be written.
    """
    values = finite({"schema": schema, "schema_version": version, **body})
    try:
        print(json.dumps(values, sort_keys=True, allow_nan=False), flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        discard_stdout()
        raise UsageError(f"stdout: cannot be written ({error.strerror}); give it a place that can") from None


def finite(value: Any) -> Any:
    """Return ``value`` with NaN and infinities as the texts ``nan``, ``inf`` and ``-inf``, at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
