"""Every dialect against an honest engine that speaks it: no wrong verdict, and what can be asked is answered."""

from __future__ import annotations

import pytest

from tests.probe.conftest import run_probe
from tests.probe.engine_server import Truth

ASKED = (
    "stream",
    "seed-honoured",
    "temperature",
    "truncation",
    "token",
    "values",
    "lengths",
    "stops",
    "errors",
)
# What each kind of engine rightly leaves open: TGI takes no ids, a plain OpenAI-style server neither ids nor top-k.
OPEN = {
    "vllm": set[str](),
    "sglang": set[str](),
    "zerogap": set[str](),
    "llamacpp": set[str](),
    "tgi": {"token"},
    "openai": {"token"},
}


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.slow) if k == "zerogap" else k for k in OPEN])
def test_an_honest_engine_in_its_own_dialect(kind: str) -> None:
    result = run_probe(Truth(kind=kind), *ASKED)
    assert result.engine is not None
    assert result.engine.kind == {"llamacpp": "llama.cpp"}.get(kind, kind)
    found = {f.check.name: f.outcome for f in result.findings}
    unknown = {name for name, outcome in found.items() if outcome.status == "unknown"}
    assert unknown == OPEN[kind], {name: found[name].observed for name in unknown}
    failed = {name: outcome.observed for name, outcome in found.items() if outcome.status == "fail"}
    assert failed == {}


@pytest.mark.parametrize("kind", ["sglang", "llamacpp", "tgi", "openai"])
def test_lies_are_found_in_every_dialect(kind: str) -> None:
    result = run_probe(Truth(kind=kind, logprob="pad", ignore_seed="random"), "values", "seed-honoured")
    codes = {f.outcome.code for f in result.findings if f.outcome.status == "fail"}
    assert codes == {"PADDED_LOGPROBS", "SEED_IGNORED"}


def test_what_sglang_tells_of_itself_is_kept() -> None:
    facts = {"enable_deterministic_inference": True, "attention_backend": "fa3", "api_key": "secret"}
    result = run_probe(Truth(kind="sglang", facts=facts), "seed-absent")
    assert result.engine is not None
    assert result.engine.facts["attention_backend"] == "fa3"
    assert "api_key" not in result.engine.facts
    warnings = {code for f in result.findings for code, _ in f.outcome.warnings}
    assert "DETERMINISTIC_WITHOUT_SEED" in warnings
