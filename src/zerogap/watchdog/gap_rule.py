"""The gap rule: step lines are judged as ``zerogap gap --follow`` does, from step 0 on, when a range was asked for."""

from __future__ import annotations

from zerogap.errors import ExitCode, UsageError, nearest

ZERO = "zero"  # a bit-exact contract: any gap is a fault


def require_range(name: str | None) -> None:
    """Refuse a range that does not exist.

    Raises:
        UsageError: naming the nearest ones.
    """
    from zerogap.gap.baselines import baselines

    known = [ZERO, *(baseline.name for baseline in baselines())]
    if name is not None and name not in known:
        raise UsageError(f"--gap {name}: no such range{nearest(name, known)} (zerogap gap --baselines lists them)")


class GapRule:
    """Remembers the gap of every step that a log shows.

    Args:
        name: a healthy range of ``zerogap gap --baselines``, or ``zero``.
    """

    def __init__(self, name: str) -> None:
        from zerogap.gap.judge import Options
        from zerogap.gap.readers.text_log import LogParser

        self._zero = name == ZERO
        self._options = Options(baseline=None if self._zero else name)
        self._parser = LogParser("log")

    def feed(self, text: str) -> str | None:
        """Take in a step's line; return what is wrong when the gap is out of its range now, else None."""
        from zerogap.gap.follow import status

        self._parser.feed(text.encode() + b"\n")
        made = self._parser.result.series.build("log")
        series = next((s for s in made if s.judged()), None)
        if series is None:
            return None
        try:
            state, said = status(series, self._options, self._zero)
        except UsageError:  # the range is one of another quantity: nothing is known, and unlike things are not compared
            return None
        return said.strip() if state == ExitCode.DOES_NOT_HOLD else None
