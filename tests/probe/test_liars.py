"""An engine that lies in one way: the lie is found, named, and its figures are right. An honest one passes."""

from __future__ import annotations

import pytest

from tests.probe.conftest import Asked, run_probe
from tests.probe.engine_server import Truth
from zerogap.errors import ExitCode
from zerogap.probe import verdict

# (behaviour, check, code, how far the check is asked)
LIES = [
    (Truth(noise="run"), "repeat", "NOT_REPEATABLE", False),
    (Truth(noise="batch", step_s=0.01), "company", "NOT_BATCH_INVARIANT", False),
    (Truth(noise="cache"), "prefix-cache", "PREFIX_CACHE_DRIFT", False),
    (Truth(noise="order"), "order", "ORDER_DEPENDENT", False),
    (Truth(noise="chunk"), "long-prompt", "CHUNKED_PREFILL_DRIFT", True),
    (Truth(decode_noise=True), "rescore", "PREFILL_IS_NOT_DECODE", False),
    (Truth(stream_differs=True), "stream", "STREAM_DIFFERS", False),
    (Truth(greedy_second=True), "ties", "NOT_THE_MOST_LIKELY", False),
    (Truth(ignore_seed="random"), "seed-honoured", "SEED_IGNORED", False),
    (Truth(ignore_seed="constant"), "seed-honoured", "SEED_IGNORED", False),
    (Truth(ignore_seed="constant"), "seed-absent", "SAME_WITHOUT_SEED", False),
    (Truth(seed_with_batch=True, step_s=0.01), "seed-company", "SEED_DEPENDS_ON_COMPANY", False),
    (Truth(meaning="tripled"), "temperature", "TEMPERATURE_NOT_AS_ASKED", False),
    (Truth(logprob="list"), "list", "RENORMALISED_OVER_LIST", False),
    (Truth(logprob="shift"), "token", "SHIFTED_BY_ONE", False),
    (Truth(logprob="bf16"), "precision", "BF16_GRID", False),
    (Truth(logprob="fp16"), "precision", "FP16_GRID", False),
    (Truth(logprob="decimals"), "precision", "ROUNDED_LOGPROBS", False),
    (Truth(logprob="pad"), "values", "PADDED_LOGPROBS", False),
    (Truth(logprob="sentinel"), "values", "SENTINEL_LOGPROBS", False),
    (Truth(logprob="null"), "values", "NOT_A_LOGPROB", False),
    (Truth(logprob="nan"), "values", "NOT_A_LOGPROB", False),
    (Truth(logprob="neginf"), "values", "NOT_A_LOGPROB", False),
    (Truth(logprob="missing"), "values", "MISSING_LOGPROBS", False),
    (Truth(logprob="json"), "values", "NONFINITE_LOGPROB", False),
    (Truth(logprob="short"), "lengths", "LENGTH_MISMATCH", False),
    (Truth(retokenise=True), "token-ids", "RETOKENISED", True),
    (Truth(stop_kept=True), "stops", "STOP_EDGE", False),
    (Truth(errors_as_500=True), "errors", "PERMANENT_ERROR_AS_5XX", False),
    (Truth(health_only=True), "alive", "DEAD_BEHIND_HEALTH", False),
    (Truth(die_at_first=True), "alive", "DIED_AT_FIRST_FORWARD", False),
]


@pytest.mark.parametrize(("truth", "check", "code", "full"), LIES, ids=[f"{c}-{k}" for _, c, k, _ in LIES])
def test_a_lie_is_found_and_named(asked: Asked, truth: Truth, check: str, code: str, full: bool) -> None:
    before = {"company": ("repeat",), "seed-company": ("seed-honoured",)}.get(check, ())
    found = asked(truth, *before, check, full=full)
    assert (found[check].outcome.status, found[check].outcome.code) == ("fail", code), found[check].outcome.observed
    for name in before:
        assert found[name].outcome.status == "pass"


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_honest_engine_passes(full: bool) -> None:
    result = run_probe(Truth(), full=full)
    found = {f.check.name: f.outcome for f in result.findings}
    assert {name for name, outcome in found.items() if outcome.status == "fail"} == set()
    # No tie may come up in the few greedy steps: that is said, and is not needed.
    assert {name for name, outcome in found.items() if outcome.status == "unknown"} <= {"ties"}
    assert verdict.exit_code(result) is ExitCode.HOLDS
    assert verdict.deterministic(result) == "yes"
    assert result.requests <= (1500 if full else 200)


@pytest.mark.parametrize(
    ("meaning", "temperature", "truncation", "penalties"),
    [
        ("raw", "RAW_BEFORE_TEMPERATURE", "raw", "PENALTIES_OUT"),
        ("temperature", "AFTER_TEMPERATURE", "raw", "PENALTIES_IN"),
        ("processed", "AFTER_TEMPERATURE", "renormalised", "PENALTIES_IN"),
        ("masked", "AFTER_TEMPERATURE", "masked", "PENALTIES_IN"),
    ],
)
def test_the_meaning_of_a_logprob_is_named(
    asked: Asked, meaning: str, temperature: str, truncation: str, penalties: str
) -> None:
    found = asked(Truth(meaning=meaning), "temperature", "truncation", "penalties")
    assert found["temperature"].outcome.code == temperature
    assert found["truncation"].outcome.numbers["semantics"] == truncation
    assert found["penalties"].outcome.code == penalties
    assert all(f.outcome.status == "pass" for f in found.values())


def test_fitted_figures_are_within_two_per_cent(asked: Asked) -> None:
    found = asked(Truth(meaning="processed"), "temperature", "truncation", "penalties", full=True)
    for asked_for, fitted in found["temperature"].outcome.numbers["fitted"].items():
        assert fitted == pytest.approx(float(asked_for), rel=0.02)
    for entry in found["truncation"].outcome.numbers["masses"].values():
        assert entry["kept_mass"] == pytest.approx(entry["expected_mass"], rel=0.02)
    assert found["truncation"].outcome.numbers["order"] == "temperature, then top-p"
    for entry in found["penalties"].outcome.numbers["penalties"].values():
        assert entry["fitted"] == pytest.approx(entry["asked"], rel=0.02)


def test_a_temperature_floor_is_fitted(asked: Asked) -> None:
    found = asked(Truth(meaning="temperature", temperature_floor=0.8), "temperature")["temperature"].outcome
    assert found.code == "TEMPERATURE_NOT_AS_ASKED"
    assert found.numbers["fitted"]["0.5"] == pytest.approx(0.8, rel=0.02)


@pytest.mark.parametrize("meaning", [pytest.param("raw", marks=pytest.mark.slow), "processed"])
@pytest.mark.parametrize(
    "default",
    [
        {"temperature": 0.7},
        {"top_p": 0.8},
        {"top_k": 8},
        {"repetition_penalty": 1.1},
        {"repetition_penalty": 1.05, "top_p": 0.8},
    ],
    ids=lambda default: "+".join(default),
)
def test_inherited_defaults_are_found_with_their_values(asked: Asked, meaning: str, default: dict[str, float]) -> None:
    found = asked(Truth(meaning=meaning, default=default), "defaults")["defaults"].outcome
    assert (found.status, found.code) == ("fail", "INHERITED_SAMPLING")
    inherited = found.numbers["inherited"]
    assert set(inherited) == set(default)
    for name, value in default.items():
        assert inherited[name] == pytest.approx(value, rel=0.02)


def test_a_default_behind_raw_logprobs_is_found_by_draws(asked: Asked) -> None:
    found = asked(Truth(default={"temperature": 0.7}), "defaults")["defaults"].outcome
    assert found.numbers["inherited"] == pytest.approx({"temperature": 0.7}, rel=0.02)
    assert found.numbers["evidence"] == "draws"


def test_padding_is_counted(asked: Asked) -> None:
    numbers = asked(Truth(logprob="pad"), "values")["values"].outcome.numbers
    assert numbers["zero_tail"] == 5


def test_kept_sets_of_one_token_are_no_padding(asked: Asked) -> None:
    assert asked(Truth(meaning="processed"), "values")["values"].outcome.status == "pass"


def test_noise_is_measured(asked: Asked) -> None:
    found = asked(Truth(noise="batch", noise_size=1e-3, step_s=0.01), "company")["company"].outcome
    assert 1e-6 < found.numbers["max_abs"] < 4e-3
    assert "1 of 1" in found.numbers["by_batch"]["2"]
    assert "0 of 1" in found.numbers["by_batch"]["32"]


def test_a_shift_is_told_by_its_direction(asked: Asked) -> None:
    assert asked(Truth(logprob="shift"), "token")["token"].outcome.numbers["shift"] == -1


class TestNoWrongVerdict:
    """What an overloaded or half-broken engine cannot show is unknown, never a failure or a pass."""

    def test_one_request_after_another(self, asked: Asked) -> None:
        found = asked(Truth(serial=True, step_s=0.01), "company")["company"].outcome
        assert found.status == "unknown"
        assert "one after another" in found.observed

    def test_what_differs_alone_is_blamed_on_nothing_else(self, asked: Asked) -> None:
        found = asked(Truth(noise="run"), "company", "order", "prefix-cache", "stream")
        assert {found[name].outcome.status for name in ("company", "order", "prefix-cache")} <= {"unknown", "pass"}
        assert "see repeat" in found["company"].outcome.observed

    def test_half_broken(self, asked: Asked) -> None:
        found = asked(Truth(broken_share=0.4), "repeat", "company", "temperature", "truncation", "values", "lengths")
        assert {f.outcome.status for f in found.values()} <= {"unknown", "pass"}
        assert found["company"].outcome.status == "unknown"

    def test_rate_limited(self, asked: Asked) -> None:
        found = asked(Truth(rate_limit=0.7), "company", "order", "temperature", "defaults")
        assert all(f.outcome.status in ("unknown", "pass") for f in found.values())
        assert found["company"].outcome.status == "unknown"

    def test_slow(self) -> None:
        result = run_probe(Truth(slow_s=0.6), seconds=3.0)
        assert {f.outcome.status for f in result.findings} <= {"unknown", "pass"}
        assert verdict.exit_code(result) is ExitCode.UNKNOWN
        assert result.seconds < 4.5

    def test_no_token_in_time(self) -> None:
        result = run_probe(Truth(hang=True), seconds=3.0)
        assert "NO_TOKEN_IN_TIME" in result.findings[0].outcome.observed
        assert {f.outcome.status for f in result.findings} == {"unknown"}
        assert result.seconds < 4.5

    def test_requests_are_counted_and_limited(self) -> None:
        result = run_probe(Truth(), requests=20)
        assert result.requests == 20
        assert "fail" not in {f.outcome.status for f in result.findings}
        assert verdict.exit_code(result) is ExitCode.UNKNOWN
