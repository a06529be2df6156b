"""One function for each check of ``checks.toml``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from zerogap.probe.checks import alive, defaults, determinism, form, meaning, seeds
from zerogap.probe.context import Probe
from zerogap.probe.outcome import Outcome

CHECKS: dict[str, Callable[[Probe], Awaitable[Outcome]]] = {
    "alive": alive.alive,
    "repeat": determinism.repeat,
    "company": determinism.company,
    "order": determinism.order,
    "prefix-cache": determinism.prefix_cache,
    "long-prompt": determinism.long_prompt,
    "stream": determinism.stream,
    "ties": determinism.ties,
    "seed-honoured": seeds.honoured,
    "seed-company": seeds.in_company,
    "seed-absent": seeds.absent,
    "temperature": meaning.temperature,
    "list": meaning.listed,
    "truncation": meaning.truncation,
    "penalties": meaning.penalties,
    "token": meaning.token,
    "rescore": meaning.rescore,
    "rescore-temperature": meaning.rescore_temperature,
    "precision": meaning.precision,
    "values": form.values,
    "lengths": form.lengths,
    "token-ids": form.token_ids,
    "stops": form.stops,
    "defaults": defaults.defaults,
    "errors": form.errors,
    "alive-after": alive.alive_after,
}
