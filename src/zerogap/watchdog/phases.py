"""Where a run is, for how long, and how long it may stay silent there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from zerogap.watchdog.rules import Phase

LEARN_AFTER = 3  # spans of a phase before its own median is used
FACTOR = 5.0  # a phase that takes this many times its median without progress is stuck
FLOOR_S = 60.0  # no learnt budget is shorter


@dataclass
class Span:
    """One stay in a phase."""

    phase: str
    since: float
    until: float | None = None
    implied: bool = False  # entered because the one before ended; the phase's own line may still come


class Phases:
    """The history of phases and the budgets learnt from it."""

    def __init__(self, known: Iterable[Phase], now: float, scale: float = 1.0) -> None:
        self._phases = {phase.name: phase for phase in known}
        self._by_name = {name.lower(): phase.name for phase in self._phases.values() for name in phase.names}
        self._scale = scale
        self.history = [Span("starting", now)]

    @property
    def name(self) -> str:
        """The phase the run is in."""
        return self.history[-1].phase

    @property
    def since(self) -> float:
        """When it began."""
        return self.history[-1].since

    @property
    def needs_engine(self) -> bool:
        """Whether this phase cannot go on without a living engine."""
        return self._phases[self.name].engine

    def named(self, timer: str) -> str | None:
        """Return the phase that a timer's name opens, or None for a timer that is none."""
        return self._by_name.get(timer.lower())

    def enter(self, name: str, at: float, implied: bool = False) -> None:
        """Enter a phase; entering the one the run is in already begins a new span of it, unless that was implied."""
        last = self.history[-1]
        if at < last.since:
            return  # a line that was read late
        if last.phase == name and (last.implied or implied):
            last.implied = last.implied and implied
            return
        last.until = at
        self.history.append(Span(name, at, implied=implied))
        if len(self.history) > 4000:  # a long run keeps its beginning and its recent past
            del self.history[100:2100]

    def budget(self) -> float:
        """Return how long (s) this phase may show no progress: a multiple of its own median once it is learnt."""
        spans = [
            span.until - span.since
            for span in self.history[-400:]
            if span.phase == self.name and span.until is not None
        ]
        default = self._phases[self.name].budget_s
        if len(spans) < LEARN_AFTER:
            return default * self._scale
        return max(FLOOR_S * self._scale, min(FACTOR * median(spans), max(default * self._scale, 2 * max(spans))))
