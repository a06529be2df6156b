"""Distributions, kept sets, draws and uniform numbers: the portable backend's answers, row law, ties, replay."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.triton.interpreted.laws import DEVICE, INTERPRETED, bits, normal, row_law_holds, same
from zerogap.ops import portable
from zerogap.ops.portable import SamplerRows
from zerogap.ops.triton import distribution as d
from zerogap.ops.triton import sampling

SETTINGS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "top_k": {"temperature": 1.3, "top_k": 8},
    "top_p": {"top_p": 0.8},
    "all": {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    "min_p": {"min_p": 0.3},
    "first only": {"top_p": 0.0},
    "greedy": {"temperature": 0.0, "top_k": 3},
}


def _logits(rows: int, vocabulary: int) -> Tensor:
    logits = 4 * normal(rows, vocabulary)
    logits[:, 5] = logits[:, 50] = logits[:, 80]  # ties
    logits[-1] = logits[-1].round()  # and many of them
    return logits


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("vocabulary", [100, 1500])
def test_same_as_portable(name: str, vocabulary: int) -> None:
    rows = 2
    logits = _logits(rows, vocabulary)
    given_settings = SamplerRows.uniform_settings(rows, **SETTINGS[name])
    given_settings = replace(given_settings, suppressed=((1, (3, vocabulary - 1)),))
    before = logits.clone()
    ours = sampling.log_distribution(logits, given_settings)
    assert same(logits, before), "the caller's logits were changed"
    theirs = portable.log_distribution(logits.cpu(), given_settings)
    if ours.kept_RV is None:
        assert theirs.kept_RV is None
    else:
        assert torch.equal(ours.kept_RV.cpu(), theirs.kept_RV)
    if INTERPRETED:
        assert same(ours.total_R, theirs.total_R)
        assert same(ours.entropy_R, theirs.entropy_R)
        assert same(ours.logprob_RV, theirs.logprob_RV)
    uniform_R = torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    token_R = sampling.draw(ours, uniform_R)
    assert token_R.tolist() == portable.draw(theirs, uniform_R).tolist()
    assert same(ours.logprobs_of(token_R), ours.logprob_RV[range(rows), token_R])


def test_ties_are_kept_by_lower_id() -> None:
    logits = torch.zeros(2, 40, device=DEVICE)
    logits[1, 30:] = 1.0
    top_k = SamplerRows.uniform_settings(2, top_k=4)
    kept = sampling.log_distribution(logits, top_k).kept_RV
    assert kept is not None
    assert kept[0].nonzero().flatten().tolist() == [0, 1, 2, 3]
    assert kept[1].nonzero().flatten().tolist() == [30, 31, 32, 33]
    nucleus = sampling.log_distribution(logits, SamplerRows.uniform_settings(2, top_p=0.5)).kept_RV
    assert nucleus is not None
    assert nucleus[0].nonzero().flatten().tolist() == list(range(20))  # 20 of 40 equal ones
    # The total is 10 + 30/e, about 21.04: before the second of the unlikely ones stand 10.37, before the third 10.74.
    assert nucleus[1].nonzero().flatten().tolist() == [0, 1, *range(30, 40)]


@pytest.mark.parametrize("name", ["plain", "all"])
def test_row_law(name: str) -> None:
    def run(logits: Tensor) -> Tensor:
        rows = SamplerRows.uniform_settings(len(logits), **SETTINGS[name])
        found = sampling.log_distribution(logits, rows)
        return torch.cat((found.logprob_RV, found.entropy_R.unsqueeze(1)), 1)

    assert row_law_holds(run, _logits(3, 90), counts=(3,))


def test_the_control_is_found() -> None:
    """A sum over the vocabulary whose order depends on the number of rows breaks the law, and is seen to."""

    def control(logits: Tensor) -> Tensor:
        rows = SamplerRows.uniform_settings(len(logits))
        return sampling.log_distribution(logits.roll(7 * len(logits), 1), rows).log_total_R.unsqueeze(1)

    assert not row_law_holds(control, _logits(5, 2000), counts=(2, 5))


def test_a_bad_row_poisons_only_itself() -> None:
    logits = _logits(3, 90)
    logits[1, 7] = torch.nan
    ours = sampling.log_distribution(logits, SamplerRows.uniform_settings(3, top_k=5))
    alone = sampling.log_distribution(logits[2:], SamplerRows.uniform_settings(1, top_k=5))
    assert bool(ours.logprob_RV[1].isnan().all())
    assert same(ours.logprob_RV[2], alone.logprob_RV[0])
    assert int(sampling.draw(ours, torch.full((3,), 0.5, dtype=torch.float64))[1]) < 90


def test_replayed_kept_sets_give_the_same_log_probs() -> None:
    logits = _logits(3, 300)
    rows = SamplerRows.uniform_settings(3, temperature=0.9, top_p=0.97)
    rows = replace(rows, top_p_R=torch.tensor([0.9999, 0.3, 1.0], dtype=torch.float64))  # a bit mask, ids, everything
    first = sampling.log_distribution(logits, rows)
    stored = first.kept_sets()
    assert [None if s is None else s.dtype for s in stored] == [torch.uint8, torch.int32, None]
    again = sampling.log_distribution(logits, replace(rows, kept=stored))
    assert same(first.logprob_RV, again.logprob_RV)
    later = sampling.log_distribution(normal(3, 300, seed=9), replace(rows, kept=stored))
    assert torch.equal(later.kept_RV.cpu(), first.kept_RV.cpu())


def test_draws_invert_the_cumulative_distribution() -> None:
    vocabulary = 1100
    logits = torch.full((4, vocabulary), -torch.inf, device=DEVICE)
    logits[:, [3, 1023, 1024, 1099]] = 0.0
    ours = sampling.log_distribution(logits, SamplerRows.uniform_settings(4))
    below_one = 1 - 2.0**-53
    assert sampling.draw(ours, torch.tensor([0.0, 0.25, 0.5, below_one], dtype=torch.float64)).tolist() == [
        3,
        1023,
        1024,
        1099,
    ]
    assert sampling.draw(ours, torch.tensor([0.2499, 0.4999, 0.7499, 0.75], dtype=torch.float64)).tolist() == [
        3,
        1023,
        1024,
        1099,
    ]


@given(st.integers(2, 1 << 18))
def test_mass_cannot_overflow(vocabulary: int) -> None:
    assert vocabulary << d.mass_bits(vocabulary) <= 1 << 62


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**64 - 1), st.lists(st.tuples(*[st.integers(0, 2**63 - 1)] * 4), min_size=1, max_size=5))
def test_uniform_numbers_are_the_portable_ones(seed: int, keys: list[tuple[int, int, int, int]]) -> None:
    ours = sampling.uniform(seed, keys, DEVICE)
    assert torch.equal(bits(ours), bits(portable.uniform(seed, keys)))
