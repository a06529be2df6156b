from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zerogap.errors import UsageError
from zerogap.trainer.packing import micro_batch, mini_batches, pack
from zerogap.trainer.sample import SequenceSampler, TrainSequence


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 60))
def test_every_sequence_once_in_order_within_the_budget(rows, budget):
    batches = pack(rows, budget)
    assert [i for batch in batches for i in batch] == [i for i, count in enumerate(rows) if count]
    for batch in batches:
        assert sum(rows[i] for i in batch) <= budget or len(batch) == 1
    for batch, following in pairwise(batches):
        assert sum(rows[i] for i in batch) + rows[following[0]] > budget, "a micro-batch ended before it was full"


def test_a_budget_below_one_row_is_refused():
    with pytest.raises(UsageError, match="at least 1 row, not 0"):
        pack([1], 0)


keys = st.lists(st.tuples(*[st.integers(0, 99)] * 3), min_size=1, max_size=30, unique=True)


@given(keys, st.integers(1, 5), st.integers(0, 2**63), st.integers(0, 10**6))
def test_mini_batches_deal_every_sequence_once(keys, updates, seed, step):
    updates = min(updates, len(keys))
    parts = mini_batches(keys, updates, seed, step)
    assert sorted(i for part in parts for i in part) == list(range(len(keys)))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert all(part == sorted(part) for part in parts)
    # The deal belongs to the keys, not to the order they arrive in.
    turned = mini_batches(keys[::-1], updates, seed, step)
    assert [{keys[::-1][i] for i in part} for part in turned] == [{keys[i] for i in part} for part in parts]


def test_mini_batches_depend_on_seed_and_step_and_are_pinned():
    keys = [(0, i, 0) for i in range(8)]
    deals = [mini_batches(keys, 2, seed, step) for seed, step in [(0, 0), (1, 0), (0, 1)]]
    assert deals[0] != deals[1]
    assert deals[0] != deals[2]
    assert deals[0] == PINNED, "another deal would change the weights of every run"


PINNED = [[0, 1, 2, 5], [3, 4, 6, 7]]


def test_more_updates_than_sequences_are_refused():
    with pytest.raises(UsageError, match="4 updates per rollout need at least as many sequences, the rollout has 3"):
        mini_batches([(0, 0, 0), (0, 1, 0), (0, 2, 0)], 4, seed=0, step=0)


def sequence(tokens, prompt, mask, **sampler):
    response = len(tokens) - prompt
    return TrainSequence(
        key=(0, 0, 0),
        tokens=tokens,
        prompt_length=prompt,
        logprobs_engine=torch.zeros(response),
        loss_mask=torch.tensor(mask, dtype=torch.bool),
        advantage=1.0,
        weights_version=0,
        sampler=SequenceSampler(**sampler),
    )


def test_rows_targets_and_settings_by_hand():
    sequences = [
        sequence([10, 11, 12, 13], 2, [1, 1], temperature=0.5, suppressed=((0, (3,)), (1, (4,)))),
        sequence([99, 98], 1, [1]),
        sequence([20, 21, 22, 23, 24], 1, [0, 1, 0, 1], top_k=7, suppressed=((0, (5,)), (3, (6, 7)))),
    ]
    batch = micro_batch(sequences, (0, 2))
    assert batch.tokens == ([10, 11, 12], [20, 21, 22, 23])
    assert batch.scored_S.tolist() == [1, 2, 4, 6]
    assert batch.targets_S.tolist() == [12, 13, 22, 24]
    assert batch.counts == (2, 2)
    assert batch.settings.temperature_R.tolist() == [0.5, 0.5, 1.0, 1.0]
    assert batch.settings.top_k_R.tolist() == [0, 0, 7, 7]
    assert batch.settings.suppressed == ((0, (3,)), (1, (4,)), (3, (6, 7)))
    assert batch.settings.kept is None


def test_kept_sets_are_replayed_row_by_row():
    sequences = [sequence([1, 2, 3], 1, [1, 1]), sequence([1, 2], 1, [1])]
    ids = [torch.tensor([2, 5], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)]
    batch = micro_batch(sequences, (0, 1), kept=[(ids[0], None), (ids[1],)])
    assert batch.settings.kept is not None
    assert [None if k is None else (k.dtype, k.tolist()) for k in batch.settings.kept] == [
        (torch.int32, [2, 5]),
        None,
        (torch.int32, [4]),
    ]
