"""The comparison and its sums: words, not values; what is not finite or was not seen is never lost."""

from __future__ import annotations

import math

import pytest
import torch

from zerogap.rl.gate import Totals, compare, worst
from zerogap.rl.step_metrics import gap_metrics
from zerogap.trainer import Scored, TrainSequence


def sequence(logprobs: list[float], mask: list[bool] | None = None) -> TrainSequence:
    count = len(logprobs)
    trained = torch.tensor([True] * count if mask is None else mask)
    return TrainSequence((0, 0, 0), list(range(count + 1)), 1, torch.tensor(logprobs), trained, 1.0, 0)


def scored(logprobs: list[float]) -> Scored:
    return Scored(torch.tensor(logprobs), torch.zeros(len(logprobs)))


def test_equal_words_do_not_differ() -> None:
    found = compare([sequence([-1.5, 0.0, -30.25])], [scored([-1.5, 0.0, -30.25])], 3)
    assert (found.tokens_compared, found.tokens_different, found.gap_max, found.differences) == (3, 0, 0.0, ())


@pytest.mark.parametrize(
    ("engine", "trainer", "nonfinite", "gap"),
    [
        (-1.0, -1.0 + 2**-24, 0, 2**-24),
        (0.0, -0.0, 0, 0.0),
        (math.nan, math.nan, 1, math.nan),
        (-math.inf, -math.inf, 1, math.nan),
        (-1.0, math.nan, 1, math.nan),
    ],
)
def test_one_other_word_is_found(engine: float, trainer: float, nonfinite: int, gap: float) -> None:
    found = compare([sequence([-0.5]), sequence([-2.0, engine])], [scored([-0.5]), scored([-2.0, trainer])], 3)
    assert (found.tokens_compared, found.tokens_different, found.tokens_nonfinite) == (3, 1, nonfinite)
    assert [(d.index, d.place) for d in found.differences] == [(1, 1)]
    assert found.gap_max == pytest.approx(gap, nan_ok=True, rel=0, abs=0)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_totals_keep_a_nan_whichever_step_it_came_from(order: tuple[int, int]) -> None:
    bad = compare([sequence([math.nan])], [scored([-1.0])], 1)
    good = compare([sequence([-1.0])], [scored([-1.0])], 1)
    totals = Totals()
    for which in order:
        totals.add((bad, good)[which])
    assert math.isnan(totals.gap_max)
    assert math.isnan(totals.gap_sum)
    assert math.isnan(Totals.from_state(totals.state()).gap_max)


def test_a_step_without_compared_tokens_claims_no_gap() -> None:
    found = compare([sequence([-1.0, -2.0])], [None], 2)
    assert (found.tokens_compared, found.tokens_not_compared) == (0, 2)
    metrics = gap_metrics(found)
    assert metrics["gap/tokens_not_compared"] == 2
    assert not metrics.keys() & {"gap/mean", "gap/max", "train/train_rollout_logprob_abs_diff"}


def test_sampled_tokens_that_the_loss_mask_leaves_out_are_counted() -> None:
    """Two of four tokens were sampled in a turn that is not trained on."""
    found = compare([sequence([-1.0, -2.0, -3.0, -4.0], [True, False, False, True])], [scored([-1.0, -4.0])], 4)
    assert (found.tokens_compared, found.tokens_not_compared, found.tokens_different) == (2, 2, 0)


@pytest.mark.parametrize("passes", [([-1.0, -2.5], [-1.0, -2.0]), ([-1.0, -2.0], [-1.0, -2.5])])
def test_a_token_that_differs_in_one_of_two_passes_differs(passes: tuple[list[float], list[float]]) -> None:
    one = sequence([-1.0, -2.0])
    found = compare([one], [worst(one, *(scored(values) for values in passes))], 2)
    assert (found.tokens_compared, found.tokens_different, found.gap_max) == (2, 1, 0.5)


def test_a_nan_on_both_sides_of_the_first_pass_is_not_taken_for_equal() -> None:
    one = sequence([math.nan])
    assert math.isnan(worst(one, scored([math.nan]), scored([-1.0])).logprob_T.item())
