"""The judgement: from what has been seen of a run to one verdict, or none.

A log line alone never stops a run, because models write text into logs. It takes an exit, a failed probe or missing
progress; the line then names the cause.
"""

from __future__ import annotations

from collections.abc import Callable

from zerogap.watchdog.answers import Engine
from zerogap.watchdog.cause import Cause, first_cause, hit_evidence, judged
from zerogap.watchdog.ending import ended
from zerogap.watchdog.events import Evidence, Exit, Verdict
from zerogap.watchdog.scan import Hit, moment
from zerogap.watchdog.seen import Seen
from zerogap.watchdog.verdicts import ENGINE_ROLES, make_verdict, retried
from zerogap.watchdog.waits import circle


def check(seen: Seen, now: float) -> Verdict | None:
    """Return what is wrong with a run that goes on, or that has just ended by itself; None while nothing is."""
    if seen.ended is not None:
        return ended(seen, now)
    questions: tuple[Callable[[Seen, float], Verdict | None], ...] = (
        _bad_metric,
        _dead_process,
        _failed_probes,
        _fatal_then_quiet,
        _permanent,
        _retries,
        waiting,
        spinning,
        asleep,
        _heartbeat,
        _stalled,
    )
    for question in questions:
        verdict = question(seen, now)
        if verdict is not None:
            return verdict
    return None


# -- a run that goes on -------------------------------------------------------------------------------------------


def _dead_process(seen: Seen, now: float) -> Verdict | None:
    for item in seen.exits:
        if item.by_log or item.role in ("helper", "ray"):
            continue
        limit = _patience(seen, item, now)
        if limit is None or now - item.at < limit:
            continue
        if item.role in ENGINE_ROLES and any(at > item.at for at in seen.engine_starts):
            continue  # another engine took its place
        if seen.work_at > item.at + 1.0 and not retried(seen, item.at):
            continue  # the run works on without it
        name = "died" if seen.started else "failed-to-start"
        what = (
            "the engine"
            if item.role in ENGINE_ROLES
            else f"a {item.role} process"
            if item.role != "other"
            else "a child"
        )
        summary = f"{what} ({item.name}, pid {item.pid}) ended {item.how()} and the run waits for it"
        cause = first_cause(seen)
        taken = next((engine.last for engine in seen.engines.values() if engine.changed), None)
        if not cause.known and taken is not None:
            cause = judged(seen, "port-taken-over", taken.detail)
        return make_verdict(seen, now, name, cause, item.at, summary, ends=(item,))
    return None


def _patience(seen: Seen, item: Exit, now: float) -> float | None:
    """Return how long (s) after its end a dead process is held against the run; None: it is not, for now."""
    budgets = seen.budgets
    failing = bool(retried(seen, item.at - 1))
    refused = any(
        engine.last is not None and engine.last.refused and engine.last.at >= item.at
        for engine in seen.engines.values()
    )
    named = any(hit.at >= item.at - 60 and hit.at >= seen.work_at and hit.rule.rank < 2 for hit in seen.causes)
    quiet = min(seen.quiet_for(now), now - item.at)
    if item.role in ENGINE_ROLES:
        if seen.phases.name in ("checkpoint", "ended"):
            return None  # engines are put away before the last save
        limit: float | None = None
        if seen.phases.needs_engine or quiet >= 2 * budgets.exit_s:
            failed = item.abnormal or (item.status is None and named)
            if failed or failing or refused:
                limit = budgets.exit_s
            elif quiet >= 5 * budgets.exit_s:
                limit = 5 * budgets.exit_s
        elif item.abnormal or failing or refused:
            limit = budgets.exit_s if failing else budgets.busy_exit_s
        return max(limit, budgets.recover_s) if limit is not None and seen.fault_tolerant else limit
    if item.role == "engine-child":  # an engine starts compilers and shells, too: those are young
        return budgets.exit_s if item.abnormal and item.age_s >= 10 and (failing or refused or named) else None
    # Sandboxes and compilers come and go with any status. Anyone else counts while the run starts, or with an age.
    if named and (failing or quiet >= budgets.exit_s) and (not seen.worked or item.age_s >= 5):
        return budgets.exit_s if not seen.worked or item.abnormal else None
    if item.abnormal and item.age_s >= 30 and quiet >= 20 * budgets.exit_s:
        return 20 * budgets.exit_s
    return None


def _failed_probes(seen: Seen, now: float, excuse: bool = True) -> Verdict | None:
    budgets = seen.budgets
    for url, engine in seen.engines.items():
        last = engine.last
        if last is None or engine.fails < budgets.probe_fails:
            continue
        fact = Evidence(last.at, url, f"{engine.fails} probes in a row failed, the last ({last.level}): {last.detail}")
        if engine.answered_at is None and engine.worked_at is None:
            # Never up: connection refused and 503 are what a loading engine answers, for as long as starting may take.
            if seen.started or now - seen.hard_at < seen.phases.budget() or seen.active(now):
                continue
            cause = first_cause(seen)
            return make_verdict(
                seen, now, "failed-to-start", cause, engine.failing_since, f"the engine at {url} never came up", (fact,)
            )
        if excuse and _excused(seen, engine, now):
            continue
        cause = first_cause(seen)
        if not cause.known and engine.changed >= 2:
            cause = judged(seen, "port-taken-over", last.detail)
        elif not cause.known and seen.stopped:
            cause = judged(seen, "engine-stopped", ", ".join(seen.stopped[:3]))
        elif not cause.known and last.level == "generate" and engine.answered_at and not last.refused:
            cause = judged(seen, "health-without-work", last.detail)
        dead = [item for item in seen.exits if item.role in ENGINE_ROLES and item.at >= engine.failing_since - 10]
        name = "died" if dead and engine.changed < 2 else "unresponsive"
        summary = f"the engine at {url} does not work any more ({last.detail})"
        return make_verdict(seen, now, name, cause, engine.failing_since, summary, (fact,), ends=tuple(dead))
    return None


def _excused(seen: Seen, engine: Engine, now: float) -> bool:
    """Whether failing probes have a healthy reason: long prefill, offloaded memory, a weight update."""
    last = engine.last
    assert last is not None
    if engine.changed >= 2:
        return False
    if last.refused:
        # Nobody listens: only a trainer that computes meanwhile, or saves, may go on without noticing.
        if seen.phases.name in ("checkpoint", "ended"):
            return now - seen.phases.since < seen.phases.budget()
        idle = seen.phases.needs_engine or not seen.active(now)
        return not idle and now - engine.failing_since < seen.budgets.busy_exit_s
    in_pause = bool(seen.open_pairs) or seen.phases.name in ("weight update", "first sync", "checkpoint")
    if in_pause and now - max(engine.failing_since, seen.phases.since) < seen.phases.budget():
        return True
    # A busy scheduler keeps a request waiting; a server that does not even answer its health check has less credit.
    credit = 30.0 if last.level == "socket" else 60.0
    recent = now - max(engine.busy_at, seen.busy_at, seen.clocks.get("token", 0.0)) < credit * seen.budgets.scale
    return recent and now - engine.failing_since < seen.phases.budget()


def _fatal_then_quiet(seen: Seen, now: float) -> Verdict | None:
    """A fatal line, and then nothing moves: at once while the run starts, later only after a long silence."""
    budgets = seen.budgets
    fresh = [hit for hit in seen.causes if hit.at > seen.work_at]
    for hit in fresh:
        since = max(hit.at, seen.clocks.get("startup", 0.0))
        if seen.processes:
            limit = budgets.quiet_s if hit.rule.fatal and not seen.worked else 10 * budgets.quiet_s
            silent = min(seen.quiet_for(now), now - since) >= limit
        else:
            # Without sight of the processes, failing requests after the line are the other half of the proof.
            silent = not seen.worked and hit.rule.rank < 2 and now - since >= budgets.unseen_s
            silent = silent and (bool(retried(seen, hit.at)) or now - seen.talked_at >= budgets.unseen_s)
        if silent and hit.rule.rank < 2:
            name = ("unresponsive" if retried(seen, hit.at) else "stalled") if seen.started else "failed-to-start"
            return make_verdict(seen, now, name, first_cause(seen), hit.at, "after a fatal line nothing moves any more")
    return None


def _permanent(seen: Seen, now: float) -> Verdict | None:
    """The same refusal again and again (a 4xx, a restart that cannot fit): waiting longer cannot change it."""
    for hit in seen.causes:
        if hit.rule.identical <= 1 or hit.at < seen.work_at:
            continue
        last = seen.last_reading(hit)
        if now - last.at > 60 or last.at - hit.at < seen.budgets.exit_s or seen.clocks.get("startup", 0.0) > hit.at:
            continue
        name = ("unresponsive" if seen.started else "failed-to-start") if not hit.rule.verdict else hit.rule.verdict
        return make_verdict(seen, now, name, first_cause(seen), hit.at, "the same refusal comes back each time")
    return None


def _retries(seen: Seen, now: float) -> Verdict | None:
    budgets = seen.budgets
    hits = retried(seen, seen.hard_at)
    if len(hits) < budgets.retries or now - hits[-1].at > 60 or hits[-1].at - hits[0].at < budgets.retry_s:
        return None
    if not seen.started and all(hit.rule.starting or not seen.causes for hit in hits):
        return None  # an engine that loads refuses connections
    if any(engine.worked_at and now - engine.worked_at < budgets.retry_s for engine in seen.engines.values()):
        return None
    name = "unresponsive" if seen.started else "failed-to-start"
    summary = (
        f"requests to the engine have failed {len(hits)} times in {hits[-1].at - hits[0].at:.0f} s and are repeated"
    )
    return make_verdict(seen, now, name, first_cause(seen), hits[0].at, summary)


def waiting(seen: Seen, now: float, patient: bool = True) -> Verdict | None:
    """Someone waits in a circle, or for someone who is gone; without ``patient`` at once."""
    budgets = seen.budgets
    edges = {edge: hit for edge, hit in seen.edges.items() if hit.at >= seen.work_at}
    for (who, whom), hit in edges.items():
        gone = next((item for item in seen.exits if whom in f"{item.role} {item.name.lower()}"), None)
        if gone is None or (patient and now - hit.at < budgets.wait_s):
            continue
        cause = judged(seen, "peer-finished", f"{who} waits for {whom}, which ended {gone.how()}", (hit_evidence(hit),))
        if gone.abnormal and first_cause(seen).known:
            cause = first_cause(seen)
        summary = f"{who} waits for {whom}, which ended {gone.how()}"
        return make_verdict(seen, now, "lost-peer", cause, hit.at, summary, ends=(gone,), way=(who, whom))
    way = circle(edges)
    if not way:
        return None
    last = max(edges.values(), key=lambda hit: hit.at)
    silent = now - max(last.at, seen.hard_at)
    if patient and silent < budgets.wait_s:
        return None
    hits = [hit for edge, hit in edges.items() if edge[0] in way and edge[1] in way]
    rule = hits[0].rule
    words = " -> ".join(way)
    if rule.hint:
        summary = hits[0].summary().replace("{circle}", words)
        cause = Cause(rule.id, summary, rule.hint, hits[0], tuple(hit_evidence(hit) for hit in hits))
    else:
        cause = judged(seen, "wait-circle", words, tuple(hit_evidence(hit) for hit in hits))
    return make_verdict(seen, now, "stalled", cause, hits[0].at, f"a circle of waits: {words}", way=way)


def _bad_metric(seen: Seen, now: float) -> Verdict | None:
    if seen.backend is not None:
        hit, share, reward = seen.backend
        more = f"{share} rose while {reward} fell, in one step"
        cause = judged(seen, "environment-backend-down", more, (hit_evidence(hit),))
        return make_verdict(seen, now, "bad-metric", cause, hit.at, more)
    if len(seen.bad_steps) >= 2:
        hits = seen.bad_steps
        cause = judged(seen, "non-finite-loss", "", tuple(hit_evidence(hit) for hit in hits[:3]))
        return make_verdict(seen, now, "bad-metric", cause, hits[0].at, f"{len(hits)} steps in a row are not finite")
    if seen.gap_out is not None:
        hit, said = seen.gap_out
        cause = judged(seen, "gap-out-of-range", said, (hit_evidence(hit),))
        return make_verdict(seen, now, "bad-metric", cause, hit.at, said)
    return None


def spinning(seen: Seen, now: float, patient: bool = True) -> Verdict | None:
    """The GPUs are busy without touching memory, and nothing goes on."""
    sample = seen.activity
    if sample is None or not sample.spinning or seen.spinning_since is None:
        return None
    waited = now - max(seen.spinning_since, seen.hard_at)
    if not patient:
        waited = max(waited, seen.startup_age)
    if waited < seen.budgets.spin_s:
        return None
    fact = Evidence(sample.at, "gpu", f"utilisation {max(sample.gpu):.0f} %, memory {max(sample.bandwidth):.0f} %")
    cause = first_cause(seen)
    if not cause.known:
        cause = judged(seen, "spin-wait", f"in {seen.startup}" if seen.startup else "", (fact,))
    return make_verdict(
        seen, now, "stalled", cause, seen.spinning_since, f"no progress for {waited:.0f} s on busy GPUs", (fact,)
    )


def asleep(seen: Seen, now: float, patient: bool = True) -> Verdict | None:
    """The engine was put to sleep, or paused, for much longer than usual."""
    for pair, hit in seen.open_pairs.items():
        spans = seen.pair_spans.get(pair, [])
        usual = sorted(spans)[len(spans) // 2] if spans else 0.0
        limit = max(seen.budgets.pair_s, seen.budgets.pair_factor * usual)
        if patient and seen.active(now):
            limit *= seen.budgets.active_factor
        if now - max(hit.at, seen.work_at) < limit:
            continue
        cause = first_cause(seen)
        if not cause.known:
            more = f"{pair} since {clock_text(hit)}"
            cause = judged(seen, "sleep-without-wake", more, (hit_evidence(hit),))
        return make_verdict(seen, now, "stalled", cause, hit.at, f"the engine's {pair} has lasted {now - hit.at:.0f} s")
    return None


def clock_text(hit: Hit) -> str:
    """Return the time of a line as the line itself writes it, where it does."""
    from datetime import datetime

    at = moment(hit)
    if not hit.line.dated:
        return f"{int(at // 3600):02}:{int(at % 3600 // 60):02}:{int(at % 60):02}"
    return f"{datetime.fromtimestamp(at):%H:%M:%S}"


def _heartbeat(seen: Seen, now: float) -> Verdict | None:
    if seen.heartbeat_at is None or now - max(seen.heartbeat_at, seen.hard_at) < seen.budgets.heartbeat_s:
        return None
    cause = first_cause(seen)
    cause = cause if cause.known else judged(seen, "heartbeat-stopped")
    summary = f"the heartbeat file was last touched {now - seen.heartbeat_at:.0f} s ago"
    return make_verdict(seen, now, "stalled", cause, seen.heartbeat_at, summary)


def _stalled(seen: Seen, now: float) -> Verdict | None:
    budget = seen.phases.budget()
    age = now - seen.hard_at
    if age < budget:
        return None
    talking = now - seen.talked_at < budget / 3
    # A run that prints no line we know may compute in silence for hours; one that does has shown its pace.
    credit = not seen.clocks or age < seen.budgets.active_factor * budget
    if (talking or seen.active(now)) and credit:
        return None
    if now - seen.began < budget:
        return None
    silent_engine = _failed_probes(seen, now, excuse=False)
    if silent_engine is not None:
        return silent_engine
    failing = retried(seen, seen.hard_at)
    cause = first_cause(seen)
    name = cause.verdict or ("unresponsive" if failing else "stalled" if seen.started else "failed-to-start")
    if seen.open_timers:
        name = cause.verdict or ("unresponsive" if failing else "stalled")
    summary = f"no progress for {age:.0f} s in phase '{seen.phases.name}' (its budget is {budget:.0f} s)"
    return make_verdict(seen, now, name, cause, seen.hard_at, summary)
