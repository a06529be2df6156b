import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerogap.trainer.advantages import group_advantages


def test_grpo_by_hand():
    # mean 0.5, sample deviation sqrt(4 * 0.25 / 3)
    result = group_advantages([[1.0, 0.0, 0.0, 1.0]], "grpo")
    unit = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    assert result.advantages == [[unit, -unit, -unit, unit]]
    assert result.groups_without_variance == 0


def test_dr_grpo_by_hand():
    assert group_advantages([[1.0, 0.0, 0.0, 0.0], [2.0, 4.0]], "dr_grpo").advantages == [
        [0.75, -0.25, -0.25, -0.25],
        [-1.0, 1.0],
    ]


@pytest.mark.parametrize("method", ["grpo", "dr_grpo"])
def test_groups_without_variance_are_exactly_zero_and_counted(method):
    # 0.1 + 0.1 + 0.1 divided by 3 is not 0.1 in floating point, so "r - mean(r)" would not be 0.
    result = group_advantages([[0.1] * 3, [5.0], [1.0, 2.0], []], method)
    assert result.advantages[0] == [0.0] * 3
    assert result.advantages[1] == [0.0]
    assert result.groups_without_variance == 3


@given(st.lists(st.lists(st.floats(-100, 100), min_size=1, max_size=9), max_size=5))
def test_against_the_formula(rewards):
    result = group_advantages(rewards, "grpo")
    for group, advantages in zip(rewards, result.advantages, strict=True):
        if max(group) == min(group):
            assert advantages == [0.0] * len(group)
            continue
        mean, deviation = statistics.fmean(group), statistics.stdev(group)
        for reward, advantage in zip(group, advantages, strict=True):
            assert advantage == pytest.approx((reward - mean) / (deviation + 1e-6), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rewards_that_are_not_finite_never_get_here(bad):
    with pytest.raises(AssertionError, match="finite"):
        group_advantages([[1.0, bad]])
