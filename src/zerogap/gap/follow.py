"""A live log: one status line that is rewritten, and an end when the gap leaves its range."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from zerogap.console import printable
from zerogap.errors import ExitCode, UsageError
from zerogap.gap.baselines import outside, pick
from zerogap.gap.judge import Options
from zerogap.gap.readers.text_log import LogParser
from zerogap.gap.series import Series

CONSECUTIVE = 2  # steps out of range that end the watch; one is enough when it is far out
FAR = 1.5


def new_lines(path: Path, idle: Callable[[], bool], pause: float = 0.5) -> Iterator[bytes | None]:
    """Yield complete lines as they are written; None when there is nothing new. A replaced or cut file starts again.

    Args:
        path: the log.
        idle: called when nothing is new; false ends the watch.
        pause: seconds between looks.
    """
    position, rest, inode = 0, b"", None
    while True:
        try:
            stat = path.stat()
            if stat.st_ino != inode or stat.st_size < position:
                position, rest, inode = 0, b"", stat.st_ino
            with path.open("rb") as file:
                file.seek(position)
                block = file.read(1 << 22)
        except OSError as error:
            raise UsageError(f"{path}: cannot be read: {error.strerror}; check the path") from None
        position += len(block)
        parts = (rest + block).split(b"\n")
        rest = parts.pop()
        yield from parts
        if not block:
            yield None
            if not idle():
                return
            time.sleep(pause)


def follow(path: Path, options: Options, *, seconds: float | None = None, contract: bool = False) -> ExitCode:
    """Watch a log until it leaves the range, ``seconds`` pass without a new line, or Ctrl-C.

    Returns:
        1 when out of range, 0 when the last state was in range, 3 when nothing could be judged.
    """
    parser = LogParser(str(path))
    last = time.monotonic()

    def idle() -> bool:
        return seconds is None or time.monotonic() - last < seconds

    state = ExitCode.UNKNOWN
    shown = 0
    terminal = sys.stderr.isatty()
    for line in new_lines(path, idle):
        if line is not None:
            last = time.monotonic()
            parser.feed(line + b"\n")
            continue
        made = parser.result.series.build(path.name)
        series = next((s for s in made if s.judged()), None)
        if series is None or parser.result.metric_lines == shown:
            continue
        shown = parser.result.metric_lines
        state, text = status(series, options, contract)
        text = printable(text)
        sys.stderr.write(f"\r\x1b[2K{text}" if terminal else f"{text}\n")
        sys.stderr.flush()
        if state == ExitCode.DOES_NOT_HOLD:
            break
    if terminal:
        sys.stderr.write("\n")
    return state


def status(series: Series, options: Options, contract: bool) -> tuple[ExitCode, str]:
    """Return the state after the newest steps, as exit code and one line."""
    quantity = series.judged()
    assert quantity is not None
    rows, values = series.finite(quantity)
    if not len(values):
        return ExitCode.UNKNOWN, f"{series.label}: no finite value yet"
    head = f"{series.label}  step {series.steps[rows[-1]]}  {quantity} {values[-1]:.4g}"
    if contract:
        if (values != 0).any():
            step = int(series.steps[rows[int((values != 0).argmax())]])
            return ExitCode.DOES_NOT_HOLD, f"{head}  not 0 at step {step}: the contract does not hold"
        return ExitCode.HOLDS, f"{head}  zero"
    if not values.any():
        return ExitCode.UNKNOWN, f"{head}  exactly 0 without a contract: metric broken, or name the contract"
    baseline = pick(quantity, name=options.baseline, gpu=options.gpu, model=options.model)
    if baseline is None:
        return ExitCode.UNKNOWN, f"{head}  no baseline for it"
    out = outside(values, baseline)
    ends = out[-CONSECUTIVE:]
    if (len(ends) == CONSECUTIVE and ends.all()) or values[-1] > FAR * baseline.high:
        return ExitCode.DOES_NOT_HOLD, f"{head}  out of range {baseline.low:g} to {baseline.high:g} ({baseline.name})"
    return ExitCode.HOLDS, f"{head}  in range {baseline.low:g} to {baseline.high:g} ({baseline.name})"
