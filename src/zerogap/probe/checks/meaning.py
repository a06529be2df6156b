"""What the log-probs stand for: before or after temperature, truncation and penalties; which token; which grid."""

from __future__ import annotations

import math
from statistics import median
from typing import Any

from zerogap.probe import fit, prompts
from zerogap.probe.ask import NEUTRAL, Ask
from zerogap.probe.context import Probe
from zerogap.probe.limits import UnsupportedError
from zerogap.probe.outcome import Outcome, unknown

_TOLERANCE = 0.02  # of a fitted temperature, penalty or kept mass
_TINY = 0.005  # below the floor of 0.01 that some engines put under a temperature
_SHIFT_CLEAR = 0.2  # nats: a log-prob of another token is further away than that


async def _next(p: Probe, text: str, **settings: Any) -> fit.Top:
    return await p.alternatives(await p.prompt(text), **{**NEUTRAL, **settings})


async def _plain(p: Probe, text: str) -> fit.Top:
    return await p.alternatives(await p.prompt(text), **NEUTRAL)


_TEXTS = (prompts.OPEN, *prompts.OTHERS[:2])


async def temperature(p: Probe) -> Outcome:
    """Compare the lists at temperature 1 with those at others, and fit the temperature."""
    fitted: dict[float, float | None] = {}
    for asked in (0.5, 1.6) if p.full else (0.5,):
        lists = [(await _plain(p, text), await _next(p, text, temperature=asked)) for text in _TEXTS]
        fitted[asked] = fit.temperature(lists)
    if any(value is None for value in fitted.values()):
        return unknown("too few alternatives for a fit", fitted={str(k): v for k, v in fitted.items()})
    numbers: dict[str, Any] = {"fitted": {str(asked): value for asked, value in fitted.items()}}
    values = {asked: value for asked, value in fitted.items() if value is not None}
    seen = ", ".join(f"asked T={asked:g}, fitted T={value:.4g}" for asked, value in values.items())
    if all(abs(value - 1) <= _TOLERANCE for value in values.values()):
        p.memo["temperature"] = "raw"
        text = (
            "semantics=RAW_BEFORE_TEMPERATURE: at T other than 1 these are not the log-probs of what was sampled from"
        )
        warning = ("RAW_BEFORE_TEMPERATURE", "a trainer that divides its logits by T sees a gap for every T but 1")
        return Outcome("pass", f"{text} ({seen})", "RAW_BEFORE_TEMPERATURE", numbers | {"semantics": "raw"}, (warning,))
    if all(abs(value / asked - 1) <= _TOLERANCE for asked, value in values.items()):
        p.memo["temperature"] = "applied"
        text = f"semantics=AFTER_TEMPERATURE: the trainer must divide its logits by T ({seen})"
        numbers["semantics"] = "temperature"
        warnings: tuple[tuple[str, str], ...] = ()
        floor = await _floor(p) if p.full else None
        if floor is not None:
            numbers["floor"] = floor
            says = f"temperature={_TINY:g} engine_effective={floor:.3g}: lower temperatures are raised to that"
            warnings = (("TEMPERATURE_FLOOR", says),)
        return Outcome("pass", text, "AFTER_TEMPERATURE", numbers, warnings)
    return Outcome("fail", f"the log-probs stand at another temperature: {seen}", "TEMPERATURE_NOT_AS_ASKED", numbers)


async def _floor(p: Probe) -> float | None:
    """Return the temperature that stands in for a very small one, None if it is taken as asked or cannot be seen."""
    lists = [(await _plain(p, text), await _next(p, text, temperature=_TINY)) for text in _TEXTS]
    found = fit.temperature(lists)
    return found if found is not None and abs(found / _TINY - 1) > 0.1 else None


async def truncation(p: Probe) -> Outcome:
    """Ask for top-p, top-k and min-p one by one, and for temperature with top-p; name what each did."""
    plain = await _plain(p, prompts.OPEN)
    ranked = fit.masses(plain)
    if len(ranked) < 4:
        return unknown("too few alternatives to see a truncation")
    # Values at which a few tokens stay, half way between two of them, so that rounding decides nothing.
    top_p = min(0.95, (sum(ranked[:2]) + sum(ranked[:3])) / 2)
    settings: dict[str, tuple[dict[str, Any], float]] = {
        "top_p": ({"top_p": round(top_p, 4)}, fit.kept_by_top_p(plain, round(top_p, 4))),
        "top_k": ({"top_k": 3}, sum(ranked[:3])),
        "min_p": ({"min_p": round((ranked[1] + ranked[2]) / 2 / ranked[0], 4)}, sum(ranked[:2])),
    }
    forms: dict[str, str] = {}
    masses: dict[str, Any] = {}
    wrong: list[str] = []
    for name, (asked, expected) in settings.items():
        try:
            seen = fit.truncation(plain, await _next(p, prompts.OPEN, **asked))
        except UnsupportedError:
            forms[name] = "not offered"
            continue
        forms[name] = seen.form
        masses[name] = {"asked": asked[name], "kept_mass": seen.kept_mass, "expected_mass": expected, "kept": seen.kept}
        if seen.form == "renormalised" and abs(seen.kept_mass / expected - 1) > _TOLERANCE:
            wrong.append(f"{name}={asked[name]:g} kept mass {seen.kept_mass:.3f} instead of {expected:.3f}")
    numbers: dict[str, Any] = {"forms": forms, "masses": masses}
    if p.memo.get("temperature") == "applied":
        numbers["order"] = await _order(p, top_p)
    said = ", ".join(
        f"{name}: {form}"
        + (f" (kept mass {masses[name]['kept_mass']:.3f})" if form in ("renormalised", "masked") else "")
        for name, form in forms.items()
    )
    judged = {form for form in forms.values() if form != "not offered"}
    if not judged or "unclear" in judged:
        return unknown(f"no hypothesis fits: {said}" if judged else "no truncation is offered", **numbers)
    if wrong:
        return Outcome("fail", f"{'; '.join(wrong)} ({said})", "KEPT_MASS_WRONG", numbers)
    numbers["semantics"] = judged.pop() if len(judged) == 1 else "mixed"
    return Outcome("pass", said, _truncation_code(numbers["semantics"]), numbers, _truncation_warning(numbers))


def _truncation_code(semantics: str) -> str:
    return {"raw": "RAW_LOGPROBS_WITH_TRUNCATION", "mixed": "MIXED_TRUNCATION"}.get(semantics, "SAMPLER_TRUNCATION")


def _truncation_warning(numbers: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    semantics = numbers["semantics"]
    if semantics == "raw":
        text = "with top_p, top_k or min_p on, the gap looks fine and the importance ratio is wrong"
    elif semantics == "renormalised":
        masses = [entry["kept_mass"] for entry in numbers["masses"].values()]
        text = f"log-probs are renormalised over the kept set (kept mass {min(masses):.2f} to {max(masses):.2f} here)"
        text += ": a trainer over the whole vocabulary needs the kept sets, or top_p=1, top_k off, min_p=0"
    else:
        text = "the settings are treated differently or the rest is dropped without renormalising; turn truncation off"
    return ((_truncation_code(semantics), text),)


async def _order(p: Probe, top_p: float) -> str:
    """Return whether temperature comes before top-p: the kept set at T=0.5 is smaller if it does."""
    tempered = await _next(p, prompts.OPEN, temperature=0.5)
    both = await _next(p, prompts.OPEN, temperature=0.5, top_p=round(top_p, 4))
    seen = fit.truncation(tempered, both)
    if seen.form != "renormalised":
        return seen.form
    after = abs(seen.kept_mass - fit.kept_by_top_p(tempered, top_p)) < 0.02
    return "temperature, then top-p" if after else "top-p, then temperature"


async def listed(p: Probe) -> Outcome:
    """The same request with a short and a long list of alternatives: a log-prob may not depend on the list."""
    text = prompts.OPEN
    long = await _plain(p, text)
    ask = Ask(await p.prompt(text), 1, temperature=1.0, alternatives=2, seed=1)
    answer = await p.ask(ask)
    short = answer.top[0] if answer.top else {}
    both = [(v, w) for t, v in short.items() if v is not None and (w := long.get(t)) is not None]
    if not both:
        return unknown("no token is in both lists")
    worst = max(abs(v - w) for v, w in both)
    total = sum(math.exp(v) for v in long.values() if v is not None and v > fit.FLOOR)
    numbers = {"max_abs": worst, "mass_of_list": total, "alternatives": len(long)}
    if worst > fit.EQUAL:
        text = (
            f"with 2 alternatives a log-prob is {worst:.3g} nats off that with {len(long)}: renormalised over the list"
        )
        return Outcome("fail", text, "RENORMALISED_OVER_LIST", numbers)
    if total > 1.0 + 1e-3:
        return Outcome("fail", f"the probabilities of one list sum to {total:.4f}", "NOT_A_DISTRIBUTION", numbers)
    return Outcome(
        "pass", f"the same within {worst:.2g}; {len(long)} alternatives hold {total:.3f} of the mass", numbers=numbers
    )


async def penalties(p: Probe) -> Outcome:
    """Ask for each penalty and see whether the log-probs hold it."""
    if not p.dialect.penalties or not p.dialect.has_ids:
        return unknown("this kind of engine takes no token ids or no penalties")
    forms: dict[str, Any] = {}
    said: list[str] = []
    wrong: list[str] = []
    for name, value in (("repetition_penalty", 1.1), ("frequency_penalty", 0.3), ("presence_penalty", 0.4)):
        seen = await _penalty(p, name, value)
        forms[name] = {
            "asked": value,
            "form": seen.form,
            "fitted": seen.value,
            "tokens": seen.tokens,
            "error": seen.error,
        }
        if seen.form in ("none", "unclear"):
            said.append(f"{name}: {'not in the log-probs' if seen.form == 'none' else 'could not be seen'}")
            continue
        said.append(f"{name}: in the log-probs, asked {value:g}, fitted {seen.value:.4g}")
        if abs(seen.value / value - 1) > _TOLERANCE:
            wrong.append(name)
    numbers = {"penalties": forms}
    if wrong:
        return Outcome("fail", "; ".join(said), "PENALTY_NOT_AS_ASKED", numbers)
    if all(entry["form"] == "unclear" for entry in forms.values()):
        return unknown("; ".join(said), **numbers)
    inside = any(entry["form"] not in ("none", "unclear") for entry in forms.values())
    return Outcome("pass", "; ".join(said), "PENALTIES_IN" if inside else "PENALTIES_OUT", numbers)


async def _penalty(p: Probe, name: str, value: float) -> fit.Penalty:
    """Fit one penalty at the first position where it can act: the prompt's tokens, or one token that was generated."""
    if name == "repetition_penalty":
        return fit.penalty([await p.with_seen(text, **{name: value}) for text in (prompts.OPEN, prompts.VICTIM)])
    # Frequency and presence count generated tokens: the second position comes after one of them.
    ask = Ask(await p.ids(prompts.REPEATING), 2, temperature=0.0, alternatives=p.dialect.alternatives)
    plain, other_answer = await p.ask(ask), await p.ask(ask.but(**{name: value}))
    if len(plain.top) < 2 or len(other_answer.top) < 2 or plain.tokens[:1] != other_answer.tokens[:1]:
        return fit.Penalty("unclear", float("nan"), float("nan"), 0)
    return fit.penalty([(plain.top[1], other_answer.top[1], frozenset(plain.tokens[:1]))])


async def _decode_and_score(p: Probe) -> tuple[list[float | None], list[float | None], str]:
    """Return (as sampled, scored again by prefill) of generated tokens, and how they were scored."""
    if "scored" in p.memo:
        found: tuple[list[float | None], list[float | None], str] = p.memo["scored"]
        return found
    sampled: list[float | None] = []
    scored: list[float | None] = []
    how = "prompt log-probs"
    for seed, text in enumerate(prompts.OTHERS[: 3 if p.full else 2]):
        ids = await p.ids(text)
        answer = await p.ask(Ask(ids, p.tokens + 4, temperature=1.0, seed=seed))
        tokens = [token for token in answer.tokens if isinstance(token, int)]
        values = list(answer.logprobs[: len(tokens)])
        try:
            again = list((await p.dialect.score([*ids, *tokens]))[len(ids) :])
        except UnsupportedError:
            how = "one-token continuations"
            again = await _continue(p, ids, tokens)
        sampled += values
        scored += again[: len(values)]
    p.memo["scored"] = (sampled, scored, how)
    return sampled, scored, how


async def _continue(p: Probe, ids: tuple[int, ...], tokens: list[int]) -> list[float | None]:
    """Score tokens one by one: each from the alternatives of the first position after all before it."""
    found: list[float | None] = []
    for position, token in enumerate(tokens[:6]):
        ask = Ask((*ids, *tokens[:position]), 1, temperature=1.0, alternatives=p.dialect.alternatives, seed=1)
        answer = await p.ask(ask)
        found.append(answer.top[0].get(token) if answer.top else None)
    return [*found, *[None] * (len(tokens) - len(found))]


async def token(p: Probe) -> Outcome:
    """Which token a log-prob stands for: compare what was recorded with a second scoring, also shifted by one."""
    sampled, scored, how = await _decode_and_score(p)
    distance = {shift: _distance(sampled, scored, shift) for shift in (0, -1, 1)}
    numbers = {"median_abs": {str(shift): value for shift, value in distance.items()}, "scored_by": how}
    here = distance[0]
    if here is None:
        return unknown(f"nothing to compare with by {how}", **numbers)
    if here <= _SHIFT_CLEAR:
        return Outcome("pass", f"each stands for its own token (median abs {here:.2g}, by {how})", numbers=numbers)
    for shift in (-1, 1):
        there = distance[shift]
        if there is not None and there < min(_SHIFT_CLEAR, here / 4):
            which = "next" if shift > 0 else "previous"
            text = f"each stands for the {which} token (median abs {there:.2g} there, {here:.2g} at its own)"
            return Outcome("fail", text, "SHIFTED_BY_ONE", numbers | {"shift": shift})
    text = f"they belong to other tokens than the ones given: median abs {here:.2g} nats against a second scoring"
    return Outcome("fail", text, "NOT_OF_THESE_TOKENS", numbers)


def _distance(sampled: list[float | None], scored: list[float | None], shift: int) -> float | None:
    sizes = [
        abs(one - two)
        for n, one in enumerate(sampled)
        if one is not None and 0 <= n + shift < len(scored) and (two := scored[n + shift]) is not None
        and math.isfinite(one - two)
    ]  # fmt: skip
    return float(median(sizes)) if len(sizes) >= 4 else None


async def rescore(p: Probe) -> Outcome:
    """Is a second scoring by prefill the same bits as what the decode step recorded."""
    sampled, scored, how = await _decode_and_score(p)
    pairs = [(one, two) for one, two in zip(sampled, scored, strict=False) if one is not None and two is not None]
    if not pairs:
        return unknown(f"nothing to compare with by {how}")
    equal = sum(one == two for one, two in pairs)
    sizes = [abs(one - two) for one, two in pairs if math.isfinite(one - two)]
    numbers = {
        "of": len(pairs),
        "equal": equal,
        "mean_abs": sum(sizes) / max(len(sizes), 1),
        "max_abs": max(sizes, default=None),
    }
    if equal == len(pairs):
        return Outcome("pass", f"{equal} of {len(pairs)} bit-equal, by {how}", numbers=numbers)
    hint = ""
    degree = p.engine.facts.get("tp_size")
    if isinstance(degree, int) and degree > 1:
        hint = (
            f"ALLREDUCE_ORDER is a suspect at tensor-parallel degree {degree}: measure the same at degree 1, and pin "
        )
        hint += "NCCL_MIN_NCHANNELS and NCCL_MAX_NCHANNELS to one value"
    text = (
        f"{equal} of {len(pairs)} bit-equal, mean abs {numbers['mean_abs']:.2g}, max {numbers['max_abs']:.2g}, by {how}"
    )
    return Outcome("fail", text, "PREFILL_IS_NOT_DECODE", numbers, hint=hint)


async def rescore_temperature(p: Probe) -> Outcome:
    """Does a second scoring follow the temperature."""
    ids = await p.ids(prompts.VICTIM)
    one, half = await p.dialect.score(ids, 1.0), await p.dialect.score(ids, 0.5)
    pairs = [(a, b) for a, b in zip(one, half, strict=True) if a is not None and b is not None]
    if not pairs:
        return unknown("the engine scored no token")
    if all(abs(a - b) <= 1e-3 for a, b in pairs):
        warning = ("INPUT_LOGPROBS_IGNORE_TEMPERATURE", "do not score again by prefill at a temperature other than 1")
        text = f"score at T=0.5 and T=1 are the same ({pairs[0][0]:.4g}): the temperature is ignored"
        return Outcome("pass", text, "INPUT_LOGPROBS_IGNORE_TEMPERATURE", {"tokens": len(pairs)}, (warning,))
    return Outcome("pass", "a second scoring follows the temperature", numbers={"tokens": len(pairs)})


async def precision(p: Probe) -> Outcome:
    """On which grid do the log-probs lie."""
    values = [v for _, answer in p.plain for v in answer.logprobs if v is not None]
    values += [
        v for _, answer in p.plain for top in answer.top for v in top.values() if v is not None and v > fit.FLOOR
    ]
    if len(set(values)) < 16:
        values += [v for v in (await _plain(p, prompts.OPEN)).values() if v is not None]
    found = fit.grid(values)
    numbers = {"grid": found, "distinct": len(set(values))}
    if found == "too few":
        return unknown(f"{len(set(values))} different log-probs are too few to tell", **numbers)
    if found == "float32 or finer":
        return Outcome("pass", found, numbers=numbers)
    if found.startswith("decimals"):
        places = found.partition(":")[2]
        return Outcome("fail", f"rounded to {places} decimals", "ROUNDED_LOGPROBS", numbers)
    step = {"bf16": "0.0078 for a log-prob between -1 and -2", "fp16": "0.00098 for a log-prob between -1 and -2"}[
        found
    ]
    text = f"every log-prob lies on the {found} grid (steps of {step}): a gap below that cannot be seen"
    return Outcome("fail", text, f"{found.upper()}_GRID", numbers)
