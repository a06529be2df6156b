"""Reading a log from its beginning: to judge one that is over, or to catch up with one that goes on."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from zerogap.console import message, out, print_json, printable
from zerogap.errors import ExitCode, UsageError
from zerogap.watchdog import judge
from zerogap.watchdog.budgets import Budgets
from zerogap.watchdog.conclude import conclude
from zerogap.watchdog.events import Verdict
from zerogap.watchdog.follow import READ
from zerogap.watchdog.gap_rule import GapRule
from zerogap.watchdog.incident import block, clock
from zerogap.watchdog.lint import lint
from zerogap.watchdog.redact import redact, redact_tree
from zerogap.watchdog.rules import RuleBook, load_rules
from zerogap.watchdog.scan import Hit, Scanner, number
from zerogap.watchdog.seen import Seen

if TYPE_CHECKING:
    from zerogap.watchdog.options import Options

STEP_S = 1e-6  # between lines that carry no time of their own: their order is all that is known
CHATTER = ("progress", "metric")
MOST_HITS = 200_000


_HALF_DAY = 43200.0


class Stamper:
    """Gives each line of one log a time: its own stamp, else just after the line before it.

    Stamps without a date only go forward: one that falls back by half a day is past midnight. The last of them is the
    newest that is not after the file's own time.

    Args:
        modified: when the file was last written.
        times_of_day: its stamps without a date, in order, in seconds since midnight.
    """

    def __init__(self, modified: float, times_of_day: Sequence[float]) -> None:
        day = datetime.fromtimestamp(modified).replace(hour=0, minute=0, second=0, microsecond=0)
        nights = sum(later < earlier - _HALF_DAY for earlier, later in pairwise(times_of_day))
        if times_of_day and day.timestamp() + times_of_day[-1] > modified + 60:
            nights += 1
        self._midnight, self._previous, self._last = day.timestamp() - 2 * _HALF_DAY * nights, 0.0, float("-inf")

    def at(self, hit_stamp: float | None, dated: bool) -> float:
        """Return the time (seconds since the epoch) of the next line."""
        if hit_stamp is not None:
            if not dated:
                if hit_stamp < self._previous - _HALF_DAY:
                    self._midnight += 2 * _HALF_DAY
                self._previous = hit_stamp
            moment = hit_stamp if dated else self._midnight + hit_stamp
            self._last = max(self._last + STEP_S, moment)
        elif self._last == float("-inf"):
            self._last = float("-inf")
            return float("-inf")  # before the first stamp: dated with it
        else:
            self._last += STEP_S
        return self._last


def read_log(scanner: Scanner, name: str, path: Path, end: int | None = None) -> list[Hit]:
    """Return the hits of one log file up to ``end`` bytes, with times.

    Raises:
        UsageError: when the file cannot be read.
    """
    hits: list[Hit] = []
    try:
        with path.open("rb") as file:
            modified = os.fstat(file.fileno()).st_mtime
            left = os.fstat(file.fileno()).st_size if end is None else end
            raws: list[bytes] = []
            while left > 0 and (data := file.read(min(READ, left))):
                left -= len(data)
                raws += scanner.feed(name, data)
                if len(raws) > MOST_HITS:
                    raise UsageError(f"--log {path}: more than {MOST_HITS} lines of interest; give the last part of it")
            if end is None:
                raws += scanner.finish(name)
    except OSError as error:
        raise UsageError(f"--log {path}: {error.strerror}; give a log file") from None
    for raw in raws:
        hits += scanner.match(name, raw, 0.0)
    hits += scanner.flush(name, 0.0)
    stamper = Stamper(modified, [h.line.stamp for h in hits if h.line.stamp is not None and not h.line.dated])
    times = [stamper.at(hit.line.stamp, hit.line.dated) for hit in hits]
    first = next((at for at in times if at > float("-inf")), modified)
    return [
        Hit(
            hit.rule,
            hit.line,
            hit.source,
            hit.fields,
            at if at > float("-inf") else first - STEP_S * (len(hits) - place),
        )
        for place, (hit, at) in enumerate(zip(hits, times, strict=True))
    ]


def replay(
    book: RuleBook, scanner: Scanner, logs: Sequence[tuple[str, Path]], patience: float, gap: str | None = None
) -> tuple[Seen, float]:
    """Read finished logs together in the order of their times; return what they show and the time of the last line."""
    hits = sorted((hit for name, path in logs for hit in read_log(scanner, name, path)), key=lambda hit: hit.at)
    modified = max((path.stat().st_mtime for _, path in logs), default=time.time())
    began = hits[0].at if hits else modified
    seen = Seen(book, began, Budgets().scaled(patience), processes=False)
    seen.gap = GapRule(gap) if gap else None
    for hit in hits:
        seen.hit(hit)
        if hit.rule.kind in CHATTER:
            seen.talked(hit.at)
    last = max([hit.at for hit in hits], default=modified)
    return seen, last


def review_logs(
    logs: Sequence[tuple[str, Path]], rules: Sequence[Path] = (), patience: float = 1.0, gap: str | None = None
) -> tuple[Verdict | None, Seen, Scanner]:
    """Judge logs that are over."""
    book = load_rules(rules)
    scanner = Scanner(book)
    seen, last = replay(book, scanner, logs, patience, gap)
    last += number(seen.info.get("silence"))
    verdict = conclude(seen, last)
    if verdict is None and (seen.open_timers or seen.edges or seen.open_pairs):
        verdict = judge.check(seen, time.time())
    for launch in (seen.info[name] for name in ("launch", "flags") if name in seen.info):
        for warning in lint([launch]):
            message(f"zerogap: warning {redact(warning)}")
    return verdict, seen, scanner


def review(options: Options, as_json: bool) -> int:
    """``zerogap watch --once``: say what ended or stopped the run whose logs these are."""
    table = options.table()
    if not table["logs"]:
        raise UsageError("--once judges logs that are there; give them with --log FILE")
    logs = [(name, Path(path)) for name, path in table["logs"]]
    for _, path in logs:
        if not path.is_file():
            raise UsageError(f"--log {path}: {'not a file' if path.exists() else 'no such file'}; give a log file")
    verdict, seen, scanner = review_logs(logs, options.rules, options.patience, options.gap)
    told = {hit.rule.id: hit for hit in (*seen.notices.values(), *seen.symptoms) if hit.rule.hint}
    notices = [f"{name}: {hit.summary()} {hit.rule.hint}" for name, hit in told.items()]
    if verdict is not None:
        code = ExitCode.DOES_NOT_HOLD
    else:
        code = ExitCode.HOLDS if seen.worked or (scanner.known and seen.ready) else ExitCode.UNKNOWN
    counts = {"lines": scanner.lines, "matched": scanner.known, "skipped": scanner.skipped}
    if as_json:
        body = verdict.table() if verdict else {"verdict": None, "notices": notices, "phase": seen.phases.name}
        print_json("zerogap.watch", 1, redact_tree({**body, "log": counts}))
        return int(code)
    console = out()
    if verdict is None:
        said = (
            "no trouble found" if code == ExitCode.HOLDS else "unknown: no line tells whether the run worked or failed"
        )
        console.print(f"{said} ({scanner.lines} lines, {scanner.known} of them known)")
    else:
        console.print(f"{verdict.name}: {verdict.cause}", style="bold")
        console.print(printable(redact(verdict.summary)))
        if verdict.hint:
            console.print(f"to do: {verdict.hint}")
        if verdict.circle:
            console.print(f"who waits for whom: {printable(' -> '.join(verdict.circle))}")
        lines = [f"{clock(item.at)}  {item.source}: {item.text[:200]}" for item in verdict.evidence]
        console.print(redact(block("\n".join(lines))), soft_wrap=True)
        for title, items in (("checked", verdict.checked), ("consequence", verdict.victims)):
            for item in items:
                console.print(f"{title}: {printable(redact(item))}")
        for side, text in verdict.sides.items():
            console.print(f"last word of the {side}: {printable(redact(text))[:200]}")
    for notice in notices:
        console.print(f"notice: {printable(redact(notice))}")
    return int(code)
