"""Same request, same bits: alone, in company, in another order, from the cache, in chunks, streamed."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from zerogap.probe import prompts
from zerogap.probe.ask import Answer, Ask, same_bits
from zerogap.probe.checks.compare import figures, words
from zerogap.probe.context import Probe
from zerogap.probe.limits import HttpError
from zerogap.probe.outcome import Outcome, unknown

# A batch of 32 takes a tenth to a third of the time that its requests would take alone.
_ONE_BY_ONE = 0.6


def _verdict(numbers: dict[str, Any], code: str, says: str = "") -> Outcome:
    text = f"{says}{words(numbers)}"
    if numbers["equal"] < numbers["of"]:
        return Outcome("fail", text, code, numbers)
    if not numbers["logprobs_compared"]:
        return unknown(f"{text}, but no log-prob was there to compare", **numbers)
    return Outcome("pass", text, numbers=numbers)


async def _judge(p: Probe, numbers: dict[str, Any], code: str, says: str = "") -> Outcome:
    """Return the verdict on a comparison; an engine that differs from itself cannot be blamed for anything else."""
    outcome = _verdict(numbers, code, says)
    if outcome.status == "fail" and not await _repeatable(p):
        return unknown(f"{outcome.observed}; but the same request alone differs as well (see repeat)", **numbers)
    return outcome


async def _repeatable(p: Probe) -> bool:
    if "repeatable" not in p.memo:
        ask, reference = await p.reference()
        p.memo["repeatable"] = all([same_bits(reference, await p.ask(ask)) for _ in range(3)])
    return bool(p.memo["repeatable"])


async def repeat(p: Probe) -> Outcome:
    """The same greedy request, alone, several times."""
    ask, reference = await p.reference()
    others = [await p.ask(ask) for _ in range(9 if p.full else 3)]
    outcome = _verdict(figures(reference, others), "NOT_REPEATABLE")
    p.memo["repeatable"] = outcome.status == "pass"
    return outcome


async def company(p: Probe) -> Outcome:
    """The same greedy request inside batches of other requests."""
    ask, reference = await p.reference()
    sizes = (2, 4, 8, 16, 32, 64) if p.full else (2, 8, 32)
    by_size: dict[str, Any] = {}
    answers: list[Answer] = []
    alone = await _seconds(p, ask)
    ratio = 0.0
    for size in sizes:
        for stagger in (0.02, 0.0) if p.full and size > 2 else (0.0,):
            began = time.monotonic()
            answer = await _in_company(p, ask, size, stagger)
            ratio = (time.monotonic() - began) / (alone * size)
            answers.append(answer)
            by_size[f"{size}{' staggered' if stagger else ''}"] = words(figures(reference, [answer]))
    if p.full:
        for words_before in (1, 9, 10, 64, 200):  # a neighbour's prompt length can change the tile that a kernel picks
            neighbour = Ask(prompts.fresh(words_before), 4)
            answer = (await p.together([ask, neighbour], stagger_s=alone / 4))[0]
            answers.append(answer)
            by_size[f"beside a prompt of {words_before} words"] = words(figures(reference, [answer]))
    numbers = figures(reference, answers) | {"by_batch": by_size, "time_over_one_by_one": ratio}
    differing = [name for name, text in by_size.items() if "1 of 1" not in text]
    if differing:
        return await _judge(p, numbers, "NOT_BATCH_INVARIANT", f"differs in batch {', '.join(differing[:6])}: ")
    if ratio > _ONE_BY_ONE:
        return unknown(
            f"{words(numbers)}, but a batch took as long as its requests one after another: "
            "they may never have run together",
            **numbers,
        )
    return await _judge(p, numbers, "NOT_BATCH_INVARIANT", f"batches of {', '.join(map(str, sizes))}: ")


async def _seconds(p: Probe, ask: Ask) -> float:
    """Return how long a request takes alone: the shorter of two, since other load only adds."""
    taken = []
    for _ in range(2):
        began = time.monotonic()
        await p.ask(ask)
        taken.append(time.monotonic() - began)
    return max(min(taken), 1e-6)


async def _in_company(p: Probe, ask: Ask, size: int, stagger: float) -> Answer:
    """Return the answer to ``ask`` in the middle of ``size`` - 1 others that outlast it."""
    others = [
        Ask(text, ask.max_tokens + 2 * (n % 3))
        for n, text in enumerate(prompts.fillers(size - 1, 90 if p.full else 24))
    ]
    middle = len(others) // 2
    answers = await p.together([*others[:middle], ask, *others[middle:]], stagger_s=stagger)
    return answers[middle]


async def order(p: Probe) -> Outcome:
    """The same requests together, in one order and in the opposite one."""
    asks = [Ask(await p.prompt(text), p.tokens) for text in prompts.OTHERS]
    await p.together(asks)  # warm for both
    # A small distance between two requests, so that they arrive as they were sent.
    first = await p.together(asks, stagger_s=0.003)
    rounds = [(await p.together(asks[::-1], stagger_s=0.003))[::-1] for _ in range(2)]
    every = [figures(one, [answers[n] for answers in rounds]) for n, one in enumerate(first)]
    worst = max(every, key=lambda numbers: numbers["of"] - numbers["equal"])
    differing = sum(numbers["equal"] < numbers["of"] for numbers in every)
    return await _judge(p, worst, "ORDER_DEPENDENT", f"{len(asks) - differing} of {len(asks)} requests the same: ")


async def prefix_cache(p: Probe) -> Outcome:
    """A prompt that was never sent before, then the same prompt again."""
    ask = Ask(await p.prompt(prompts.fresh(220 if p.full else 60)), p.tokens)
    cold = await p.ask(ask)
    warm = [await p.ask(ask) for _ in range(2)]
    numbers = figures(cold, warm)
    told = warm[-1].cached
    numbers["cached_tokens"] = told
    if numbers["equal"] == numbers["of"]:
        if told is None:
            return await _judge(
                p, numbers, "", "cold against warm (the engine does not say whether it used its cache): "
            )
        return await _judge(p, numbers, "", f"cold against warm ({told} prompt tokens from the cache): ")
    if p.dialect.salted:
        again = figures(cold, [await p.ask(ask.but(cold=True))])
        if again["equal"]:
            return await _judge(p, numbers, "PREFIX_CACHE_DRIFT", "cold equals cold, warm does not: ")
        return await _judge(p, numbers, "PREFIX_CACHE_DRIFT", "cold differs from cold as well: ")
    return await _judge(p, numbers, "PREFIX_CACHE_DRIFT", "cold against warm: ")


async def long_prompt(p: Probe) -> Outcome:
    """A prompt long enough to be prefilled in chunks: alone, and beside other long ones that move the chunk ends.

    Only the first position is compared, with all its alternatives: it comes from the prefill alone.
    """
    most = p.engine.facts.get("max_model_len")
    size = min(1400, (int(most) - 64) // 2) if isinstance(most, int) and most > 256 else 1400
    ids = (await p.ids(prompts.fresh(size)))[: 2 * size]
    ask = Ask(ids, 1, alternatives=p.dialect.alternatives, cold=True)
    alone = _first(await p.ask(ask))
    again = _first(await p.ask(ask))
    others = [Ask(prompts.fresh(size // 2 + 97 * n), 16) for n in range(3)]
    beside = [_first((await p.together([*others, ask], stagger_s=0.01))[-1])]
    beside.append(_first((await p.together([others[0], ask, *others[1:]]))[1]))
    numbers = figures(alone, [again, *beside]) | {"prompt_tokens": len(ids)}
    says = f"{len(ids)} prompt tokens, alone and beside long ones: "
    if not p.dialect.salted and numbers["equal"] == numbers["of"]:
        return unknown(f"{says}{words(numbers)}, but the prefix cache may have spared it the prefill", **numbers)
    return await _judge(p, numbers, "CHUNKED_PREFILL_DRIFT", says)


def _first(answer: Answer) -> Answer:
    """Return the alternatives of the first position as if they were a sequence, in the order of their tokens."""
    if not answer.top:
        return answer
    entries = sorted(answer.top[0].items(), key=lambda entry: str(entry[0]))
    return replace(answer, tokens=tuple(token for token, _ in entries), logprobs=tuple(value for _, value in entries))


async def stream(p: Probe) -> Outcome:
    """Streamed and whole."""
    ask = (await p.reference())[0].but(alternatives=0)
    whole = await p.ask(ask)
    try:
        parts = await p.ask(ask, stream=True)
    except HttpError as error:
        return unknown(f"streaming is not offered: {error}")
    numbers = figures(whole, [parts])
    if parts.text != whole.text and numbers["equal"]:
        return Outcome("fail", "the same tokens, but another text", "STREAM_DIFFERS", numbers)
    if parts.finish != whole.finish and numbers["equal"]:
        text = f"the same tokens, but finish reason {parts.finish!r} instead of {whole.finish!r}"
        return Outcome("fail", text, "STREAM_DIFFERS", numbers)
    return await _judge(p, numbers, "STREAM_DIFFERS")


async def ties(p: Probe) -> Outcome:
    """Greedy takes the most likely token; of equally likely ones always the same."""
    answers = [p.memo["reference"][1]] if "reference" in p.memo else [(await p.reference())[1]]
    asks = [Ask(await p.prompt(text), p.tokens, alternatives=p.dialect.alternatives) for text in prompts.OTHERS]
    answers += await p.together(asks)
    seen = lower = wrong = positions = 0
    for answer in answers:
        for token, top in zip(answer.tokens, answer.top, strict=False):
            values = {key: value for key, value in top.items() if value is not None}
            if token not in values or len(values) < 2:
                continue
            positions += 1
            best = max(values.values())
            equal = [key for key, value in values.items() if value == best]
            wrong += values[token] < best
            if len(equal) > 1 and token in equal:
                seen += 1
                lower += all(isinstance(key, int) for key in equal) and token == min(equal, key=lambda k: int(k))
    numbers = {"positions": positions, "ties": seen, "lower_id": lower, "not_most_likely": wrong}
    if not positions:
        return unknown("the engine gives no alternatives beside the chosen token", **numbers)
    if wrong:
        text = f"at {wrong} of {positions} greedy positions another token is more likely than the chosen one"
        return Outcome("fail", text, "NOT_THE_MOST_LIKELY", numbers)
    if not seen:
        return Outcome(
            "unknown", f"no tie in {positions} greedy positions; all took the most likely token", numbers=numbers
        )
    rule = "the lower id each time" if lower == seen else f"the lower id in {lower}"
    return Outcome("pass", f"{seen} ties in {positions} greedy positions, {rule}", numbers=numbers)
