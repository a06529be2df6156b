"""The form of answers: values, lengths, token ids, stops, errors."""

from __future__ import annotations

import math
from typing import Any

from zerogap.probe import prompts
from zerogap.probe.ask import Answer, Ask
from zerogap.probe.context import Probe
from zerogap.probe.limits import BadAnswerError, HttpError, UnreachableError
from zerogap.probe.outcome import Outcome, unknown

_ZERO_RUN = 3  # exact zeros at the end: probability 1 that often in a row, at a high temperature, is a filler
_SENTINELS = (-100.0, -999.0, -500.0)


def count_kinds(values: tuple[float | None, ...]) -> dict[str, int]:
    """Count what is no log-prob, each kind apart."""
    found = {"null": 0, "nan": 0, "posinf": 0, "neginf": 0, "sentinel": 0, "positive": 0, "zero_tail": 0}
    for value in values:
        if value is None:
            found["null"] += 1
        elif math.isnan(value):
            found["nan"] += 1
        elif math.isinf(value):
            found["posinf" if value > 0 else "neginf"] += 1
        elif value <= -900.0 or value in _SENTINELS:
            found["sentinel"] += 1
        elif value > 1e-3:
            found["positive"] += 1
    tail = 0
    for value in reversed(values):
        if value != 0.0:
            break
        tail += 1
    found["zero_tail"] = tail if tail >= _ZERO_RUN else 0
    return found


async def values(p: Probe) -> Outcome:
    """Look for log-probs that are none: in one long sampled answer, under truncation, and in all answers so far."""
    long = await p.ask(Ask(await p.prompt(prompts.OPEN), 40 if p.full else 24, temperature=1.2, seed=5))
    notes: list[str] = []
    narrow = Ask(prompts.OPEN, 4, temperature=1.0, top_p=0.3, alternatives=p.dialect.alternatives, seed=5)
    try:
        cut = (await p.ask(narrow)).logprobs
    except HttpError as error:
        if "JSON" in error.excerpt or "inf" in error.excerpt or "Out of range" in error.excerpt:
            text = f"cause=truncated support: with top_p=0.3 and alternatives the engine answers {error.status}"
            text = f"NONFINITE_LOGPROB {text}: {error.excerpt}"
            return Outcome("fail", text, "NONFINITE_LOGPROB", {"status": error.status})
        notes.append(f"with top_p=0.3: {error}")
        cut = ()
    every = [(long.logprobs, True), (cut, False)]
    every += [(answer.logprobs, ask.temperature == 1.0) for ask, answer in p.plain]
    total: dict[str, int] = {}
    for row, sampled in every:
        for kind, count in count_kinds(row).items():
            # A kept set of one token, or greedy at some engines, rightly has log-prob 0 each time.
            total[kind] = total.get(kind, 0) + (count if sampled or kind != "zero_tail" else 0)
    bad = {kind: count for kind, count in total.items() if count}
    absent = sum(1 for _, answer in p.plain if answer.tokens and not answer.logprobs)
    numbers: dict[str, Any] = {"values": sum(len(row) for row, _ in every), **total, "answers_without": absent}
    if absent or any("no log-probs" in problem for problem in long.problems):
        return Outcome(
            "fail",
            f"{max(absent, 1)} answers hold no log-probs although they were asked for",
            "MISSING_LOGPROBS",
            numbers,
        )
    if bad:
        said = ", ".join(f"{kind} {count}" for kind, count in bad.items())
        code = (
            "PADDED_LOGPROBS" if "zero_tail" in bad else "SENTINEL_LOGPROBS" if "sentinel" in bad else "NOT_A_LOGPROB"
        )
        text = (
            f"{code} n={sum(bad.values())} ({said}) of {numbers['values']}: leave these out of every mean, never put 0"
        )
        warnings: tuple[tuple[str, str], ...] = ()
        if total["nan"] and p.engine.facts.get("enable_deterministic_inference"):
            says = "NaN with deterministic inference on: the persistent matmul of SGLang before PR #11368 does that"
            warnings = (("BI_KERNEL_BUG", says),)
        return Outcome("fail", text, code, numbers, warnings)
    return Outcome(
        "pass",
        f"{numbers['values']} log-probs, all finite and at most 0{''.join('; ' + n for n in notes)}",
        numbers=numbers,
    )


async def lengths(p: Probe) -> Outcome:
    """One log-prob per generated token, and as many tokens as the engine counts."""
    problems: list[str] = []
    checked = 0
    asks = [Ask(await p.prompt(prompts.OPEN), size, temperature=1.0, seed=7) for size in (1, 2, 17)]
    for ask, answer in zip(asks, await p.together(asks), strict=True):
        checked += 1
        three = f"tokens={len(answer.tokens)} logprobs={len(answer.logprobs)} engine's count={answer.claimed}"
        three += f" max_tokens={ask.max_tokens}"
        claimed = answer.claimed
        if claimed == len(answer.tokens) + 1 and answer.finish == "stop":
            claimed -= 1  # some count the end token that they do not show
        if len({len(answer.tokens), len(answer.logprobs)} | {claimed} - {None}) > 1:
            problems.append(f"LENGTH_MISMATCH {three}")
        elif len(answer.tokens) > ask.max_tokens or (answer.finish == "length" and len(answer.tokens) < ask.max_tokens):
            problems.append(f"LENGTH_MISMATCH {three} finish={answer.finish}")
        problems += answer.problems
    if problems:
        return Outcome("fail", "; ".join(dict.fromkeys(problems)), "LENGTH_MISMATCH", {"answers": checked})
    return Outcome(
        "pass", f"{checked} answers: tokens, log-probs and the engine's count agree", numbers={"answers": checked}
    )


async def token_ids(p: Probe) -> Outcome:
    """Are the ids those that were sampled, or the text encoded again."""
    ids = await p.ids(prompts.OPEN)
    size = 48 if p.full else 24
    answers = await p.together([Ask(ids, size, temperature=2.0, seed=n) for n in range(8 if p.full else 4)])
    told = [answer.prompt_tokens for answer in answers if answer.prompt_tokens is not None]
    if any(tokens != ids for tokens in told):
        return Outcome("fail", "the engine reports other prompt ids than it was given", "PROMPT_RETOKENISED")
    canonical = different = short = 0
    for answer in answers:
        again = await p.dialect.tokenize(answer.text) if answer.text else ()
        tokens = tuple(token for token in answer.tokens if isinstance(token, int))
        canonical += tokens == again
        different += tokens != again
        carried = len(answer.logprobs)
        short += len(tokens) != carried or (answer.finish == "length" and len(tokens) != size)
    numbers = {"answers": len(answers), "equal_to_encoded_text": canonical, "other_count": short}
    if short and canonical:
        text = f"ids equal the encoded text in {canonical} of {len(answers)} answers"
        text = f"RETOKENISED: {text}, and their number is not that of the sampled tokens"
        return Outcome("fail", text, "RETOKENISED", numbers)
    if any(answer.problems for answer in answers):
        text = f"two lists of tokens in one answer differ: {next(a.problems[0] for a in answers if a.problems)}"
        return Outcome("fail", text, "RETOKENISED" if canonical else "TWO_TOKEN_LISTS", numbers)
    if different:
        return Outcome(
            "pass",
            f"sampled ids are returned (encoding the text again would change {different} of {len(answers)})",
            numbers=numbers,
        )
    return Outcome(
        "unknown",
        f"the ids of {len(answers)} answers equal their text encoded again: no case that tells",
        numbers=numbers,
    )


async def stops(p: Probe) -> Outcome:
    """A stop text inside the answer, and the length limit."""
    ask, _ = await p.reference()
    whole = await p.ask(ask)
    words = whole.text.split()
    if len(words) < 3:
        return unknown("the answer is too short to hold a stop text")
    stop = words[1]
    problems: list[str] = []
    cut = await p.ask(ask.but(stop=(stop,)))
    if stop in cut.text:
        problems.append("the stop text is in the answer")
    if not whole.text.startswith(cut.text.rstrip()):
        problems.append("the text before the stop changed")
    if cut.finish and cut.finish not in ("stop", "stop_sequence"):
        problems.append(f"finish reason {cut.finish!r} instead of 'stop'")
    if len(cut.tokens) != len(cut.logprobs):
        problems.append(f"after a stop {len(cut.tokens)} tokens carry {len(cut.logprobs)} log-probs")
    one = await p.ask(ask.but(max_tokens=1))
    if len(one.logprobs) != 1:
        problems.append(f"max_tokens=1 gave {len(one.logprobs)} log-probs")
    if one.finish and one.finish != "length":
        problems.append(f"max_tokens=1 finished with {one.finish!r} instead of 'length'")
    numbers = {"tokens_with_stop": len(cut.tokens)}
    if problems:
        return Outcome("fail", "; ".join(problems), "STOP_EDGE", numbers)
    return Outcome("pass", "stop text and length limit end as they should", numbers=numbers)


async def errors(p: Probe) -> Outcome:
    """Requests that can never succeed: each must be refused with 4xx, so that callers do not try again."""
    seen: dict[str, int | str] = {}
    wrong: list[str] = []
    requests = p.dialect.wrong_requests()
    path = requests[0][1]
    for what, where, body in requests:
        seen[what] = await _status(p, where, body)
    reply = await p.client.request("POST", path, content=b'{"prompt": ')
    seen["JSON that breaks off"] = reply.status
    most = p.engine.facts.get("max_model_len")
    if isinstance(most, int) and most <= 40_000 and p.dialect.has_ids:
        first = (await p.ids(prompts.VICTIM))[0]
        try:
            await p.ask(Ask((first,) * (most + 8), 1))
            seen["a prompt longer than the model takes"] = 200
        except HttpError as error:
            seen["a prompt longer than the model takes"] = error.status
    for what, status in seen.items():
        if isinstance(status, int) and status >= 500:
            wrong.append(f"{what}: {status} (callers that repeat on 5xx never stop)")
        elif status == 200:
            wrong.append(f"{what}: 200 (accepted)")
    numbers = {"statuses": seen}
    try:
        await p.ask(Ask("1", 1))
    except (UnreachableError, HttpError) as error:
        return Outcome("fail", f"a wrong request ended the engine: {error}", "KILLED_BY_REQUEST", numbers)
    said = ", ".join(f"{what}: {status}" for what, status in seen.items())
    if any("never stop" in text for text in wrong):
        return Outcome("fail", "; ".join(wrong), "PERMANENT_ERROR_AS_5XX", numbers)
    if wrong:
        return Outcome("pass", said, numbers=numbers, warnings=(("WRONG_REQUEST_ACCEPTED", "; ".join(wrong)),))
    return Outcome("pass", f"{said}: permanent, not to be repeated", numbers=numbers)


async def _status(p: Probe, path: str, body: Any) -> int | str:
    try:
        return (await p.client.request("POST", path, body)).status
    except BadAnswerError as error:
        return str(error)


__all__ = ["Answer", "count_kinds", "errors", "lengths", "stops", "token_ids", "values"]
