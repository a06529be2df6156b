import math

import pytest

from zerogap.engine.params import Request, SamplingParams, suppressed_ids
from zerogap.errors import UsageError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 1e-46),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", True),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("top_k", -1),
        ("top_k", 2.5),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("seed", -1),
        ("seed", 2**63),
        ("logprobs", -1),
        ("stop_ids", (-1,)),
        ("stop_ids", ("a",)),
        ("stop_strings", ("",)),
        ("stop_strings", "END"),
        ("stop_strings", ("\ufffd",)),
    ],
)
def test_a_value_out_of_range_is_refused_by_the_name_of_its_field(field, value):
    with pytest.raises(UsageError, match=rf"^{field}: ") as refusal:
        SamplingParams(**{field: value})
    assert "\n" not in str(refusal.value)


def test_limits_of_the_ranges_are_allowed():
    SamplingParams(temperature=0, top_p=1, min_p=1.0, top_k=0, max_tokens=3, min_tokens=3, seed=2**63 - 1)


@pytest.mark.parametrize("key", [(0, 1), (0, 1, -1), (0, 1, 2.0), (0, 1, 2**32)])
def test_a_wrong_key_is_refused(key):
    with pytest.raises(UsageError, match=r"^key: "):
        Request(key, (1,))


def test_an_empty_prompt_is_refused():
    with pytest.raises(UsageError, match=r"prompt of request \(0, 0, 0\)"):
        Request((0, 0, 0), ())


def test_end_tokens_join_the_stop_ids_unless_ignored():
    params = SamplingParams(stop_ids=(5,))
    assert params.with_eos((2, 5)).stop_ids == (5, 2)
    assert params.with_eos((2,)).with_eos((2,)) == params.with_eos((2,))
    assert SamplingParams(stop_ids=(5,), ignore_eos=True).with_eos((2,)).stop_ids == (5,)


def test_stop_ids_are_suppressed_before_min_tokens():
    params = SamplingParams(stop_ids=(5, 2), min_tokens=2, max_tokens=4)
    assert [suppressed_ids(params, index) for index in range(4)] == [(5, 2), (5, 2), (), ()]
