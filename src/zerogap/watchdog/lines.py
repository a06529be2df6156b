"""One log line made readable: ANSI, Ray prefixes, time stamps and repeat marks taken off and kept as fields."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import datetime

LONGEST = 16384  # characters of a line that are looked at; a cause stands near its start

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_RAY = re.compile(
    r"^\((?P<speaker>[\w.:<>\[\]/\-]+(?:\([^)]*\))?(?: \w+)??)(?: pid=(?P<pid>\d+))?(?:, ip=(?P<ip>[\w.:]+))?\)\s*"
)
_RAY_LIKE = re.compile(r"raylet|autoscaler|EngineCore|APIServer|Worker|Actor|Manager|Runner|gcs_server", re.ASCII)
_REPEATED = re.compile(r"\s*\[repeated (?P<times>\d+)x across cluster\].*$")
_DATE = r"(?P<date>(?:\d{4}-)?\d{2}-\d{2})[T ]"
_TIME = r"(?P<time>\d{2}:\d{2}:\d{2})(?:[.,](?P<fraction>\d{1,9}))?(?:Z|[+-]\d{2}:?\d{2})?"
_STAMPS = (
    re.compile(rf"^\[{_DATE}{_TIME}(?:,\d+)?(?: (?P<name>[^\]]{{1,60}}))?\]\s*"),
    re.compile(
        r"^\[?(?:INFO|WARNING|WARN|ERROR|DEBUG|CRITICAL|SUCCESS)\]? "
        rf"{_DATE}{_TIME} (?:\[[^\]]{{1,80}}\] ?|\S+\.py:\d+\]? ?)?"
    ),
    re.compile(rf"^{_DATE}{_TIME}[,\d]*(?: [|-] | )?\s*"),
    re.compile(rf"^\[?{_TIME}(?: (?P<name>[A-Z][\w ]{{0,30}}))?\][:]?\s*"),
    re.compile(rf"^{_TIME}\s+(?:\[[A-Z]+\]\s+)?"),
)
_LEVEL = re.compile(
    r"^(?:\[?(?:INFO|WARNING|WARN|ERROR|DEBUG|CRITICAL|SUCCESS)\]?[\s:|]+(?:\[[^\]]{1,80}\]\s*)?|\[[A-Z]+:\w+\] )"
)
_SPEAKERS = (
    "trainer|engine|orchestrator|inference|api|core|client|server|rollout|driver|router|environment|judge|actor|critic"
)
_WHO = re.compile(rf"^(?P<who>(?:{_SPEAKERS})[\w.\-]*?)(?::\s+|\s+(?=\[|state=|Uvicorn|WARNING|ERROR|INFO))", re.ASCII)
_FILE = re.compile(r"^[\w./\-]+\.(?:py|cc|cpp|cu|hpp):\d+\]?(?: -|:)?\s+")
_CONTINUES = "For more information check:"


@dataclass(frozen=True, slots=True)
class Line:
    """A log line without its decorations."""

    text: str  # the message
    speaker: str = ""  # Ray's actor name, the name in Miles' prefix, the rank in SGLang's
    pid: int | None = None
    ip: str = ""
    stamp: float | None = None  # seconds since the epoch, or since midnight when the line carries no date
    repeats: int = 1  # how many processes printed it, where Ray says so
    dated: bool = True


def parse_line(raw: bytes | str, year: int | None = None) -> Line:
    """Take a raw line apart; invalid UTF-8 is replaced, anything over ``LONGEST`` characters is cut."""
    text = raw.decode("utf-8", "replace") if isinstance(raw, bytes) else raw
    text = text[:LONGEST]
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    text = text.rstrip("\r\n \t")
    if "\r" in text:  # a progress bar redraws its line: the last drawing stands
        text = text[text.rindex("\r") + 1 :]
    speaker, pid, ip, repeats = "", None, "", 1
    if text.startswith("(") and (found := _RAY.match(text)) is not None:
        name = found["speaker"]
        if found["pid"] or _RAY_LIKE.search(name):
            speaker, ip = name, found["ip"] or ""
            pid = int(found["pid"]) if found["pid"] else None
            text = text[found.end() :]
    if text.endswith("]") or "across cluster]" in text:
        found = _REPEATED.search(text)
        if found is not None:
            repeats, text = int(found["times"]), text[: found.start()]
    stamp, dated = None, True
    if (found := _WHO.match(text)) is not None:
        speaker, text = speaker or found["who"], text[found.end() :]
    for _ in range(2):  # a launcher's stamp may stand before the program's own
        for form in _STAMPS:
            found = form.match(text)
            if found is not None:
                fields = found.groupdict()
                moment = _moment(fields.get("date"), fields["time"], fields.get("fraction"), year)
                if moment is not None:
                    stamp, dated = moment
                speaker = speaker or (fields.get("name") or "").strip()
                text = text[found.end() :]
                break
        else:
            break
    text = _LEVEL.sub("", text.lstrip(), count=1)
    if (found := _WHO.match(text)) is not None:
        speaker, text = speaker or found["who"], text[found.end() :]
    text = _FILE.sub("", text, count=1)
    return Line(text.strip(), speaker, pid, ip, stamp, repeats, dated)


def _moment(date: str | None, time: str, fraction: str | None, year: int | None) -> tuple[float, bool] | None:
    part = float(f"0.{fraction}") if fraction else 0.0
    hours, minutes, seconds = (int(piece) for piece in time.split(":"))
    if hours > 23 or minutes > 59 or seconds > 60:
        return None
    if date is None:
        return hours * 3600 + minutes * 60 + seconds + part, False
    if len(date) == 5:
        date = f"{year or datetime.now().year}-{date}"
    try:
        return datetime.fromisoformat(f"{date}T{time}").timestamp() + part, True
    except ValueError:
        return None


class Joiner:
    """Puts the two physical lines of an httpx retry together again, per source and speaker."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str, int | None], Line] = {}

    def push(self, source: str, line: Line) -> list[Line]:
        """Return the lines that are complete now; a first half is held until its second half or any other line."""
        key = (source, line.speaker, line.pid)
        held = self._held.pop(key, None)
        if held is not None and line.text.startswith(_CONTINUES):
            return [replace(held, text=f"{held.text} {line.text}", repeats=max(held.repeats, line.repeats))]
        ready = [held] if held is not None else []
        if line.text.startswith("Error: ") and line.text.endswith("'"):
            self._held[key] = line
            return ready
        return [*ready, line]

    def flush(self, source: str) -> list[Line]:
        """Return what is still held for ``source``."""
        keys = [key for key in self._held if key[0] == source]
        return [self._held.pop(key) for key in keys]
