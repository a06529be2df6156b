"""Fits on constructed lists: the figure comes out for any temperature, kept set, penalty and grid."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.probe.http_server import bf16
from zerogap.probe import draws, fit
from zerogap.probe.checks.form import count_kinds

SEEDS = st.integers(0, 10_000)


def logits_of(seed: int, size: int = 200) -> np.ndarray:
    return np.random.default_rng(seed).normal(8.0, 2.0, size)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - logits.max() - math.log(np.exp(logits - logits.max()).sum())


def top(logprob: np.ndarray, count: int = 20) -> dict[int | str, float | None]:
    order = np.argsort(-logprob)[:count]
    return {int(t): float(logprob[t]) for t in order if np.isfinite(logprob[t])}


@given(SEEDS, st.floats(0.1, 4.0))
def test_temperature(seed: int, temperature: float) -> None:
    logits = logits_of(seed)
    plain, other = top(log_softmax(logits)), top(log_softmax(logits / temperature))
    assert fit.temperature([(plain, other)]) == pytest.approx(temperature, rel=1e-6)


def test_temperature_of_too_little_is_none() -> None:
    assert fit.temperature([]) is None
    assert fit.temperature([({1: -1.0, 2: -2.0}, {1: -1.0, 2: -2.0})]) is None
    assert fit.temperature([({1: -1.0, 2: -1.0, 3: -1.0}, {1: -1.0, 2: -2.0, 3: -3.0})]) is None


@given(SEEDS, st.integers(1, 12), st.booleans())
def test_truncation(seed: int, kept: int, renormalised: bool) -> None:
    logprob = log_softmax(logits_of(seed))
    keep = np.argsort(-logprob)[:kept]
    cut = np.full_like(logprob, -np.inf)
    mass = np.exp(logprob[keep]).sum()
    cut[keep] = logprob[keep] - (math.log(mass) if renormalised else 0.0)
    found = fit.truncation(top(logprob), top(cut))
    if renormalised and -math.log(mass) <= fit.EQUAL:
        return
    assert found.form == ("renormalised" if renormalised else "masked")
    assert found.kept_mass == pytest.approx(mass, rel=1e-6)
    assert found.kept == kept


@given(SEEDS)
def test_no_truncation_is_raw(seed: int) -> None:
    plain = top(log_softmax(logits_of(seed)))
    assert fit.truncation(plain, plain).form == "raw"
    other = {token: (value or 0.0) * 0.5 for token, value in plain.items()}
    assert fit.truncation(plain, other).form == "unclear"


@settings(max_examples=25)
@given(SEEDS, st.floats(1.03, 1.6))
def test_repetition_penalty(seed: int, factor: float) -> None:
    lists = []
    for number in range(2):
        logits = logits_of(seed + number)
        seen = np.argsort(-logits)[:20:2]
        changed = logits.copy()
        changed[seen] = np.where(logits[seen] > 0, logits[seen] / factor, logits[seen] * factor)
        entry = (top(log_softmax(logits)), top(log_softmax(changed), 200), frozenset(int(t) for t in seen))
        lists.append(entry)
    found = fit.penalty(lists)
    assert found.form == "repetition"
    assert found.value == pytest.approx(factor, rel=0.02)


@given(SEEDS, st.floats(0.1, 2.0))
def test_additive_penalty(seed: int, size: float) -> None:
    logits = logits_of(seed)
    seen = np.argsort(-logits)[:20:2]
    changed = logits.copy()
    changed[seen] -= size
    entry = (top(log_softmax(logits)), top(log_softmax(changed), 200), frozenset(int(t) for t in seen))
    found = fit.penalty([entry])
    assert found.form == "additive"
    assert found.value == pytest.approx(size, rel=1e-3)


def test_no_penalty_and_nothing_to_see() -> None:
    plain = top(log_softmax(logits_of(1)))
    assert fit.penalty([(plain, plain, frozenset(list(plain)[::2]))]).form == "none"
    assert fit.penalty([(plain, plain, frozenset())]).form == "unclear"
    assert fit.penalty([]).form == "unclear"


@given(SEEDS)
def test_grids(seed: int) -> None:
    values = [float(v) for v in log_softmax(logits_of(seed, 64)).astype(np.float32)]
    assert fit.grid(values) == "float32 or finer"
    assert fit.grid([bf16(v) for v in values]) == "bf16"
    assert fit.grid([float(np.float16(v)) for v in values]) == "fp16"
    assert fit.grid([round(v, 3) for v in values]) == "decimals:3"
    assert fit.grid(values[:5]) == "too few"
    assert fit.grid([math.nan, -math.inf, 0.0]) == "too few"


def drawn(seed: int, count: int, **settings: float) -> draws.Draws:
    """Draw from truncated or tempered distributions and tell the raw ones."""
    source = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        raw = log_softmax(source.normal(0.0, 2.0, 100))
        scaled = log_softmax(raw / settings.get("temperature", 1.0))
        order = np.argsort(-scaled)
        mass = np.exp(scaled[order])
        keep = np.ones(100, dtype=bool)
        if "top_p" in settings:
            keep &= np.cumsum(mass) - mass < settings["top_p"]
        if "top_k" in settings:
            keep &= np.arange(100) < settings["top_k"]
        if "min_p" in settings:
            keep &= mass >= settings["min_p"] * mass[0]
        weight = mass * keep
        token = order[source.choice(100, p=weight / weight.sum())]
        rows.append((list(raw[np.argsort(-raw)[:20]]), float(raw[token])))
    return draws.make_draws(rows, 20)


@settings(max_examples=20, deadline=None)
@given(SEEDS)
def test_neutral_draws_are_no_surprise(seed: int) -> None:
    assert draws.surprise(drawn(seed, 256)) < draws.SURPRISED


@pytest.mark.parametrize(
    ("name", "value", "within"),
    [
        ("temperature", 0.7, 0.06),
        ("temperature", 1.4, 0.12),
        ("top_p", 0.8, 0.02),
        ("top_k", 8, 0),
        ("min_p", 0.1, 0.05),
    ],
)
def test_settings_come_out_of_draws(name: str, value: float, within: float) -> None:
    sample = drawn(3, 2048, **{name: value})
    assert draws.surprise(sample) >= draws.SURPRISED
    found, error = draws.estimate(sample, name)
    assert abs(found - value) <= within
    if name == "temperature":
        assert abs(found - value) < 4 * error


def test_kinds_are_counted_apart() -> None:
    found = count_kinds((-0.1, None, math.nan, -2.0, -math.inf, math.inf, -9999.0, -100.0, 1.0, 0.0, 0.0, 0.0))
    assert found == {"null": 1, "nan": 1, "posinf": 1, "neginf": 1, "sentinel": 2, "positive": 1, "zero_tail": 3}
    assert count_kinds((-0.1, 0.0, 0.0))["zero_tail"] == 0
