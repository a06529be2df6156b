"""Which of all the lines and exits came first and explains the rest."""

from __future__ import annotations

from dataclasses import dataclass

from zerogap.watchdog.events import Evidence, Exit, signal_name
from zerogap.watchdog.scan import Hit
from zerogap.watchdog.seen import Seen

CLUSTER_S = 30.0  # generic exceptions this close together belong to one failure
CRASH_SIGNALS = (4, 6, 7, 8, 11)  # ILL, ABRT, BUS, FPE, SEGV: native code crashed


@dataclass(frozen=True)
class Cause:
    """A named cause with what shows it."""

    id: str
    summary: str
    hint: str = ""
    hit: Hit | None = None
    evidence: tuple[Evidence, ...] = ()
    check: bool = False
    checked: tuple[str, ...] = ()
    verdict: str = ""

    @property
    def known(self) -> bool:
        """Whether it is more than a shrug."""
        return self.id != "unknown"


def first_cause(seen: Seen) -> Cause:
    """Return the first cause of the trouble that the run is in now.

    Physical evidence (the kernel's OOM killer, the driver's XID) goes first, then lines that give a reason, then lines
    that only name a failure, then any exception. Among equals the earliest counts, and lines that no work has followed
    go before lines that work has followed: those the run survived, or a model wrote them.
    """
    exits = sorted(seen.exits, key=lambda item: item.at)
    if (seen.ended is not None and seen.ended.status not in (0, None)) and seen.ended not in exits:
        exits.append(seen.ended)
    killed = [item for item in exits if item.status in (-9, 137) or item.status is None]
    gone = killed or any(hit.rule.id == "ray-actor-died" for hit in seen.symptoms)
    for fact in seen.facts:
        if fact.rule == "out-of-memory-host" and not gone:
            continue
        rule = seen.book.cause(fact.rule)
        assert rule is not None
        return Cause(rule.id, rule.summary.replace("{line}", fact.text), rule.hint, evidence=(fact,))
    hits = _candidates(seen)
    if hits:
        return _from_hit(seen, hits[0])
    crash = next((item for item in exits if item.status is not None and -item.status in CRASH_SIGNALS), None)
    if crash is not None:
        rule = seen.book.cause("segmentation-fault")
        assert rule is not None
        text = f"{crash.name} (pid {crash.pid}) ended {crash.how()}"
        return Cause(rule.id, f"native code crashed: {text}", rule.hint, evidence=(exit_evidence(crash),))
    signalled = next((item for item in exits if item.status in (-9, -15) and not item.by_log), None)
    if signalled is not None and seen.oom_known and not seen.oom_kills:
        text = f"{signalled.name} (pid {signalled.pid}) ended {signalled.how()}"
        return judged(seen, "killed-from-outside", text, (exit_evidence(signalled),))
    notices = [hit for hit in seen.notices.values() if hit.at >= seen.work_at and hit.rule.id == "loop-blocked"]
    if notices:
        return _from_hit(seen, notices[0])
    return Cause("unknown", "no line and no exit names a cause", checked=_checked(seen, exits))


def _candidates(seen: Seen) -> list[Hit]:
    """Return the cause hits, best first."""
    fresh = [hit for hit in seen.causes if hit.at >= seen.work_at]
    pool = fresh or [hit for hit in seen.causes if hit.at >= seen.clocks.get("step", float("-inf"))]
    if not pool:
        return []
    generic = [hit for hit in pool if hit.rule.rank == 2]
    if generic:
        # A run logs exceptions that it handles: only the last cluster of them can be the end of it.
        cluster = [generic[-1]]
        for hit in reversed(generic[:-1]):
            if cluster[-1].at - hit.at > CLUSTER_S:
                break
            cluster.append(hit)
        pool = [hit for hit in pool if hit.rule.rank < 2] + cluster[::-1]
    return sorted(pool, key=lambda hit: (hit.rule.rank, hit.at))


def _from_hit(seen: Seen, hit: Hit) -> Cause:
    rule = hit.rule
    summary = hit.summary().replace("{startup}", seen.startup or "no phase announced")
    return Cause(rule.id, summary, rule.hint, hit, (hit_evidence(hit),), rule.check, verdict=rule.verdict)


def judged(seen: Seen, name: str, more: str = "", evidence: tuple[Evidence, ...] = ()) -> Cause:
    """Return a cause that the judge itself found."""
    entry = seen.book.judged[name]
    return Cause(name, f"{entry.summary}: {more}" if more else entry.summary, entry.hint, evidence=evidence)


def _checked(seen: Seen, exits: list[Exit]) -> tuple[str, ...]:
    """Say what was looked at in vain, instead of listing what it might have been."""
    signals = ", ".join(f"{item.name} {signal_name(-item.status)}" for item in exits if item.status and item.status < 0)
    return (
        f"log lines against {len(seen.book.rules)} rules: no cause",
        f"exit signals: {signals or 'none seen'}",
        f"cgroup oom_kill since the start: {seen.oom_kills}",
        "GPU errors (XID, ECC): none reported" if seen.activity and seen.activity.gpu else "GPU errors: no NVML here",
    )


def hit_evidence(hit: Hit) -> Evidence:
    """Return a hit as a line of evidence."""
    who = f" ({hit.line.speaker})" if hit.line.speaker else ""
    return Evidence(hit.at, f"{hit.source}{who}", hit.line.text[:2000], hit.rule.id)


def exit_evidence(item: Exit) -> Evidence:
    """Return an exit as a line of evidence."""
    pid = f" pid {item.pid}" if item.pid else ""
    words = f": {item.words}" if item.words else ""
    words += f"; its parent lives on: {item.parent}" if item.parent else ""
    return Evidence(item.at, "log" if item.by_log else "processes", f"{item.name}{pid} ended {item.how()}{words}")
