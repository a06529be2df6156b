"""Reading logs within a budget: the newest lines at once, what a flood left behind when there is time or need.

A run that prints 10 MB a second mostly prints model text. While it is well, the judge reads the newest part of each
look and remembers what it passed over; when the flood ebbs, or as soon as anything looks wrong, it goes back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from zerogap.watchdog.follow import READ, Follower, Span

BUDGET = 600_000  # bytes per look while all is well: with five looks a second about 1 % of a core
BACKLOG = 256 << 20  # bytes passed over that are still gone back to; older ones stay unread, and are counted


@dataclass
class Intake:
    """One log: what is read at once, what waits."""

    name: str
    follower: Follower
    digest: Callable[[str, bytes, float], None]
    forget: Callable[[str], bytes]  # drops the unfinished line of a source and returns it
    spans: list[tuple[Span, float]] = field(default_factory=list)
    waiting: int = 0
    unread: int = 0

    def look(self, now: float, everything: bool = False) -> int:
        """Read what is new, and of what was passed over as much as the budget leaves; return the new bytes read."""
        pending = self.follower.pending()
        if pending > BUDGET and not everything:
            rest = len(self.forget(self.name))
            span = self.follower.skip(pending - BUDGET)
            self._keep(Span(span.start - rest, span.end, span.inode), now)
        fresh = 0
        while data := self.follower.read():
            fresh += len(data)
            self.digest(self.name, data, now)
            if not everything and fresh > 4 * BUDGET:
                break
        self._go_back(BACKLOG if everything else max(0, BUDGET - fresh))
        return fresh

    def _keep(self, span: Span, now: float) -> None:
        self.spans.append((span, now))
        self.waiting += span.end - span.start
        while self.waiting > BACKLOG:
            old, _ = self.spans.pop(0)
            self.waiting -= old.end - old.start
            self.unread += old.end - old.start

    def _go_back(self, budget: int) -> None:
        """Work off what was passed over, newest first."""
        while budget > 0 and self.spans:
            span, at = self.spans.pop()
            size = span.end - span.start
            taken = min(size, max(budget, 1), READ)
            data = self.follower.again(span, taken)
            if not data:  # rotated away meanwhile
                self.waiting -= size
                self.unread += size
                continue
            cut = 0
            if taken < size:  # the rest must end where a line ends
                cut = data.find(b"\n") + 1
                self.spans.append((Span(span.start, span.end - len(data) + cut, span.inode), at))
            source = f"{self.name} (read later)"
            self.digest(source, data[cut:], at)
            self.forget(source)
            self.waiting -= len(data) - cut
            budget -= max(1, len(data))
