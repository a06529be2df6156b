"""What a person sees of a run: a live table on a terminal, aligned lines when piped, nothing with ``--json``."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from zerogap.console import discard_stdout, message, out, printable

_ROWS = 12  # newest steps in the live table


@dataclass(frozen=True)
class _Column:
    title: str
    width: int
    cell: Callable[[Mapping[str, float]], str]
    rank: int = 0  # a narrow terminal goes without the highest ranks first


def _number(name: str, form: str) -> Callable[[Mapping[str, float]], str]:
    return lambda values: "" if name not in values else format(values[name], form)


def _gap(name: str) -> Callable[[Mapping[str, float]], str]:
    # An exact zero is the point of the table, so it must not look like a small number rounded.
    return lambda values: "" if name not in values else ("0" if values[name] == 0 else f"{values[name]:.3g}")


_COLUMNS = (
    _Column("step", 5, _number("step", ".0f")),
    _Column("compared", 9, _number("gap/tokens_compared", ",.0f")),
    _Column("different", 9, _number("gap/tokens_different", ",.0f")),
    _Column("gap max", 9, _gap("gap/max")),
    _Column("gap mean", 9, _gap("gap/mean"), 2),
    _Column("reward", 7, _number("reward/mean", ".3f")),
    _Column("accuracy", 8, _number("eval/accuracy", ".3f")),
    _Column("entropy", 7, _number("train/entropy", ".3f"), 3),
    _Column("length", 6, _number("rollout/response_length/mean", ".1f"), 4),
    _Column("tok/s", 7, _number("perf/generated_tokens_per_s", ",.0f"), 1),
    _Column("step s", 6, _number("time/step_s", ".1f")),
)


def _fitting(width: int) -> list[_Column]:
    """Return the columns that a table of ``width`` characters has room for."""
    columns = list(_COLUMNS)
    while sum(column.width + 3 for column in columns) + 1 > width and any(column.rank for column in columns):
        columns.remove(max(columns, key=lambda column: column.rank))
    return columns


class Display(Protocol):
    """Shows a run; a context manager."""

    def note(self, text: str) -> None:
        """Show one line of text, which may hold what a model wrote."""
        ...

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Show the metrics of one finished step (names as in docs/metrics.md)."""
        ...

    def __enter__(self) -> Display: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def make_display(total_steps: int, as_json: bool, console: Console | None = None) -> Display:
    """Return the display that fits where stdout goes.

    Args:
        total_steps: steps of the whole run, for the time left.
        as_json: stdout belongs to one JSON object, so nothing is shown.
        console: where to; None = stdout.
    """
    if as_json:
        return SilentDisplay()
    console = out() if console is None else console
    live = console.is_terminal and not console.is_dumb_terminal
    return GuardedDisplay(LiveDisplay(console, total_steps) if live else PlainDisplay(console, total_steps))


def time_left(seconds: float) -> str:
    """Return a duration as ``45s``, ``3m05s`` or ``2h07m``."""
    if not math.isfinite(seconds):
        return "?"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


class SilentDisplay:
    """Shows nothing."""

    def note(self, text: str) -> None:
        """Drop the line."""

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Drop the step."""

    def __enter__(self) -> SilentDisplay:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


class GuardedDisplay:
    """Another display, until stdout cannot be written (any more): the run is worth more than its table."""

    def __init__(self, display: Display) -> None:
        self.display: Display = display

    def note(self, text: str) -> None:
        """Show one line."""
        with self._guard():
            self.display.note(text)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Show a step."""
        with self._guard():
            self.display.step(step, values)

    def __enter__(self) -> GuardedDisplay:
        with self._guard():
            self.display.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._guard():
            self.display.__exit__(kind, error, trace)

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SystemExit) as error:  # rich ends the process when a pipe is closed
            self.display = SilentDisplay()
            discard_stdout()
            reason = "its reader has gone" if isinstance(error, BrokenPipeError | SystemExit) else str(error)
            message(f"zerogap: stdout cannot be written ({reason}); the run goes on without it")


@dataclass
class _Pace:
    """Time left, from the newest steps' durations."""

    total_steps: int
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=20))

    def left(self, step: int, values: Mapping[str, float]) -> str:
        self.seconds.append(values.get("time/step_s", math.nan))
        return time_left(sum(self.seconds) / len(self.seconds) * (self.total_steps - step - 1))


class PlainDisplay:
    """One aligned line per step under a heading, for pipes and log files."""

    def __init__(self, console: Console, total_steps: int) -> None:
        self._console = console
        self._pace = _Pace(total_steps)
        self._headed = False

    def note(self, text: str) -> None:
        """Print one line."""
        self._line(printable(text))

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Print the step's line, after a heading the first time."""
        if not self._headed:
            self._line("  ".join(column.title.rjust(column.width) for column in _COLUMNS) + "  left")
            self._headed = True
        cells = (column.cell({**values, "step": step}).rjust(column.width) for column in _COLUMNS)
        self._line("  ".join(cells) + f"  {self._pace.left(step, values)}")

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def _line(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)
        self._console.file.flush()


class LiveDisplay:
    """A table of the newest steps that is redrawn in place."""

    def __init__(self, console: Console, total_steps: int) -> None:
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._pace = _Pace(total_steps)
        self._total = total_steps
        self._rows: deque[dict[str, float]] = deque(maxlen=_ROWS)
        self._accuracy: float | None = None

    def note(self, text: str) -> None:
        """Print one line above the table."""
        self._live.console.print(Text(printable(text)))

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Add the step's row; the caption has the newest accuracy and the time left."""
        self._rows.append({**values, "step": step})
        self._accuracy = values.get("eval/accuracy", self._accuracy)
        accuracy = "" if self._accuracy is None else f" · held-out accuracy {self._accuracy:.3f}"
        caption = f"step {step + 1} of {self._total}{accuracy} · {self._pace.left(step, values)} left"
        table = Table(caption=caption, header_style="bold")
        columns = _fitting(self._live.console.width)
        for column in columns:
            table.add_column(column.title, justify="right", min_width=column.width, no_wrap=True)
        for row in self._rows:
            table.add_row(*(Text(column.cell(row)) for column in columns))
        self._live.update(table, refresh=True)

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()
