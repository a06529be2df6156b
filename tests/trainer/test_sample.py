import dataclasses

import pytest
import torch

from zerogap.errors import UsageError
from zerogap.trainer.sample import SequenceSampler, TrainSequence, one_version, suppressed_below


def sequence(**changes):
    values = {
        "key": (3, 1, 2),
        "tokens": [5, 6, 7, 8, 9],
        "prompt_length": 2,
        "logprobs_engine": torch.tensor([-1.0, -2.0, -3.0]),
        "loss_mask": torch.tensor([True, False, True]),
        "advantage": 0.5,
        "weights_version": 3,
    }
    return TrainSequence(**(values | changes))


def test_what_is_trained():
    made = sequence()
    assert made.response_length == 3
    assert made.trained_count == 2
    assert made.trained_places.tolist() == [0, 2]
    assert made.trained_logprobs_engine.tolist() == [-1.0, -3.0]
    assert made.input_rows == 4  # the last token is only a target


def test_sampled_tokens_that_are_not_trained_on_can_be_scored():
    made = sequence(loss_mask=torch.tensor([True, False, False]), sampled_mask=torch.tensor([True, False, True]))
    assert made.untrained().trained_places.tolist() == [2]
    assert made.input_rows == 2, "they do not change what the training forward runs"
    assert sequence().untrained().trained_count == 0, "without a mask of its own, nothing else was sampled"


def test_rows_after_the_last_trained_token_are_not_needed():
    assert sequence(loss_mask=torch.tensor([True, False, False])).input_rows == 2
    assert sequence(loss_mask=torch.zeros(3, dtype=torch.bool)).input_rows == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"logprobs_engine": torch.zeros(2)}, "3 tokens, 2 engine log-probs and 3 loss-mask entries"),
        ({"loss_mask": torch.ones(4, dtype=torch.bool)}, "3 tokens, 3 engine log-probs and 4 loss-mask entries"),
        ({"tokens": [1, 2, 3]}, "1 tokens, 3 engine log-probs and 3 loss-mask entries"),
        ({"prompt_length": 0}, "prompt_length is 0"),
        ({"prompt_length": 6}, "prompt_length is 6 of 5"),
        ({"logprobs_engine": torch.zeros(3, dtype=torch.float64)}, "float32"),
        ({"loss_mask": torch.ones(3)}, "bool"),
        ({"sampled_mask": torch.tensor([True, False, False])}, "sampled mask"),
        ({"sampled_mask": torch.ones(4, dtype=torch.bool)}, "sampled mask"),
        ({"advantage": float("nan")}, "advantage is nan"),
        ({"sampler": SequenceSampler(temperature=0.0)}, "temperature must be above 0"),
        ({"sampler": SequenceSampler(top_p=0.0)}, "cannot be trained on"),
        ({"sampler": SequenceSampler(suppressed=((3, (1,)),))}, "suppressed places"),
    ],
)
def test_what_does_not_fit_is_refused_by_key(changes, said):
    with pytest.raises(UsageError, match=said) as caught:
        sequence(**changes)
    assert str(caught.value).startswith("sequence (step 3, prompt 1, sample 2): ")
    assert "\n" not in str(caught.value)


def test_engine_logprobs_that_are_not_finite_are_left_to_the_gate():
    sequence(logprobs_engine=torch.tensor([float("nan"), -1.0, float("-inf")]))


def test_suppressed_stop_ids_below_min_tokens():
    assert suppressed_below(2, [9, 4, 9], length=5) == ((0, (4, 9)), (1, (4, 9)))
    assert suppressed_below(7, [4], length=2, start=3) == ((3, (4,)), (4, (4,)))
    assert suppressed_below(0, [4], length=2) == ()
    assert suppressed_below(2, [], length=2) == ()


def test_a_batch_has_one_weights_version():
    assert one_version([sequence(), sequence()]) == 3
    with pytest.raises(UsageError, match=r"\[3, 4\]"):
        one_version([sequence(), dataclasses.replace(sequence(), weights_version=4)])
