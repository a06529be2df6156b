"""Does the engine give a token, not only a healthy answer; and does it still do so after the probe."""

from __future__ import annotations

from zerogap.probe.ask import Ask
from zerogap.probe.context import Probe
from zerogap.probe.limits import BadAnswerError, BudgetSpentError, HttpError, ProbeError, TooSlowError, UnreachableError
from zerogap.probe.outcome import Outcome, unknown

_TRIES = 3


async def _health(p: Probe) -> str:
    """Return "200", another status, or why there is none."""
    try:
        return str((await p.client.get(p.dialect.health, timeout_s=10.0)).status)
    except BudgetSpentError:
        raise
    except ProbeError as error:
        return str(error)


async def alive(p: Probe) -> Outcome:
    """Ask for health, for one token, and for health again."""
    before = await _health(p)
    failures: list[ProbeError] = []
    for _ in range(_TRIES):
        try:
            answer = await p.ask(Ask("1", 1))
            break
        except BudgetSpentError:
            raise
        except ProbeError as error:
            failures.append(error)
            if isinstance(error, TooSlowError) or (isinstance(error, HttpError) and error.status < 500):
                break
    else:
        return await _dead(p, before, failures)
    if failures and isinstance(failures[-1], TooSlowError):
        return unknown(
            f"NO_TOKEN_IN_TIME: health answers {before}, but {failures[-1]}: it is overloaded, very slow or dead",
            health_before=before,
        )
    if failures and isinstance(failures[-1], HttpError) and failures[-1].status < 500:
        return unknown(f"the engine refuses a request for one token: {failures[-1]}", health_before=before)
    if failures:
        return unknown(
            f"{len(failures)} of {len(failures) + 1} requests for one token failed ({failures[-1]}): half broken",
            health_before=before,
        )
    return Outcome("pass", f"health answers {before}, and a token came ({len(answer.tokens) or 1})")


async def _dead(p: Probe, before: str, failures: list[ProbeError]) -> Outcome:
    after = await _health(p)
    last = failures[-1]
    numbers = {"health_before": before, "health_after": after, "tries": len(failures)}
    if isinstance(last, BadAnswerError):
        return Outcome("unknown", f"no answer could be read: {last}", "UNREADABLE", numbers)
    died = before == "200" and (after != "200" or any(isinstance(f, UnreachableError) for f in failures))
    if died:
        text = f"health answered 200 before, the first request failed ({failures[0]}), health now: {after}"
        return Outcome("fail", text, "DIED_AT_FIRST_FORWARD", numbers)
    text = f"health answers {before}, but {len(failures)} of {len(failures)} requests for one token failed: {last}"
    return Outcome("fail", text, "DEAD_BEHIND_HEALTH" if before == "200" else "NOT_ALIVE", numbers)


async def alive_after(p: Probe) -> Outcome:
    """Ask for one token once more: nothing that the probe asked may have broken the engine."""
    try:
        await p.ask(Ask("1", 1))
    except BudgetSpentError:
        raise
    except (UnreachableError, HttpError) as error:
        if isinstance(error, HttpError) and error.status < 500:
            raise
        health = await _health(p)
        if health == "200" and isinstance(error, HttpError):
            raise
        return Outcome("fail", f"no token after the probe: {error}; health: {health}", "DIED_DURING_PROBE")
    return Outcome("pass", "a token came after everything else")
