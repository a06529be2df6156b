"""What one probe may use of an engine, and the ways in which a request can fail to be answered."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

BODY_BYTES = 4 << 20  # a 64-token answer with 20 alternatives takes about 0.1 MB
EXCERPT_CHARS = 200


class ProbeError(Exception):
    """A question that got no usable answer; its text is one line for the person."""


class BudgetSpentError(ProbeError):
    """The requests or seconds allowed are used up."""


class UnreachableError(ProbeError):
    """Nobody answers, or the connection broke."""


class TooSlowError(ProbeError):
    """No whole answer within the time allowed."""


class BadAnswerError(ProbeError):
    """An answer that cannot be read: too large, compressed, not JSON, of another form, a redirect."""


class UnsupportedError(ProbeError):
    """This kind of engine cannot be asked that."""


class HttpError(ProbeError):
    """An answer with an error status."""

    def __init__(self, path: str, status: int, excerpt: str, retry_after: str = "") -> None:
        super().__init__(f"{path} answers {status}" + (f": {excerpt}" if excerpt else ""))
        self.status = status
        self.excerpt = excerpt
        self.retry_after = retry_after


@dataclass
class Budget:
    """Requests and seconds that a probe may spend.

    Attributes:
        requests: most requests, of every sort.
        seconds: most seconds from the start.
    """

    requests: int
    seconds: float
    used: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    @property
    def left_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.seconds - self.elapsed)

    def take(self) -> None:
        """Count one request.

        Raises:
            BudgetSpentError: nothing is left.
        """
        if self.used >= self.requests:
            raise BudgetSpentError(f"the budget of {self.requests} requests is used up (--budget-requests)")
        if self.left_s <= 0:
            raise BudgetSpentError(f"the budget of {self.seconds:g} s is used up (--budget-seconds)")
        self.used += 1

    def can_afford(self, requests: int) -> bool:
        """Whether that many more requests fit."""
        return self.used + requests <= self.requests and self.left_s > 0
