import pytest
import torch

from zerogap.engine import replay
from zerogap.engine.trace import ReplayedStep

from ..support import random_decoder, same_bits
from .build import make_engine, request


class Recorder:
    """Keeps every op's rows, per forward."""

    def __init__(self):
        self.forwards = []

    def __call__(self, layer, op, x):
        if layer == -1:
            self.forwards.append([])
        self.forwards[-1].append((layer, op, x.clone()))
        return x


def crowded_run(hooks=()):
    """An engine that has chunked, shared, evicted, preempted and aborted, and a recorder of what its ops gave."""
    engine, recorder = make_engine(page_size=4, num_pages=14, max_rows_per_step=11), Recorder()
    engine.hooks = (*hooks, recorder)
    shared = tuple(range(1, 12))
    for number in range(4):
        engine.add(request(number, shared, max_tokens=9 + number, ignore_eos=True))
        engine.add(request(number, shared[::-1][: 4 + number], 1, max_tokens=14, ignore_eos=True))
    for _ in range(6):
        engine.step()
    engine.abort((0, 1, 0))
    while engine.has_work():
        engine.step()
    engine.generate([request(0, shared, max_tokens=5, seed=3, ignore_eos=True)])  # a key once more
    assert engine.statistics.preemptions > 0
    assert engine.statistics.cached_tokens > 0
    assert any(step.cleared for step in engine.trace.steps)
    return engine, recorder


def first_difference(recorded, repeated):
    for step, (before, after) in enumerate(zip(recorded.forwards, repeated.forwards, strict=True)):
        for (layer, op, x), (again_layer, again_op, again) in zip(before, after, strict=True):
            assert (layer, op) == (again_layer, again_op)
            if not same_bits(x, again):
                return step, layer, op, int((x != again).flatten(1).any(1).nonzero()[0])
    return None


def test_a_replay_gives_every_row_of_every_op_again():
    engine, recorded = crowded_run()
    repeated = Recorder()
    steps = list(replay(engine.trace, random_decoder(), engine.new_cache, (repeated,)))
    assert [step.index for step in steps] == list(range(len(engine.trace.steps)))
    assert first_difference(recorded, repeated) is None
    assert all(
        same_bits(step.hidden_RK, forward[-1][2]) for step, forward in zip(steps, recorded.forwards, strict=True)
    )


def test_a_replay_shows_a_fault_that_depends_on_the_batch():
    def batch_variant(layer, op, x):
        return x + len(x) * 1e-6 if (layer, op) == (1, "o_proj") else x

    engine, recorded = crowded_run((batch_variant,))
    again, clean = Recorder(), Recorder()
    list(replay(engine.trace, engine.decoder, engine.new_cache, (batch_variant, again)))
    assert first_difference(recorded, again) is None
    list(replay(engine.trace, engine.decoder, engine.new_cache, (clean,)))
    assert first_difference(recorded, clean)[1:3] == (1, "o_proj")


def test_rows_of_a_sequence_cover_its_positions_and_equal_those_alone():
    engine, _ = crowded_run()
    key = (0, 0, 3)
    tokens = engine.trace.tokens[engine.trace.keys.index(key)]
    rows = {}
    for step in replay(engine.trace, engine.decoder, engine.new_cache):
        if (found := step.rows_of(key)) is not None:
            where, positions = found
            for position, row in zip(positions, step.hidden_RK[where], strict=True):
                assert position not in rows or same_bits(rows[position], row)  # computed again after preemption
                rows[position] = row
    alone = make_engine(page_size=64)
    alone.generate([request(3, tokens[:11], max_tokens=len(tokens) - 11, ignore_eos=True)])
    for step in replay(alone.trace, alone.decoder, alone.new_cache):
        where, positions = step.rows_of(key)
        for position, row in zip(positions, step.hidden_RK[where], strict=True):
            assert position not in rows or same_bits(rows.pop(position), row)
    assert not rows


def test_rows_of_an_absent_sequence_are_none():
    step = ReplayedStep(0, (((0, 0, 0), range(3)), ((0, 0, 1), range(7, 8))), torch.zeros(4, 2))
    assert step.rows_of((0, 0, 1)) == (slice(3, 4), range(7, 8))
    assert step.rows_of((9, 9, 9)) is None


def test_a_replay_with_other_weights_differs():
    engine, recorded = crowded_run()
    repeated = Recorder()
    list(replay(engine.trace, random_decoder(seed=1), engine.new_cache, (repeated,)))
    with pytest.raises(AssertionError):
        assert first_difference(recorded, repeated) is None
