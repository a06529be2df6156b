"""What the steps of a run say: jumps, growth, resets, resumes, zeros, caps; and healthy runs that say nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerogap.gap.diagnoses.over_steps import diagnose_series
from zerogap.gap.facts import Facts
from zerogap.gap.series import Series


def found(values: list[float], *, contract: bool = False, steps: list[int] | None = None, **more: list[float]) -> dict:
    columns = {"abs_mean": np.array(values, dtype=float), **{k: np.array(v, dtype=float) for k, v in more.items()}}
    bad = {
        k: [i for i, x in enumerate(v) if not np.isfinite(x)] for k, v in columns.items() if not np.isfinite(v).all()
    }
    series = Series("run", np.array(steps if steps is not None else range(len(values))), columns, {}, bad)
    return {f.code: f for f in diagnose_series(series, Facts(), contract=contract)}


def test_a_jump_at_the_first_update_names_the_step_and_the_update() -> None:
    made = found([0.010, 0.018, 0.015, 0.201, 0.19], lr=[0, 0, 0, 1e-4, 1e-4])
    assert made["STALE_WEIGHTS"].numbers["first_bad"] == 3
    assert "the first update with lr > 0" in made["STALE_WEIGHTS"].observed


def test_more_than_a_nat_after_a_sync_is_a_layout() -> None:
    assert "LAYOUT_AFTER_SYNC" in found([0.015, 0.015, 6.2, 6.1])
    assert "STALE_WEIGHTS" not in found([0.015, 0.015, 6.2, 6.1])


def test_growth_gives_baseline_now_and_slope() -> None:
    made = found([0.011, 0.019, 0.028, 0.036], steps=[0, 10, 20, 30])
    assert "baseline 0.011, now 0.036, slope +0.0008" in made["GROWING_FROM_GOOD_STEP0"].observed
    assert "GAP_GROWS_AT_LR0" in found([0.011, 0.019, 0.028, 0.036], lr=[0, 0, 0, 0])
    longer = found([0.01, 0.02, 0.03, 0.04], response_length=[900, 2000, 3600, 5200])
    assert "covariate=response length" in longer["GROWING_FROM_GOOD_STEP0"].observed


def test_a_saw_tooth_points_to_engine_state() -> None:
    assert "STALE_PREFIX_CACHE" in found([0.012 + 0.004 * (i % 10) for i in range(30)])


def test_high_only_right_after_a_resume() -> None:
    assert "RESUME_ENGINE_HAS_BASE_WEIGHTS" in found([1.9, 0.013, 0.013, 0.014], steps=[120, 121, 122, 123])
    assert "RESUME_ENGINE_HAS_BASE_WEIGHTS" not in found([0.02, 0.013, 0.013, 0.014], steps=[0, 1, 2, 3])


def test_zero_at_the_first_step_only() -> None:
    for contract in (True, False):
        made = found([0.0, 0.08, 0.15], contract=contract)
        assert made["SYNC_NOT_APPLIED"].numbers["first_bad"] == 1


def test_zero_without_a_contract_is_suspicious_and_with_one_it_is_not() -> None:
    assert "SUSPICIOUS_ZERO" in found([0.0] * 5)
    assert not found([0.0] * 5, contract=True)
    assert "NaN masked" in found([0.0] * 3, grad_norm=[float("nan")] * 3)["SUSPICIOUS_ZERO"].observed
    assert "SUSPICIOUS_ZERO" in found([0.014, 0.0, 0.015, 0.014])


def test_nan_is_never_a_number() -> None:
    made = found([0.014, float("nan"), 0.015])
    assert made["NAN_MASKED"].numbers["steps"] == [1]
    assert "NO_DATA" in found([float("nan")] * 3)


def test_a_cap_is_recognised_and_a_varying_maximum_is_not() -> None:
    assert "CLIPPED_METRIC" in found([0.01] * 4, ratio_max=[2.0, 2.0, 1.7, 2.0])
    assert "CLIPPED_METRIC" not in found([0.01] * 4, ratio_max=[2.1, 1.4, 1.7, 1.9])


def test_only_a_step_with_a_gradient_is_evidence() -> None:
    assert "SYNC_NOT_TESTABLE_YET" in found([0.010, 0.011], grad_norm=[0, 0])
    assert "SYNC_OK" in found([0.010, 0.011], grad_norm=[0, 0.2])


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.3, 1.15), st.integers(5, 60))
def test_a_steady_or_falling_gap_says_nothing(seed: int, trend: float, count: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.normal(0.0148, 0.0006, count) * np.linspace(1, trend, count)
    assert not [f for f in found(values.tolist()).values() if f.level in ("fault", "warn")]


NOISE = {"abs_mean": 0.12, "k3": 0.5, "abs_max": 0.4, "k2": 0.5, "mult_prob_error": 0.2, "prob_abs_mean": 0.12}


@pytest.mark.parametrize("quantity", [*NOISE, "k1"])
def test_the_scatter_of_healthy_runs_raises_no_alarm_in_a_hundred(quantity: str) -> None:
    alarms = 0
    for seed in range(400):
        rng = np.random.default_rng(seed)
        count = int(rng.integers(2, 80))
        base = 1.0 if quantity == "mult_prob_error" else 0.0
        values = base + 0.01 * np.exp(rng.normal(0, NOISE.get(quantity, 0), count))
        if quantity == "k1":
            values = rng.normal(1e-4, 4e-4, count)
        series = Series("run", np.arange(count), {quantity: values})
        alarms += any(f.level == "fault" for f in diagnose_series(series, Facts(), contract=False))
    assert alarms <= 4


@pytest.mark.parametrize("quantity", ["k3", "mult_prob_error", "k1"])
def test_other_quantities_are_judged_by_their_own_zero(quantity: str) -> None:
    base = 1.0 if quantity == "mult_prob_error" else 0.0
    series = Series("run", np.arange(5), {quantity: np.array([0.001, 0.001, 0.02, 0.02, 0.02]) + base})
    assert "STALE_WEIGHTS" in {f.code for f in diagnose_series(series, Facts(), contract=False)}
    series = Series("run", np.arange(5), {quantity: np.full(5, base)})
    assert "SUSPICIOUS_ZERO" in {f.code for f in diagnose_series(series, Facts(), contract=False)}
