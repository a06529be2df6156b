"""What can be told from the launch line alone, before anything has gone wrong."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

WRAPPERS = frozenset({"ssh", "docker", "podman", "nerdctl", "kubectl", "oc", "srun", "sbatch", "pdsh", "sky", "modal"})
FIRST_WAIT_S = 60.0  # a cold compile answers 503 for longer than the first check waits


def words(argv: Sequence[str]) -> list[str]:
    """Return all words of a command line, those of ``bash -c "…"`` and of ``ray job submit -- …`` included."""
    found: list[str] = []
    for word in argv:
        if " " in word and not word.startswith("{"):
            try:
                found += shlex.split(word)
            except ValueError:
                found += word.split()
        else:
            found.append(word)
    return found


def flag(line: Sequence[str], name: str) -> str | None:
    """Return the value of the last ``--name value`` or ``--name=value`` (the last one wins), ``""`` for a bare flag."""
    value = None
    for position, word in enumerate(line):
        if word == name:
            following = line[position + 1] if position + 1 < len(line) else "--"
            value = "" if following.startswith("--") else following
        elif word.startswith(f"{name}="):
            value = word.partition("=")[2]
    return value


def works_elsewhere(argv: Sequence[str]) -> bool:
    """Whether the command only starts work elsewhere, so that a quiet CPU here says nothing about it."""
    line = words(argv)
    names = {Path(word).name for word in line[:8]}
    return bool(names & WRAPPERS) or "job submit" in " ".join(line[:12])


def lint(argv: Sequence[str]) -> list[str]:
    """Return warnings about a launch line, each beginning with its name."""
    line = words(argv)
    found = []
    if flag(line, "--use-fault-tolerance") not in (None, "False", "false"):
        wait = flag(line, "--rollout-health-check-first-wait")
        try:
            seconds = float(wait or 0)
        except ValueError:
            seconds = 0.0
        if seconds < FIRST_WAIT_S:
            found.append(
                f"first-wait-too-short: --rollout-health-check-first-wait is {seconds:g} s; the framework's own "
                f"monitor kills an engine that still compiles. Set it to the longest start of your engine: 600 if cold."
            )
    return found


def restarts_engines(argv: Sequence[str]) -> bool:
    """Whether the launch line says that the framework restarts dead engines."""
    return flag(words(argv), "--use-fault-tolerance") not in (None, "False", "false")
