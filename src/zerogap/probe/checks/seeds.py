"""Is a seed honoured, at every endpoint and in other company, and what happens without one."""

from __future__ import annotations

from zerogap.probe import prompts
from zerogap.probe.ask import Answer, Ask
from zerogap.probe.context import Probe
from zerogap.probe.limits import BadAnswerError, HttpError, UnsupportedError
from zerogap.probe.outcome import Outcome, unknown

_SEEDS = (11, 12, 13)


def _sampled(p: Probe, seed: int | None) -> Ask:
    return Ask(prompts.OPEN, p.tokens, temperature=1.0, seed=seed)


def _key(answer: Answer) -> object:
    return answer.tokens or answer.text


async def honoured(p: Probe) -> Outcome:
    """Two seeds, each several times, at every endpoint that generates."""
    said: list[str] = []
    ignored: list[str] = []
    judged = 0
    for endpoint in p.dialect.endpoints:
        try:
            asks = [_sampled(p, seed) for seed in (*_SEEDS, *_SEEDS[:2])]
            keys = [_key(await p.ask(ask, endpoint=endpoint)) for ask in asks]
            once, again = keys[: len(_SEEDS)], keys[len(_SEEDS) :]
        except HttpError as error:
            if error.status not in (400, 404, 405, 422, 501):
                raise
            said.append(f"{endpoint}: not offered ({error.status})")
            continue
        except (UnsupportedError, BadAnswerError) as error:
            said.append(f"{endpoint}: {error}")
            continue
        judged += 1
        same = sum(one == two for one, two in zip(once, again, strict=False))
        if same < len(again):
            ignored.append(f"SEED_IGNORED endpoint={endpoint}: {same} of {len(again)} repeats with a seed were equal")
        elif len(set(once)) == 1:
            ignored.append(f"SEED_IGNORED endpoint={endpoint}: {len(once)} seeds gave one and the same output")
        else:
            said.append(f"{endpoint}: honoured")
    numbers = {"endpoints": judged, "ignored": len(ignored)}
    if ignored:
        return Outcome("fail", "; ".join([*ignored, *said]), "SEED_IGNORED", numbers)
    if not judged:
        return unknown("; ".join(said) or "no endpoint could be asked", **numbers)
    p.memo["seeds"] = True
    return Outcome("pass", "; ".join(said), numbers=numbers)


async def in_company(p: Probe) -> Outcome:
    """One seed, alone and among others that sample as well."""
    if not p.memo.get("seeds"):
        return unknown("seeds are not honoured when alone (see seed-honoured)")
    ask = _sampled(p, _SEEDS[0])
    alone = await p.ask(ask)
    sizes = (2, 8, 16) if p.full else (8,)
    changed = []
    for size in sizes:
        others = [Ask(text, p.tokens, temperature=1.0, seed=n) for n, text in enumerate(prompts.fillers(size - 1, 40))]
        answers = await p.together([*others, ask])
        if _key(answers[-1]) != _key(alone):
            changed.append(size)
    numbers = {"sizes": list(sizes), "changed": changed}
    if changed:
        text = f"one seed gave other tokens in batches of {', '.join(map(str, changed))}"
        return Outcome("fail", text, "SEED_DEPENDS_ON_COMPANY", numbers)
    return Outcome("pass", f"one seed gave the same tokens in batches of {', '.join(map(str, sizes))}", numbers=numbers)


async def absent(p: Probe) -> Outcome:
    """Without a seed the samples of a group must differ."""
    answers = await p.together([_sampled(p, None)] * 4)
    distinct = len({_key(answer) for answer in answers})
    numbers = {"distinct": distinct, "of": len(answers)}
    if distinct == 1:
        text = f"{len(answers)} unseeded requests gave one output: all samples of a group would be the same"
        return Outcome("fail", text, "SAME_WITHOUT_SEED", numbers)
    warnings: tuple[tuple[str, str], ...] = ()
    if p.engine.facts.get("enable_deterministic_inference"):
        warnings = (
            ("DETERMINISTIC_WITHOUT_SEED", "deterministic inference is on, yet sampling without a seed still varies"),
        )
    return Outcome("pass", f"{distinct} different outputs of {len(answers)}", numbers=numbers, warnings=warnings)
