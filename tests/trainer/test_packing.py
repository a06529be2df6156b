from itertools import groupby, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zerogap.errors import UsageError
from zerogap.trainer.packing import micro_batch, mini_batches, pack
from zerogap.trainer.sample import SequenceSampler, TrainSequence

# Per sequence: which prompt it has, and how many response rows; None is a sequence without trained tokens.
groups = st.lists(st.tuples(st.integers(0, 3), st.none() | st.integers(0, 20)), max_size=20)


def drawn(shapes, prompt_rows=7):
    return [
        sequence([prompt] * prompt_rows + [9] * ((rows or 0) + 1), prompt_rows, [0] * (rows or 0) + [rows is not None])
        for prompt, rows in shapes
    ]


def rows_of(sequences, members):
    """Rows of a micro-batch by the plain way: the sequences' own, and one prompt each."""
    prompts = {sequences[i].prompt_tokens for i in members}
    return sum(map(len, prompts)) + sum(sequences[i].input_rows - sequences[i].prompt_length for i in members)


@given(groups, st.integers(1, 60))
def test_every_sequence_once_in_order_within_the_budget(shapes, budget):
    sequences = drawn(shapes)
    batches = pack(sequences, range(len(sequences)), budget)
    assert [i for batch in batches for i in batch] == [i for i, (_, rows) in enumerate(shapes) if rows is not None]
    for batch in batches:
        assert rows_of(sequences, batch) <= budget or len(batch) == 1
        assert micro_batch(sequences, batch).row_count == rows_of(sequences, batch)


@given(groups, st.integers(1, 60))
def test_groups_stay_together_and_no_micro_batch_ends_before_it_is_full(shapes, budget):
    sequences = drawn(shapes)
    present = [i for i, (_, rows) in enumerate(shapes) if rows is not None]
    runs = [tuple(run) for _, run in groupby(present, lambda i: sequences[i].prompt_tokens)]
    batches = pack(sequences, range(len(sequences)), budget)
    for run in runs:
        holding = [batch for batch in batches if set(batch) & set(run)]
        assert len(holding) == 1 or rows_of(sequences, run) > budget, "a group that fits was cut"
    for batch, following in pairwise(batches):
        run = next(run for run in runs if following[0] in run)
        unit = run if rows_of(sequences, run) <= budget else (following[0],)
        counted = sum(rows_of(sequences, [i for i in batch if i in part]) for part in runs if set(part) & set(batch))
        shared = 7 if set(batch) & set(run) else 0  # a cut group's prompt is there already
        assert counted + rows_of(sequences, unit) - shared > budget


def test_a_group_above_the_budget_is_cut_and_its_prompt_repeated():
    sequences = drawn([(1, 5)] * 4 + [(2, 1)])
    assert pack(sequences, range(5), 17) == [(0, 1), (2, 3), (4,)]
    assert [micro_batch(sequences, batch).row_count for batch in pack(sequences, range(5), 17)] == [17, 17, 8]
    assert pack(sequences, (1, 3, 4), 17) == [(1, 3), (4,)], "members alone are packed"


@given(groups.filter(lambda shapes: any(rows is not None for _, rows in shapes)))
def test_every_position_of_every_member_has_its_row(shapes):
    sequences = drawn(shapes)
    members = tuple(i for i, (_, rows) in enumerate(shapes) if rows is not None)
    batch = micro_batch(sequences, members)
    rows = batch.rows()
    assert rows.slots_R.tolist() == list(range(batch.row_count)), "a row's slot is its number"
    for member, places in zip(members, batch.places, strict=True):
        assert rows.tokens_R[places].tolist() == sequences[member].tokens[: sequences[member].input_rows]
        assert rows.positions_R[places].tolist() == list(range(sequences[member].input_rows))


def test_a_budget_below_one_row_is_refused():
    with pytest.raises(UsageError, match="at least 1 row, not 0"):
        pack([], [], 0)


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
    assert [(list(chunk.tokens), chunk.start) for chunk in batch.chunks] == [([10, 11, 12], 0), ([20, 21, 22, 23], 0)]
    assert batch.scored_S.tolist() == [1, 2, 4, 6]
    assert batch.targets_S.tolist() == [12, 13, 22, 24]
    assert batch.counts == (2, 2)
    assert batch.settings.temperature_R.tolist() == [0.5, 0.5, 1.0, 1.0]
    assert batch.settings.top_k_R.tolist() == [0, 0, 7, 7]
    assert batch.settings.suppressed == ((0, (3,)), (1, (4,)), (3, (6, 7)))
    assert batch.settings.kept is None


def test_a_shared_prompt_comes_once_by_hand():
    sequences = [
        sequence([10, 11, 12, 13], 2, [1, 1]),
        sequence([10, 12, 5], 2, [1]),
        sequence([10, 11, 7, 8, 9], 2, [1, 0, 1]),
        sequence([10, 11, 6], 2, [1]),
    ]
    batch = micro_batch(sequences, (0, 1, 2, 3))
    assert [(list(chunk.tokens), chunk.start, list(chunk.block_table)) for chunk in batch.chunks] == [
        ([10, 11], 0, [0, 1]),
        ([12], 2, [0, 1, 2]),
        ([10, 12], 0, [3, 4]),
        ([7, 8], 2, [0, 1, 5, 6]),
    ]
    assert [places.tolist() for places in batch.places] == [[0, 1, 2], [3, 4], [0, 1, 5, 6], [0, 1]]
    assert batch.scored_S.tolist() == [1, 2, 4, 1, 6, 1], "the prompt's last row predicts a first token three times"
    assert batch.targets_S.tolist() == [12, 13, 5, 7, 9, 6]
    assert batch.row_count == 7


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
