"""Sides in processes of their own, run in turn while the others are stopped, and the rows that come out of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

LIMIT_S = 1800.0
QUIET = 0.05  # share of the machine that others may use without a remark


class SideError(Exception):
    """A side could not be started or did not answer as it should: one line."""


class Side:
    """A process that answers JSON lines; it runs only while it is asked, and is stopped otherwise.

    Stopped, its idle threads cannot spin beside the side whose turn it is.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self._log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=dict(environment),
                text=True,
                start_new_session=True,
            )
        try:
            self.about = self._answer()
            self._signal(signal.SIGSTOP)
        except BaseException:
            self.close()
            raise

    def ask(self, **request: Any) -> dict[str, Any]:
        """Let the side run for one request and return its answer.

        Raises:
            SideError: it answered with an error, ended, or took over `LIMIT_S`.
        """
        self._signal(signal.SIGCONT)
        try:
            assert self.process.stdin is not None
            try:
                self.process.stdin.write(json.dumps(request) + "\n")
                self.process.stdin.flush()
            except OSError:
                pass  # it has ended; reading says so
            return self._answer()
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """End the side and everything it started."""
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        timer = threading.Timer(LIMIT_S, self._signal, [signal.SIGKILL])
        timer.start()
        try:
            line = self.process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            said = self._log.read_text(errors="replace").strip().splitlines()
            raise SideError(f"{self.name} ended: {said[-1][:200] if said else 'it said nothing'} (all in {self._log})")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise SideError(f"{self.name}: {answer['error']}")
        return answer

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


@dataclass(frozen=True)
class Spread:
    """Lowest, middle and highest of some values."""

    least: float
    median: float
    most: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(min(values), statistics.median(values), max(values))


@dataclass
class Row:
    """One line of the table.

    Attributes:
        name: what ``--only`` takes.
        what: in words.
        ours: seconds (or other values of ``unit``) of each round.
        others: the same of each other side, by name; they ran in turn with ours.
        target: least median of the ratio best other / ours; None without one.
        tokens: of one round, where a speed in tokens per second means something.
        floor_s: least seconds that the bytes and operations of a round can take on this machine.
        problems: sides that gave no value, and why.
        note: what a reader must know.
        extra: further numbers.
    """

    name: str
    what: str
    ours: list[float]
    others: dict[str, list[float]] = field(default_factory=dict)
    target: float | None = None
    tokens: int | None = None
    floor_s: float | None = None
    problems: list[str] = field(default_factory=list)
    note: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def best(self) -> str | None:
        """The other side with the lowest median."""
        return min(self.others, key=lambda name: statistics.median(self.others[name]), default=None)

    def ratio(self, other: str | None = None) -> Spread | None:
        """Return how many times as long the other side (default: the best) takes, round by round."""
        other = other or self.best
        if other is None or not self.ours:
            return None
        return Spread.of([theirs / ours for ours, theirs in zip(self.ours, self.others[other], strict=True)])

    @property
    def roofline(self) -> float | None:
        """Share of the roofline that our median round reaches."""
        return None if self.floor_s is None or not self.ours else self.floor_s / statistics.median(self.ours)

    @property
    def holds(self) -> bool | None:
        """Whether the target is met; None without one, or without a ratio."""
        ratio = self.ratio()
        return None if self.target is None or ratio is None else ratio.median >= self.target

    def record(self) -> dict[str, Any]:
        ratios = {name: self.ratio(name) for name in self.others}
        return {
            "name": self.name,
            "what": self.what,
            "ours": self.ours,
            "others": self.others,
            "best": self.best,
            "ratios": {name: None if r is None else vars(r) for name, r in ratios.items()},
            "target": self.target,
            "holds": self.holds,
            "tokens": self.tokens,
            "floor_s": self.floor_s,
            "roofline_share": self.roofline,
            "problems": self.problems,
            "note": self.note,
            "extra": self.extra,
        }

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> Row:
        """Return the row of which `record` gave this."""
        names = ("name", "what", "ours", "others", "target", "tokens", "floor_s", "problems", "note", "extra")
        return Row(**{name: record[name] for name in names})


def rounds(
    sides: Mapping[str, Side],
    count: int,
    ask: Callable[[Side, int], dict[str, Any]],
    warm: Callable[[Side], object],
    progress: Callable[[str], None],
) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    """Ask every side in turn, ``count`` times after a warm-up, every other round in the opposite order.

    Returns:
        The answers of each side that gave all of them, and the problems of the others.
    """
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    problems: list[str] = []
    for number in range(-1, count):
        order = list(answers) if number % 2 else list(answers)[::-1]
        for name in order:
            try:
                if number < 0:
                    warm(sides[name])
                else:
                    answers[name].append(ask(sides[name], number))
                    progress(f"round {number + 1} of {count}: {name} {answers[name][-1].get('seconds', 0):.2f} s")
            except SideError as error:
                problems.append(str(error))
                progress(str(error))
                del answers[name]
    return answers, problems


class Busy:
    """How much of the machine others used while something was measured, as a share of all cores."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._all, self._own = self._now()

    def note(self, row: Row) -> None:
        """Write the share down in a row, and say so if it is large."""
        share = self.others_share()
        row.extra["others_busy_share"] = share
        if share > QUIET:
            row.problems.append(f"other processes took {share:.0%} of the machine meanwhile")

    def others_share(self) -> float:
        everything, own = self._now()
        cores = (time.monotonic() - self._began) * (os.cpu_count() or 1)
        return max(0.0, (everything - self._all) - (own - self._own)) / cores

    @staticmethod
    def _now() -> tuple[float, float]:
        total = psutil.cpu_times()
        everything = total.user + total.system + total.nice + getattr(total, "steal", 0.0)
        me = psutil.Process()
        own = 0.0
        for process in [me, *me.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                own += sum(process.cpu_times()[:4])
        return everything, own


def tell(text: str) -> None:
    """Print progress, which is no result."""
    print(text, file=sys.stderr, flush=True)
