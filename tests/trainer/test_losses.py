import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zerogap.errors import UsageError
from zerogap.trainer.losses import LossSettings, policy_metrics, sequence_weights, token_losses

AGGREGATIONS = ["token-mean", "sequence-mean", "sequence-mean-token-sum-norm"]


def plain_token_loss(new, old, advantage, low, high):
    """Equation 7 of PPO with separate bounds, written down again in Python floats."""
    ratio = math.exp(new - old)
    return -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def plain_batch_loss(batch, aggregation, low, high, norm_length):
    per_sequence = [[plain_token_loss(n, o, a, low, high) for n, o in tokens] for tokens, a in batch]
    filled = [losses for losses in per_sequence if losses]
    if aggregation == "token-mean":
        return sum(map(sum, filled)) / sum(map(len, filled))
    if aggregation == "sequence-mean":
        return sum(sum(losses) / len(losses) for losses in filled) / len(filled)
    return sum(sum(losses) / norm_length for losses in filled) / len(filled)


logprobs = st.floats(-8, 0)
sequences = st.tuples(st.lists(st.tuples(logprobs, logprobs), max_size=6), st.floats(-3, 3))


@given(
    st.lists(sequences, min_size=1, max_size=6).filter(lambda batch: any(tokens for tokens, _ in batch)),
    st.sampled_from(AGGREGATIONS),
    st.floats(0.01, 1),
    st.floats(0.01, 5),
    st.integers(1, 100),
)
def test_batch_loss_against_the_formulas(batch, aggregation, low, high, norm_length):
    settings = LossSettings(low, high, aggregation, norm_length)
    weights = sequence_weights([len(tokens) for tokens, _ in batch], settings)
    ours = 0.0
    for (tokens, advantage), weight in zip(batch, weights, strict=True):
        pairs = torch.tensor(tokens, dtype=torch.float64).reshape(-1, 2)
        losses = token_losses(
            pairs[:, 0], pairs[:, 1], torch.full((len(pairs),), advantage, dtype=torch.float64), settings
        )
        ours += weight * float(losses.sum())
    expected = plain_batch_loss(batch, aggregation, low, high, norm_length)
    assert ours == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_sequence_weights_by_hand():
    counts = [3, 0, 1]
    assert sequence_weights(counts, LossSettings(aggregation="token-mean")) == [1 / 4, 0, 1 / 4]
    assert sequence_weights(counts, LossSettings(aggregation="sequence-mean")) == [1 / 6, 0, 1 / 2]
    norm = LossSettings(aggregation="sequence-mean-token-sum-norm", norm_length=10)
    assert sequence_weights(counts, norm) == [1 / 20, 0, 1 / 20]
    assert sequence_weights([0, 0], LossSettings()) == [0, 0]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),  # on policy: the plain policy gradient
        (1.25, 2.0, -2.5, -2.5),  # inside the high bound
        (1.5, 2.0, -2.6, 0.0),  # above it: held, no gradient
        (0.5, 2.0, -1.0, -1.0),  # a good token that became unlikely is pulled back up
        (0.5, -2.0, 1.8, 0.0),  # a bad token that became unlikely enough: held
        (1.5, -2.0, 3.0, 3.0),  # a bad token that became likely: pushed down without bound
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_clipping_by_hand(ratio, advantage, loss, slope):
    settings = LossSettings(clip_low=0.1, clip_high=0.3)
    new = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    value = token_losses(new, torch.zeros(1).double(), torch.tensor([advantage], dtype=torch.float64), settings)
    value.sum().backward()
    assert value.item() == pytest.approx(loss, rel=1e-14, abs=0)
    assert new.grad.item() == pytest.approx(slope, rel=1e-14, abs=0)


def test_on_policy_ratio_is_exactly_one():
    logprob = torch.tensor([-0.1234567, -17.5], requires_grad=True)
    losses = token_losses(logprob, logprob.detach(), torch.tensor([0.3, -0.7]), LossSettings())
    losses.sum().backward()
    assert losses.tolist() == (-torch.tensor([0.3, -0.7])).tolist()
    assert logprob.grad.tolist() == losses.tolist()


def test_a_clipped_token_stays_without_gradient_when_its_ratio_overflows():
    new = torch.tensor([0.0, -2.0], requires_grad=True)
    losses = token_losses(new, torch.tensor([-200.0, -2.0]), torch.tensor([1.0, 1.0]), LossSettings())
    losses.sum().backward()
    assert torch.equal(losses.detach(), torch.tensor([-1.2, -1.0]))
    assert torch.equal(new.grad, torch.tensor([0.0, -1.0]))


def test_no_gradient_reaches_the_old_logprobs():
    old = torch.zeros(2, requires_grad=True)
    losses = token_losses(torch.zeros(2, requires_grad=True), old, torch.ones(2), LossSettings())
    losses.sum().backward()
    assert old.grad is None


def test_metrics_by_hand():
    ratio = np.array([1.0, 2.0, 0.5, 2.0])
    advantage = np.array([1.0, 1.0, -1.0, -1.0])
    metrics = policy_metrics(np.log(ratio), np.zeros(4), advantage, LossSettings(clip_low=0.2, clip_high=0.28))
    assert metrics["clip_share_low"] == 0.25
    assert metrics["clip_share_high"] == 0.25
    assert metrics["ratio_mean"] == pytest.approx(1.375)
    assert metrics["ratio_max"] == pytest.approx(2.0)
    assert metrics["kl_k1"] == pytest.approx(-math.log(2) / 4)
    assert metrics["kl_k3"] == pytest.approx((1.5 - math.log(2)) / 4)
    assert policy_metrics(np.zeros(0), np.zeros(0), np.zeros(0), LossSettings()) == {}


def test_metrics_on_policy_are_exact():
    same = np.array([-0.3, -2.5], dtype=np.float32)
    metrics = policy_metrics(same, same, np.array([1.0, -1.0]), LossSettings())
    assert metrics == {
        "clip_share_low": 0.0,
        "clip_share_high": 0.0,
        "ratio_mean": 1.0,
        "ratio_max": 1.0,
        "kl_k1": 0.0,
        "kl_k3": 0.0,
    }


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"clip_low": 0.0}, "clip_low"),
        ({"clip_low": 1.5}, "clip_low"),
        ({"clip_high": math.nan}, "clip_high"),
        ({"aggregation": "token_mean"}, "did you mean 'token-mean'"),
        ({"aggregation": "sequence-mean-token-sum-norm"}, "norm_length"),
    ],
)
def test_settings_out_of_range_are_refused(settings, said):
    with pytest.raises(UsageError, match=said):
        LossSettings(**settings)
