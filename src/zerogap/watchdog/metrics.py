"""Numbers in a step's log line, and what in them means that the run is learning nothing."""

from __future__ import annotations

import math
import re

_PAIR = re.compile(
    r"""['"]?(?P<name>[A-Za-z][\w./\- ]{0,79}?\.?)['"]?\s*[=:]\s*"""
    r"(?P<value>[-+]?(?:nan|inf(?:inity)?|\d+(?:\.\d*)?(?:e[-+]?\d+)?))(?![\w.]*[A-Za-z_])",
    re.IGNORECASE,
)
_LOSS = re.compile(r"(?:^|[/_ ])(?:pg_|policy_|train_|actor_)?loss$|grad[ _.]*norm", re.IGNORECASE)
_REWARD = re.compile(r"reward|score/mean|accuracy|acc$", re.IGNORECASE)
_FAILED = re.compile(r"(?:empty|error|fail|timeout|invalid|no_)\w*", re.IGNORECASE)
_BACKEND = re.compile(r"tool|env|judge|verif|response|sandbox|request|call|api", re.IGNORECASE)


def parse_metrics(text: str) -> dict[str, float]:
    """Return the numbers of a Python dict, ``a=1 b=2`` or ``A: 1 | B: 2``; bare ``nan`` and ``inf`` are numbers."""
    # A line is bounded, and so is a name: text that a model wrote must not cost more than its length.
    return {found["name"].strip(): float(found["value"]) for found in _PAIR.finditer(text)}


def non_finite(metrics: dict[str, float]) -> list[str]:
    """Return the losses and gradient norms that are NaN or infinite."""
    return [name for name, value in metrics.items() if _LOSS.search(name) and not math.isfinite(value)]


def backend_down(before: dict[str, float], now: dict[str, float]) -> tuple[str, str] | None:
    """Return (share, reward) when a share of failed calls jumps in the very step in which the reward collapses.

    A policy that gets worse loses reward over many steps and its tools still answer; a dead judge, reward or tool
    server takes both at once.
    """
    shares = [
        name
        for name, value in now.items()
        if name in before
        and _FAILED.search(name)
        and _BACKEND.search(name)
        and 0.5 <= value <= 1.0
        and value - before[name] >= 0.4
    ]
    rewards = [
        name
        for name, value in now.items()
        if name in before
        and _REWARD.search(name)
        and name not in shares
        and before[name] > 0
        and value <= before[name] / 2
    ]
    return (shares[0], rewards[0]) if shares and rewards else None
