"""Sampling values that nobody asked for: what an engine does when a request leaves them out.

Where the log-probs follow the settings they show the defaults exactly. Where they are raw, defaults show in what is
generated: a penalty changes what greedy takes, the others what is drawn. Once something was seen, each value is left
out alone, so that one cannot pass for another.
"""

from __future__ import annotations

import math
from typing import Any

from zerogap.probe import draws, fit, prompts
from zerogap.probe.ask import NEUTRAL, Answer, Ask, Token
from zerogap.probe.context import Probe
from zerogap.probe.outcome import Outcome

_TOLERANCE = 0.02
_PENALTIES = (1.02, 1.03, 1.05, 1.08, 1.1, 1.15, 1.2, 1.25, 1.3, 1.5)
_DRAWN = ("temperature", "top_p", "top_k", "min_p")
_ROUND = {
    "temperature": tuple(round(0.05 * n, 2) for n in range(4, 41)),
    "top_p": (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.95, 0.98, 0.99),
    "top_k": tuple(range(1, 21)),
    "min_p": (0.01, 0.02, 0.03, 0.05, 0.1, 0.15, 0.2),
}


async def defaults(p: Probe) -> Outcome:
    """Compare a request without sampling values to one with neutral ones: log-probs, greedy tokens, and draws."""
    inherited: dict[str, Any] = {}
    numbers: dict[str, Any] = {"draws": 0}
    plain, other, _ = await p.with_seen(prompts.OPEN, **dict.fromkeys(NEUTRAL))
    if not _alike(plain, other):
        numbers["evidence"] = "log-probs"
        for name in NEUTRAL:
            inherited |= _from_lists(name, [await p.with_seen(text, **{name: None}) for text in _TEXTS])
        inherited = inherited or {"unexplained": "the log-probs differ"}
    else:
        greedy = await _penalty_by_greedy(p)
        drawn = await _by_draws(p)
        inherited |= greedy | drawn.pop("inherited")
        numbers |= drawn
    numbers["inherited"] = inherited
    if inherited:
        said = " ".join(f"{name}={_show(value)}" for name, value in inherited.items())
        text = f"INHERITED_SAMPLING {said}: a request that leaves these out does not get neutral sampling"
        open_ = [name for name in inherited if name in _DRAWN and name not in numbers.get("confirmed", ())]
        if numbers.get("evidence") == "draws" and open_:
            text += f" (estimated from {numbers['draws']} draws: {', '.join(open_)})"
        return Outcome("fail", text, "INHERITED_SAMPLING", numbers)
    text = f"a request without sampling values is neutral (log-probs, greedy tokens, {numbers['draws']} draws)"
    return Outcome("pass", text, numbers=numbers)


def _show(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


_Pair = tuple[fit.Top, fit.Top, frozenset[Token]]
_TEXTS = (prompts.OPEN, prompts.VICTIM)


def _alike(plain: fit.Top, other: fit.Top) -> bool:
    return fit.truncation(plain, other).form == "raw"


def _from_lists(name: str, lists: list[_Pair]) -> dict[str, Any]:
    """Return what one value's default is, from the log-probs without it."""
    changed = [entry for entry in lists if not _alike(entry[0], entry[1])]
    if not changed:
        return {}
    if name == "temperature":
        found = fit.temperature([(plain, other) for plain, other, _ in lists])
        return {name: found} if found is not None and abs(found - 1) > _TOLERANCE else {}
    if name.endswith("penalty"):
        change = fit.penalty(lists)
        return {name: change.value if change.form != "unclear" else "of unknown size"}
    plain, other, _ = changed[0]
    return {name: _bound(name, plain, fit.truncation(plain, other))}


def _bound(name: str, plain: fit.Top, cut: fit.Truncation) -> Any:
    """Return the rounded value that leaves this many tokens, else the tightest one."""
    mass = fit.masses(plain)
    kept = cut.kept
    beyond = kept >= len(mass) - 1
    if beyond and not (name == "top_p" and cut.form == "renormalised"):
        return f"on (at least {kept} tokens stay)"
    if name == "top_k":
        return kept
    if name == "min_p":
        low, high = mass[kept] / mass[0], mass[kept - 1] / mass[0]
    else:  # the set reaches top_p with its last token
        low = cut.kept_mass - mass[-1] if beyond else sum(mass[: kept - 1])
        high = cut.kept_mass if beyond else sum(mass[:kept])
    fitting = [value for value in _ROUND[name] if low < value <= high]
    return fitting[len(fitting) // 2] if fitting else high


async def _penalty_by_greedy(p: Probe) -> dict[str, Any]:
    """Look for a penalty that the log-probs do not show: it changes which token greedy takes."""
    if p.memo.get("repeatable") is False:
        return {}
    ask = Ask(await p.prompt(prompts.REPEATING), 24)
    plain, other = await p.ask(ask), await p.ask(ask.inheriting(temperature=0.0))
    if plain.tokens == other.tokens:
        return {}
    if not p.dialect.penalties:
        return {"penalty": "of unknown kind and size"}
    alike = [v for v in _PENALTIES if (await p.ask(ask.but(repetition_penalty=v))).tokens == other.tokens]
    return {"repetition_penalty": alike[len(alike) // 2]} if alike else {"penalty": "of unknown kind and size"}


async def _by_draws(p: Probe) -> dict[str, Any]:
    """Estimate temperature and truncation from what is drawn when nothing is asked for; then each value alone."""
    prompt = await p.prompt(prompts.OPEN)
    ask = Ask(prompt, 24 if p.full else 16, alternatives=p.dialect.alternatives, **NEUTRAL)
    # Penalties have their own look; left to the engine they would pass for a temperature here.
    free = dict.fromkeys(_DRAWN)
    rows = await _draw(p, ask.but(**free))
    if len(rows) < 40 or p.dialect.alternatives < 3:
        return {"draws": len(rows), "inherited": {}}
    surprise = draws.surprise(draws.make_draws(rows, p.dialect.alternatives))
    numbers: dict[str, Any] = {"draws": len(rows), "surprise": surprise, "inherited": {}}
    if surprise < draws.SURPRISED:
        return numbers
    numbers["evidence"] = "draws"
    for name in _DRAWN:
        one = ask.but(**{name: None})
        rows = await _draw(p, one)
        drawn = draws.make_draws(rows, p.dialect.alternatives)
        numbers["draws"] += len(rows)
        if draws.surprise(drawn) < draws.SURPRISED:
            continue
        guess, error = draws.estimate(drawn, name)
        numbers["inherited"][name] = await _confirm(p, one, name, guess, numbers)
        numbers[f"{name}_error"] = error
    if not numbers["inherited"]:
        numbers["inherited"] = {"unexplained": f"draws are {surprise:.1f} standard errors off neutral sampling"}
    return numbers


async def _draw(p: Probe, ask: Ask) -> list[tuple[list[float], float]]:
    rows: list[tuple[list[float], float]] = []
    count, size = 16 if p.full else 8, ask.max_tokens
    if not p.dialect.several:  # one answer a request: fewer and longer ones
        count, size = count // 4, 3 * size
    for text in (prompts.OPEN, *prompts.OTHERS)[: 5 if p.full else 2]:
        for answer in await p.asks(ask.but(prompt=await p.prompt(text), max_tokens=size), count):
            rows += _rows(answer)
    return rows


async def _confirm(p: Probe, left_out: Ask, name: str, guess: float, numbers: dict[str, Any]) -> float:
    """Return the round value near the guess that gives the same tokens for the same seed, else the guess."""
    if not p.memo.get("seeds", True):
        return guess
    near = sorted(_ROUND[name], key=lambda value: abs(value - guess))[: 5 if p.dialect.several else 3]
    ask = left_out.but(seed=21, max_tokens=32, alternatives=0)
    count = 2 if p.dialect.several else 1
    target = [answer.tokens for answer in await p.asks(ask, count)]
    alike = []
    for value in near:
        if [answer.tokens for answer in await p.asks(ask.but(**{name: value}), count)] == target:
            alike.append(value)
    if not alike:
        return guess
    if len(alike) == 1:
        numbers["confirmed"] = [*numbers.get("confirmed", []), name]
    else:
        numbers[f"{name}_alike"] = alike
    return min(alike, key=lambda value: abs(value - guess))


def _rows(answer: Answer) -> list[tuple[list[float], float]]:
    found = []
    for value, top in zip(answer.logprobs, answer.top, strict=False):
        values = [v for v in top.values() if v is not None and math.isfinite(v)]
        if value is not None and math.isfinite(value) and len(values) >= 3:
            found.append((values, value))
    return found
