"""What ends a command: one line for the person, one documented exit code for the caller."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every verb."""

    HOLDS = 0
    DOES_NOT_HOLD = 1
    USAGE = 2  # usage error or unreadable input; also Ctrl-C, since nothing was established
    UNKNOWN = 3  # something needed could not be established


class ZerogapError(Exception):
    """A failure that a person can act on; its text is one line: what, where, what to do."""

    exit_code = ExitCode.USAGE


class UsageError(ZerogapError):
    """Wrong arguments, configuration or input files."""


class NotHeldError(ZerogapError):
    """What was asked for does not hold: a gate that stopped, a proof that failed."""

    exit_code = ExitCode.DOES_NOT_HOLD


def nearest(name: str, known: Iterable[str], count: int = 3) -> str:
    """Return ``"; did you mean 'a', 'b'?"`` for the known names nearest to ``name``, or an empty string."""
    names = difflib.get_close_matches(name, list(known), n=count, cutoff=0.6)
    return f"; did you mean {', '.join(repr(n) for n in names)}?" if names else ""
