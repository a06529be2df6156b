"""Putting a verdict together: the cause, what shows it, who said what last."""

from __future__ import annotations

from zerogap.watchdog.cause import Cause, exit_evidence, hit_evidence
from zerogap.watchdog.events import Evidence, Exit, Verdict
from zerogap.watchdog.scan import Hit
from zerogap.watchdog.seen import Seen

ENGINE_ROLES = ("engine", "router")
MOST_EVIDENCE = 25


def retried(seen: Seen, since: float) -> list[Hit]:
    """Return the failed and repeated requests since ``since``."""
    return [hit for hit in seen.symptoms if hit.rule.retry and hit.at >= since]


def make_verdict(
    seen: Seen,
    now: float,
    name: str,
    cause: Cause,
    since: float,
    summary: str,
    facts: tuple[Evidence, ...] = (),
    *,
    ends: tuple[Exit, ...] = (),
    way: tuple[str, ...] = (),
) -> Verdict:
    """Return a verdict with its evidence: the cause's, ``facts``, the processes that ended, and lines around it.

    Args:
        seen: what has been seen of the run.
        now: when it is judged.
        name: the verdict.
        cause: the first cause.
        since: when the trouble began.
        summary: what is wrong, in one line.
        facts: further evidence.
        ends: processes whose end belongs to it.
        way: who waits for whom.
    """
    symptoms = [hit for hit in seen.symptoms if hit.at >= min(since, now) - 60]
    lines = [*cause.evidence, *facts, *(exit_evidence(item) for item in ends)]
    lines += [hit_evidence(hit) for hit in seen.causes if hit.at >= seen.work_at][:8]
    lines += [hit_evidence(hit) for hit in (*symptoms[:3], *symptoms[-3:])]
    unique = sorted({(item.text, item.source): item for item in reversed(lines)}.values(), key=lambda item: item.at)
    sides = {side: hit.line.text[:300] for side, hit in seen.sides.items()}
    for timer, (at, who) in seen.open_timers.items():
        sides[who or "trainer"] = f"inside {timer} for {now - at:.0f} s"
    if seen.ready and "engine" in sides and not seen.worked:
        sides["engine"] = f"idle since: {sides['engine']}"
    said = f"{summary}; cause: {cause.summary}" if cause.known else summary
    victims = tuple(
        f"{hit.line.speaker or hit.rule.side or 'a process'}: {hit.line.text[:120]}"
        for hit in symptoms
        if hit.rule.id in ("death-signal", "scheduler-exception", "ray-actor-died")
    )
    return Verdict(
        name=name,
        cause=cause.id,
        at=now,
        since=since,
        phase=seen.phases.name,
        summary=said,
        hint=cause.hint,
        evidence=tuple(unique[:MOST_EVIDENCE]),
        circle=way,
        sides=sides,
        victims=tuple(dict.fromkeys(victims)),
        notices=tuple(hit.summary() for hit in seen.notices.values()),
        checked=cause.checked,
        check=cause.check,
    )
