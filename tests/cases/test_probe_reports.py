"""Reports of real users that the probe is for: the engine behaves as reported, the probe says what was wanted.

Identifiers are those of the collection of reports; each names its issue or pull request.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.probe.conftest import run_probe
from tests.probe.engine_server import Truth
from zerogap.probe.outcome import Outcome

SGLANG = {"enable_deterministic_inference": True}


def ask(truth: Truth, *only: str, full: bool = False) -> dict[str, Outcome]:
    return {f.check.name: f.outcome for f in run_probe(truth, *only, full=full).findings}


def warned(outcome: Outcome) -> set[str]:
    return {code for code, _ in outcome.warnings}


def r106() -> None:
    """sglang#15388: deterministic flag on, sampling without a seed varies."""
    found = ask(Truth(kind="sglang", facts=SGLANG), "seed-absent")["seed-absent"]
    assert warned(found) == {"DETERMINISTIC_WITHOUT_SEED"}


def r107() -> None:
    """sglang#15481: seed ignored on the OpenAI-style endpoint, honoured on the native one."""
    found = ask(Truth(kind="sglang", seed_endpoints=("/generate",)), "seed-honoured")["seed-honoured"]
    assert "SEED_IGNORED endpoint=/v1/completions" in found.observed
    assert "/generate: honoured" in found.observed


def r110() -> None:
    """vllm#51902: an unrelated prefill that grows past a size changes a decode row."""
    found = ask(Truth(noise="neighbour"), "repeat", "company", full=True)
    assert found["repeat"].status == "pass"
    assert found["company"].code == "NOT_BATCH_INVARIANT"
    beside = {name: text for name, text in found["company"].numbers["by_batch"].items() if "beside" in name}
    assert "1 of 1" in beside["beside a prompt of 9 words"]
    assert "0 of 1" in beside["beside a prompt of 200 words"]


def r112() -> None:
    """sglang PR #34159: prefill differs from decode under tensor parallelism only."""
    one = ask(Truth(kind="sglang", facts={"tp_size": 1}), "rescore")["rescore"]
    four = ask(Truth(kind="sglang", facts={"tp_size": 4}, decode_noise=True, noise_size=0.3), "rescore")["rescore"]
    assert one.status == "pass"
    assert four.code == "PREFILL_IS_NOT_DECODE"
    assert "ALLREDUCE_ORDER" in four.hint


def r113() -> None:
    """vllm#51290: unstable run to run; every suspect is named with the first test."""
    from zerogap.probe.outcome import checks

    found = ask(Truth(noise="run"), "repeat")["repeat"]
    assert found.code == "NOT_REPEATABLE"
    hint = checks()["repeat"].hint
    for suspect in ("fuse_allreduce_rms", "custom all-reduce", "enable_sp", "MoE combine"):
        assert suspect in hint
    assert hint.index("fuse_allreduce_rms") < hint.index("custom all-reduce")


def r118() -> None:
    """sglang PR #11368: NaN from the persistent matmul, only with the mode on."""
    on = ask(Truth(kind="sglang", facts=SGLANG, logprob="nan"), "values")["values"]
    off = ask(Truth(kind="sglang", logprob="nan"), "values")["values"]
    assert on.numbers["nan"] > 0
    assert warned(on) == {"BI_KERNEL_BUG"}
    assert warned(off) == set()


def r119() -> None:
    """sglang#19431: flag accepted, outputs differ above a batch size."""
    slow = Truth(kind="sglang", facts=SGLANG, noise="batch", step_s=0.01)  # requests overlap on a busy machine too
    found = ask(slow, "repeat", "company")["company"]
    assert found.code == "NOT_BATCH_INVARIANT"
    assert "1 of 1" in found.numbers["by_batch"]["2"]
    assert "0 of 1" in found.numbers["by_batch"]["32"]


def r123() -> None:
    """vllm#42259: prefill and decode use different kernels by design."""
    assert ask(Truth(decode_noise=True), "rescore")["rescore"].code == "PREFILL_IS_NOT_DECODE"


def r125() -> None:
    """trl#6789: log-probs renormalised over the nucleus."""
    found = ask(Truth(meaning="processed"), "truncation")["truncation"]
    assert warned(found) == {"SAMPLER_TRUNCATION"}
    entry = found.numbers["masses"]["top_p"]
    assert entry["kept_mass"] == pytest.approx(entry["expected_mass"], rel=0.02)


def r126() -> None:
    """NeMo-RL#69: raw mode hides the truncation error."""
    assert warned(ask(Truth(), "truncation")["truncation"]) == {"RAW_LOGPROBS_WITH_TRUNCATION"}


def r127() -> None:
    """vime#69: the engine's log-probs are before the temperature."""
    found = ask(Truth(), "temperature")["temperature"]
    assert found.code == "RAW_BEFORE_TEMPERATURE"
    assert found.numbers["fitted"]["0.5"] == pytest.approx(1.0, rel=0.02)


def r128() -> None:
    """miles#1345: scoring by prefill ignores the temperature."""
    for kind in ("sglang", "vllm"):
        found = ask(Truth(kind=kind), "rescore-temperature")["rescore-temperature"]
        assert warned(found) == {"INPUT_LOGPROBS_IGNORE_TEMPERATURE"}
    follows = ask(Truth(score_follows_temperature=True), "rescore-temperature")["rescore-temperature"]
    assert warned(follows) == set()


def r129() -> None:
    """prime-rl#886: values inherited from generation_config."""
    default = {"repetition_penalty": 1.05, "top_p": 0.8, "top_k": 20}
    found = ask(Truth(default=default), "defaults", full=True)["defaults"]
    assert found.code == "INHERITED_SAMPLING"
    assert found.numbers["inherited"] == pytest.approx(default, rel=0.02)


def r130() -> None:
    """sglang#5961: what a log-prob means is measured, not assumed from its name."""
    found = ask(Truth(meaning="temperature"), "temperature", "truncation")
    assert found["temperature"].numbers["semantics"] == "temperature"
    assert found["truncation"].numbers["semantics"] == "raw"


def r131() -> None:
    """trl#6880: a floor under the temperature."""
    found = ask(Truth(meaning="temperature", temperature_floor=0.01), "temperature", full=True)["temperature"]
    assert warned(found) == {"TEMPERATURE_FLOOR"}
    assert found.numbers["floor"] == pytest.approx(0.01, rel=0.02)


def r132() -> None:
    """verl#6240: which mode is right; the row of the table that applies is printed."""
    found = ask(Truth(meaning="processed"), "temperature")["temperature"]
    assert "the trainer must divide its logits by T" in found.observed


def r134() -> None:
    """trl#6166: null and NaN are counted apart and never become 0."""
    found = ask(Truth(logprob="null and nan"), "values")["values"]
    assert found.status == "fail"
    assert found.numbers["null"] == found.numbers["nan"] > 0
    assert "never put 0" in found.observed


def r135() -> None:
    """slime#1790: -inf is no JSON."""
    found = ask(Truth(logprob="json"), "values")["values"]
    assert "NONFINITE_LOGPROB cause=truncated support" in found.observed


def r136() -> None:
    """vime#70: missing log-probs padded with 0.0; a length mismatch is told with its numbers."""
    assert "PADDED_LOGPROBS n=5" in ask(Truth(logprob="pad"), "values")["values"].observed
    assert "tokens=17 logprobs=16 engine's count=17" in ask(Truth(logprob="short"), "lengths")["lengths"].observed


def r141() -> None:
    """strands-sglang#34: the first input log-prob is null by design and is no failure."""
    assert ask(Truth(kind="sglang"), "rescore")["rescore"].status == "pass"


CASES: dict[str, Callable[[], None]] = {
    name.upper(): function for name, function in list(globals().items()) if name.startswith("r1") and callable(function)
}

# What no request to a running engine can show, with where it is looked at instead.
OUT_OF_REACH = {
    "R108": "who chose the attention backend is decided before the engine answers: zerogap check",
    "R114": "sequence parallelism is a launch flag: zerogap check (its effect is seen as NOT_REPEATABLE)",
    "R117": "TF32 inside a kernel shows only against a float32 trainer: zerogap check, and --trainer-model",
    "R137": "a framework's logged number: zerogap gap",
    "R139": "outliers in a run's log-probs: zerogap gap",
    "R142": "a trainer's loss mask: zerogap gap",
    "R143": "a trainer's loss mask: zerogap gap",
    "R144": "a token that a framework appended: zerogap gap",
    "R145": "a trainer's padding: zerogap gap",
    "R146": "a framework's clipped metric: zerogap gap",
    "R147": "a framework's log lines: zerogap gap",
}
ALL = ["R106", "R107", "R108", "R110", "R112", "R113", "R114", "R117", "R118", "R119", "R123", "R125", "R126", "R127",
       "R128", "R129", "R130", "R131", "R132", "R134", "R135", "R136", "R137", "R139", "R141", "R142", "R143", "R144",
       "R145", "R146", "R147"]  # fmt: skip


SLOW = {"R110", "R129"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in CASES]
)
def test_report(name: str) -> None:
    CASES[name]()


def test_every_report_is_a_test_or_out_of_reach_with_a_reason() -> None:
    assert sorted([*CASES, *OUT_OF_REACH]) == ALL
    page = (Path(__file__).parents[2] / "docs/probe.md").read_text()
    for name in OUT_OF_REACH:
        assert name in page
