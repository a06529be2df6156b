import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from zerogap.ops import portable as ops

WORD = st.integers(0, 2**63 - 1)


def numbers_of_numpy(seed, keys):
    """One generator per key: numpy counts up before it draws, so its counter starts one lower."""
    return [
        np.random.Generator(
            np.random.Philox(
                key=np.array([seed, step], dtype=np.uint64),
                counter=np.array([0, position, sample, prompt], dtype=np.uint64),
            )
        ).random()
        for step, prompt, sample, position in keys
    ]


@given(WORD, st.lists(st.tuples(WORD, WORD, WORD, WORD), max_size=5))
def test_numbers_are_those_of_numpys_philox(seed, keys):
    assert ops.uniform(seed, keys).tolist() == numbers_of_numpy(seed, keys)


def test_a_number_depends_on_its_own_key_only():
    keys = [(1, prompt, sample, position) for prompt in range(3) for sample in range(3) for position in range(40)]
    together = ops.uniform(7, keys).tolist()
    assert [ops.uniform(7, [key]).item() for key in keys] == together
    assert len(set(together)) == len(keys)
    assert ops.uniform(8, keys).tolist() != together
    assert all(0 <= number < 1 for number in together)
    assert 0.4 < sum(together) / len(together) < 0.6


def test_no_keys_give_no_numbers():
    assert ops.uniform(0, []).shape == (0,)
