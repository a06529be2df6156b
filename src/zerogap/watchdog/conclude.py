"""Judging logs that are all there is: their end stands for the end of the run."""

from __future__ import annotations

from zerogap.watchdog.cause import first_cause
from zerogap.watchdog.events import Verdict
from zerogap.watchdog.judge import asleep, check, spinning, waiting
from zerogap.watchdog.seen import Seen
from zerogap.watchdog.verdicts import make_verdict


def conclude(seen: Seen, now: float) -> Verdict | None:
    """Judge a finished log: whatever stands at its end without progress after it is what ended the run."""
    verdict = check(seen, now)
    if verdict is not None:
        return verdict
    for question in (waiting, spinning, asleep):
        verdict = question(seen, now, patient=False)
        if verdict is not None:
            return verdict
    fresh = [hit for hit in seen.causes if hit.at >= seen.work_at]
    gone_by_log = [item for item in seen.exits if item.by_log and item.status is None]
    failed = [item for item in seen.exits if item.at >= seen.work_at and (item.abnormal or item in gone_by_log)]
    symptoms = [hit for hit in seen.symptoms if hit.at >= seen.work_at]
    cause = first_cause(seen)
    retried = [hit for hit in symptoms if hit.rule.retry]
    gone = failed or any(hit.rule.id in ("ray-actor-died", "scheduler-exception", "death-signal") for hit in symptoms)
    busy = seen.busy_at > max((hit.at for hit in symptoms), default=0.0) - 60 and seen.clocks.get("token")
    if not fresh and not failed and not (len(retried) >= 3) and not (gone and not busy):
        return None
    if not seen.started:
        was_up = gone_by_log or cause.id in ("out-of-memory-host", "engine-own-watchdog")
        name = "died" if gone and was_up else "failed-to-start"
    else:
        name = "died" if gone else "unresponsive" if retried else "stalled"
    since = min([hit.at for hit in (*fresh, *symptoms)] + [item.at for item in failed], default=now)
    summary = "the log ends in a failure that no progress follows"
    return make_verdict(seen, now, cause.verdict or name, cause, since, summary, ends=tuple(failed))
