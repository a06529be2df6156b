"""Kept sets at rest come back as they were, in as few bytes as there is a form for."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from zerogap.ops import portable as ops
from zerogap.ops.portable.kept import kept_mask, stored_kept_set

from ..support import same_bits


@given(st.lists(st.booleans(), min_size=1, max_size=300))
def test_a_kept_set_comes_back(kept: list[bool]) -> None:
    row = torch.tensor(kept)
    stored = stored_kept_set(row)
    if all(kept):
        assert stored is None
        return
    assert stored is not None
    assert torch.equal(kept_mask(stored, len(row)), row)
    assert stored.nbytes == min(4 * sum(kept), -(-len(kept) // 8))


@pytest.mark.parametrize("vocabulary", [70, 2000])
@pytest.mark.parametrize("top_k", [1, 3, 60])
def test_either_form_replays_to_the_same_bits(vocabulary: int, top_k: int) -> None:
    logits = torch.randn(9, vocabulary, generator=torch.Generator().manual_seed(top_k))
    settings = ops.SamplerRows.uniform_settings(9, 0.8, top_k=top_k)
    first = ops.log_distribution(logits.clone(), settings)
    sets = first.kept_sets()
    assert {stored.dtype for stored in sets if stored is not None} == {
        torch.int32 if 4 * top_k <= -(-vocabulary // 8) else torch.uint8
    }
    again = ops.log_distribution(logits.clone(), settings.replaying(sets))
    assert same_bits(again.logprob_RV, first.logprob_RV)
    other = ops.log_distribution(logits.clone(), settings.replaying(sets[1:] + sets[:1]))
    assert not same_bits(other.logprob_RV, first.logprob_RV), "the control: another row's set"
