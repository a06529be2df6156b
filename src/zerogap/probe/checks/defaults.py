"""Sampling values that nobody asked for: what an engine does when a request leaves them out."""

from __future__ import annotations

import math
from typing import Any

from zerogap.probe import draws, fit, prompts
from zerogap.probe.ask import Answer, Ask, Token
from zerogap.probe.context import Probe
from zerogap.probe.outcome import Outcome, unknown

_TOLERANCE = 0.02
_CANDIDATES = (1.02, 1.03, 1.05, 1.08, 1.1, 1.15, 1.2, 1.25, 1.3, 1.5)


async def defaults(p: Probe) -> Outcome:
    """Compare a request without sampling values to one with neutral ones: log-probs, greedy tokens, and draws."""
    found: dict[str, Any] = {}
    text = prompts.REPEATING
    ids = await p.prompt(text)
    neutral = Ask(ids, 1, temperature=1.0, alternatives=p.dialect.alternatives, seed=1)
    one = await p.ask(neutral)
    two = await p.ask(neutral.inheriting())
    if not one.top or not two.top:
        return unknown("the engine gives no alternatives beside the chosen token")
    seen = frozenset(ids) if not isinstance(ids, str) else frozenset[Token]()
    width = p.dialect.alternatives
    by_list = _from_lists(fit.best(one.top[0], width), fit.best(two.top[0], width), seen)
    found |= by_list
    if not by_list:
        found |= await _penalty_by_greedy(p)
        found |= await _by_draws(p)
    numbers = {"inherited": {k: v for k, v in found.items() if not k.startswith("_")}, "evidence": found.get("_evidence", "")}
    numbers |= found.get("_numbers", {})
    inherited = numbers["inherited"]
    if inherited:
        said = " ".join(f"{name}={_show(value)}" for name, value in inherited.items())
        text = f"INHERITED_SAMPLING {said}: a request that leaves these out does not get neutral sampling"
        return Outcome("fail", text, "INHERITED_SAMPLING", numbers)
    drawn = numbers.get("draws", 0)
    return Outcome("pass", f"a request without sampling values is neutral (log-probs, greedy tokens, {drawn} draws)", numbers=numbers)


def _show(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _from_lists(plain: dict[Token, float | None], other: dict[Token, float | None], seen: frozenset[Token]) -> dict[str, Any]:
    """Return what the log-probs themselves show: they follow the settings at this engine if they differ at all."""
    x, y = fit.finite_pairs(plain, other)
    gone = sum(1 for token, value in plain.items() if value is not None and _out(other.get(token)))
    if len(x) and not gone and abs(y - x).max() <= fit.EQUAL:
        return {}
    found: dict[str, Any] = {"_evidence": "log-probs"}
    rest = {token: value for token, value in plain.items() if token not in seen}
    scale = fit.temperature([(rest, other)])
    if scale is not None and abs(scale - 1) > _TOLERANCE:
        found["temperature"] = scale
    scaled = plain if "temperature" not in found else _tempered(plain, found["temperature"])
    change = fit.penalty(scaled, other, seen)
    if change.form in ("additive", "repetition"):
        found["repetition_penalty" if change.form == "repetition" else "presence_penalty"] = change.value
    elif gone:
        cut = fit.truncation(scaled, other)
        found["kept_mass"] = cut.kept_mass if cut.form == "renormalised" else _mass(scaled, other)
        found["kept_tokens"] = cut.kept
    if len(found) == 1:
        found["unexplained"] = float(abs(y - x).max()) if len(x) else math.nan
    return found


def _out(value: float | None) -> bool:
    return value is None or value <= fit.FLOOR


def _tempered(plain: dict[Token, float | None], temperature: float) -> dict[Token, float | None]:
    return {token: None if value is None else value / temperature for token, value in plain.items()}


def _mass(plain: dict[Token, float | None], other: dict[Token, float | None]) -> float:
    return sum(math.exp(v) for t, v in plain.items() if v is not None and not _out(other.get(t)))


async def _penalty_by_greedy(p: Probe) -> dict[str, Any]:
    """Look for a penalty that the log-probs do not show: it changes which token greedy takes."""
    prompt = await p.prompt(prompts.REPEATING)
    tokens = 24
    ask = Ask(prompt, tokens)
    plain, inherited = await p.ask(ask), await p.ask(ask.inheriting(temperature=0.0))
    if plain.tokens == inherited.tokens or p.memo.get("repeatable") is False:
        return {}
    if not p.dialect.penalties:
        return {"penalty": "of unknown size", "_evidence": "greedy tokens"}
    alike = [value for value in _CANDIDATES if (await p.ask(ask.but(repetition_penalty=value))).tokens == inherited.tokens]
    if not alike:
        return {"penalty": "of unknown kind or size", "_evidence": "greedy tokens"}
    value = alike[0] if len(alike) == 1 else sum(alike) / len(alike)
    return {"repetition_penalty": value, "_evidence": f"greedy tokens as with {', '.join(f'{v:g}' for v in alike)}"}


async def _by_draws(p: Probe) -> dict[str, Any]:
    """Estimate temperature and truncation from what is drawn."""
    rows: list[tuple[list[float], float]] = []
    width = p.dialect.alternatives
    texts = (prompts.OPEN, *prompts.OTHERS)[: 5 if p.full else 2]
    for text in texts:
        ask = Ask(await p.prompt(text), 24 if p.full else 16, alternatives=width).inheriting()
        for answer in await p.asks(ask, 16 if p.full else 8):
            rows += _rows(answer)
    if len(rows) < 40 or width < 3:
        return {"_numbers": {"draws": len(rows)}}
    settings = draws.estimate(draws.make_draws(rows, width))
    numbers = {
        "draws": len(rows),
        "temperature": settings.temperature,
        "temperature_error": settings.temperature_error,
        "gain": settings.gain,
    }
    found: dict[str, Any] = {"_numbers": numbers, "_evidence": f"{len(rows)} draws"}
    if settings.is_neutral:
        return found
    off = abs(settings.temperature - 1)
    if off > max(4 * settings.temperature_error, 0.05):
        found["temperature"] = settings.temperature
    if settings.top_p < 1:
        found["top_p"] = settings.top_p
    if settings.top_k:
        found["top_k"] = settings.top_k
    if settings.min_p:
        found["min_p"] = settings.min_p
    return found


def _rows(answer: Answer) -> list[tuple[list[float], float]]:
    found = []
    for value, top in zip(answer.logprobs, answer.top, strict=False):
        values = [v for v in top.values() if v is not None and math.isfinite(v)]
        if value is not None and math.isfinite(value) and len(values) >= 3:
            found.append((values, value))
    return found
