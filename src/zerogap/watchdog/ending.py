"""Judging a run that ended by itself."""

from __future__ import annotations

from zerogap.watchdog.cause import Cause, first_cause, judged
from zerogap.watchdog.events import Evidence, Verdict
from zerogap.watchdog.seen import Seen
from zerogap.watchdog.verdicts import make_verdict

ORDERED_S = 600.0  # a run that ends this soon after a signal from outside ends on order (it may save first)


def ended(seen: Seen, now: float) -> Verdict | None:
    """Judge a command that ended: nothing for success and for someone's own Ctrl-C."""
    end = seen.ended
    assert end is not None
    cause = first_cause(seen)
    if cause.verdict == "preempted" and end.status != 0:
        return make_verdict(
            seen, now, "preempted", cause, end.at, f"the run was preempted: {cause.summary}", ends=(end,)
        )
    asked = seen.interrupted is not None and end.at - seen.interrupted[1] < ORDERED_S
    if end.status in (0, -2, 130) or asked:
        return None
    name = "died" if seen.started or end.age_s > seen.phases.budget() else "failed-to-start"
    if cause.verdict == "lost-peer":
        name = cause.verdict
    ends = tuple(item for item in seen.exits if item.abnormal)
    return make_verdict(seen, now, name, cause, end.at, f"the command ended {end.how()}", ends=(*ends, end))


def preempted(seen: Seen, now: float, scheduler: str) -> Verdict:
    """Judge a run whose scheduler sent SIGTERM."""
    name = "preempted-slurm" if scheduler == "slurm" else "preempted-kubernetes"
    rule = seen.book.cause(name)
    assert rule is not None
    fact = Evidence(now, "signals", f"SIGTERM arrived while the run was under {scheduler}", rule.id)
    cause = Cause(rule.id, f"{scheduler} told the run to end", rule.hint, evidence=(fact,))
    return make_verdict(seen, now, "preempted", cause, now, "the scheduler ended the run")


def pump_killed(seen: Seen, now: float) -> Verdict:
    """Judge a run whose pump was killed: its next line of output will break it."""
    end = seen.ended
    assert end is not None
    return make_verdict(seen, now, "died", judged(seen, "pump-killed"), end.at, "the pump was killed", ends=(end,))
