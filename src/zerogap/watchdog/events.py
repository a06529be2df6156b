"""What the judge is told, each with the time it happened (seconds since the epoch), and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Exit:
    """A process of the run ended."""

    at: float
    pid: int
    name: str
    role: str  # engine, router, trainer, helper, other, or who a log line names
    status: int | None  # exit code, minus the signal, or None when it could not be seen
    age_s: float = 0.0  # how long it had lived
    words: str = ""  # its last line, where a log line gives it
    by_log: bool = False  # only a log line says so
    parent: str = ""  # the living parent, which may not have noticed

    @property
    def abnormal(self) -> bool:
        """Whether the exit is known to be a failure (a SIGTERM or Ctrl-C is someone's order, not a failure)."""
        return self.status is not None and self.status not in (0, -15, -2, -1, 143, 130, 129)

    def how(self) -> str:
        """Say how it ended in words."""
        if self.status is None:
            return "with a status that could not be seen"
        if self.status < 0:
            return f"by signal {-self.status} ({signal_name(-self.status)})"
        return f"with exit code {self.status}"


@dataclass(frozen=True)
class Probe:
    """One question put to an engine over HTTP."""

    at: float
    url: str
    level: str  # what was asked: socket, health or generate
    ok: bool
    detail: str = ""  # one line: what came back
    refused: bool = False  # nobody listens there
    changed: bool = False  # somebody else answers than before
    busy: bool = False  # the engine says that it is at work, or its counters move


@dataclass(frozen=True)
class Activity:
    """How busy the run's processes and GPUs were since the last sample."""

    at: float
    cores: float | None  # CPU cores in use by the run, None when its processes are not seen
    gpu: tuple[float, ...] = ()  # utilisation per GPU in percent
    bandwidth: tuple[float, ...] = ()  # memory controller utilisation per GPU in percent

    @property
    def quiet(self) -> bool:
        """Neither CPU nor GPU do anything worth the name."""
        return self.cores is not None and self.cores < 0.2 and all(value < 5 for value in self.gpu)

    @property
    def spinning(self) -> bool:
        """GPUs are busy without touching their memory: a kernel that waits."""
        return bool(self.gpu) and bool(self.bandwidth) and max(self.gpu) >= 80 and max(self.bandwidth) <= 1


@dataclass(frozen=True)
class Evidence:
    """One line of the incident: when, where it was seen, and what."""

    at: float
    source: str
    text: str
    rule: str = ""


@dataclass(frozen=True)
class Verdict:
    """What is wrong with the run, since when, and what shows it."""

    name: str
    cause: str
    at: float
    since: float  # when the trouble began
    phase: str
    summary: str
    hint: str = ""
    evidence: tuple[Evidence, ...] = ()
    circle: tuple[str, ...] = ()  # who waits for whom, first name repeated at the end if it closes
    sides: dict[str, str] = field(default_factory=dict)  # the last thing each side said
    victims: tuple[str, ...] = ()  # processes that ended because of it
    notices: tuple[str, ...] = ()
    checked: tuple[str, ...] = ()  # what was looked at, where the cause is unknown
    check: bool = False  # `zerogap check` can say more

    def table(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "verdict": self.name,
            "cause": self.cause,
            "at": self.at,
            "since": self.since,
            "phase": self.phase,
            "summary": self.summary,
            "hint": self.hint,
            "evidence": [
                {"at": item.at, "source": item.source, "text": item.text, "rule": item.rule} for item in self.evidence
            ],
            "waiting_circle": list(self.circle),
            "sides": dict(self.sides),
            "victims": list(self.victims),
            "notices": list(self.notices),
            "checked": list(self.checked),
        }


def signal_name(number: int) -> str:
    """Return ``"SIGKILL"`` for 9."""
    import signal

    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
