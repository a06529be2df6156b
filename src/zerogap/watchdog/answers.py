"""What one engine's answers to probes say about it."""

from __future__ import annotations

from zerogap.watchdog.events import Probe


class Engine:
    """What the probes of one address have said."""

    def __init__(self) -> None:
        self.worked_at: float | None = None  # last answer to a real request
        self.answered_at: float | None = None  # last answer at all
        self.fails = 0  # failed probes in a row
        self.failing_since = 0.0
        self.last: Probe | None = None
        self.changed = 0
        self.busy_at = float("-inf")

    def take(self, probe: Probe) -> None:
        """Take in the answer to a probe."""
        self.last = probe
        if probe.busy:
            self.busy_at = probe.at
        self.changed = self.changed + 1 if probe.changed else 0
        if probe.ok:
            self.fails = 0
            self.answered_at = probe.at
            if probe.level == "generate":
                self.worked_at = probe.at
            return
        if not self.fails:
            self.failing_since = probe.at
        self.fails += 1
