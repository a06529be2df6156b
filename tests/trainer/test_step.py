import dataclasses
import math

import pytest
import torch

from tests.support import random_decoder, same_bits
from tests.trainer.support import draw_sequences, gradients, record_logprobs
from zerogap.certify.rows import torch_threads
from zerogap.errors import UsageError, ZerogapError
from zerogap.models.rows import PackedCache, Rows
from zerogap.trainer.losses import LossSettings
from zerogap.trainer.optimiser import Optimiser, OptimiserSettings
from zerogap.trainer.packing import mini_batches
from zerogap.trainer.scoring import score
from zerogap.trainer.step import StepSettings, accumulate

AGGREGATIONS = ["token-mean", "sequence-mean", "sequence-mean-token-sum-norm"]


def optimiser_of(decoder, **changes):
    return Optimiser(decoder.named_parameters(), OptimiserSettings(**{"learning_rate": 1e-2, **changes}))


def weights(decoder):
    return {name: p.detach().clone() for name, p in decoder.named_parameters()}


def equal(first, second):
    return first.keys() == second.keys() and all(same_bits(first[name], second[name]) for name in first)


def plain_loss(decoder, sequences, settings):
    """The batch's loss written from its formula with torch's own log_softmax, sequence by sequence."""
    trained = [s for s in sequences if s.trained_count]
    total = torch.zeros((), dtype=torch.float64)
    for sequence in trained:
        logits = decoder.logits(decoder.hidden(Rows.packed([sequence.tokens]), PackedCache()))
        table = torch.log_softmax(logits / sequence.sampler.temperature, dim=-1)
        tokens = sequence.tokens
        losses = []
        for place in sequence.trained_places.tolist():
            position = sequence.prompt_length + place
            ratio = torch.exp(table[position - 1, tokens[position]] - sequence.logprobs_engine[place].double())
            clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
            losses.append(-torch.minimum(ratio * sequence.advantage, clipped * sequence.advantage))
        match settings.aggregation:
            case "token-mean":
                weight = 1 / sum(s.trained_count for s in trained)
            case "sequence-mean":
                weight = 1 / (len(trained) * len(losses))
            case _:
                weight = 1 / (len(trained) * settings.norm_length)
        total = total + weight * torch.stack(losses).sum()
    return total


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_loss_and_gradients_against_a_plain_float64_one_whatever_the_micro_batches(aggregation):
    decoder = random_decoder(dtype=torch.float64, tie_word_embeddings=True)
    sequences = record_logprobs(decoder, draw_sequences(8, temperature=0.8), shift=0.5)
    sequences[2].loss_mask[:] = False
    settings = LossSettings(0.1, 0.3, aggregation, norm_length=12)
    expected = plain_loss(decoder, sequences, settings)
    expected.backward()
    wanted = gradients(decoder)
    optimiser, micro_batches = optimiser_of(decoder), set()
    for rows in (1, 17, 40, 2048):
        result = accumulate(decoder, optimiser, sequences, StepSettings(settings, rows))
        micro_batches.add(result.micro_batches)
        assert result.loss == pytest.approx(float(expected.detach()), rel=1e-12, abs=1e-12)
        for name, gradient in gradients(decoder).items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-9, atol=1e-12)
    assert len(micro_batches) > 2
    assert result.metrics["clip_share_low"] > 0
    assert result.metrics["clip_share_high"] > 0


def test_on_policy_step_compares_every_trained_token_and_moves_nothing_yet():
    decoder = random_decoder()
    sequences = record_logprobs(decoder, draw_sequences(8))
    before = weights(decoder)
    optimiser = optimiser_of(decoder)
    result = accumulate(decoder, optimiser, sequences, StepSettings(micro_batch_rows=30))
    assert equal(before, weights(decoder))
    trained = [s.advantage != 0 for s in sequences]
    assert [scored is not None for scored in result.scores] == trained
    for sequence, scored in zip(sequences, result.scores, strict=True):
        assert scored is None or same_bits(scored.logprob_T, sequence.trained_logprobs_engine)
    assert result.trained_sequences == sum(trained) == 6
    assert result.trained_tokens == sum(s.trained_count for s, t in zip(sequences, trained, strict=True) if t)
    assert result.micro_batch_rows_max <= 30
    assert result.metrics["ratio_mean"] == result.metrics["ratio_max"] == 1
    assert result.metrics["kl_k3"] == result.metrics["clip_share_low"] == result.metrics["clip_share_high"] == 0
    assert 0 < result.metrics["entropy"] < math.log(50)
    stats = optimiser.apply()
    assert stats.grad_norm > 0
    assert not equal(before, weights(decoder))


def test_comparing_untrained_sequences_does_not_change_the_update():
    runs = []
    for score_untrained in (False, True):
        decoder = random_decoder()
        sequences = record_logprobs(decoder, draw_sequences(8))
        optimiser = optimiser_of(decoder)
        result = accumulate(decoder, optimiser, sequences, StepSettings(score_untrained=score_untrained))
        optimiser.apply()
        runs.append(weights(decoder))
    assert all(
        scored is not None and same_bits(scored.logprob_T, sequence.trained_logprobs_engine)
        for sequence, scored in zip(sequences, result.scores, strict=True)
    )
    assert equal(*runs)


def test_sequences_without_advantage_count_in_the_normalisers():
    decoder = random_decoder()
    sequences = record_logprobs(decoder, draw_sequences(4))
    optimiser = optimiser_of(decoder)
    whole = accumulate(decoder, optimiser, sequences, StepSettings()).loss
    without = accumulate(decoder, optimiser, sequences[:3], StepSettings()).loss
    tokens = [s.trained_count for s in sequences]
    assert whole == pytest.approx(without * sum(tokens[:3]) / sum(tokens), rel=1e-6)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_same_steps_twice_give_the_same_weights(count, checkpointing):
    # Large enough for the library to share its loops among threads.
    shapes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 4096, "tie_word_embeddings": True}
    runs = []
    with torch_threads(count):
        for _ in range(2):
            decoder = random_decoder(**shapes)
            decoder.gradient_checkpointing = checkpointing
            optimiser = optimiser_of(decoder, weight_decay=0.1)
            for update in range(2):
                sequences = record_logprobs(decoder, draw_sequences(8, seed=update), shift=0.1)
                accumulate(decoder, optimiser, sequences, StepSettings(micro_batch_rows=60))
                optimiser.apply()
            runs.append(weights(decoder))
    assert equal(*runs)


def test_gradient_checkpointing_keeps_the_bits_of_every_gradient():
    decoder = random_decoder()
    sequences, optimiser = record_logprobs(decoder, draw_sequences(8), shift=0.2), optimiser_of(decoder)
    found = []
    for decoder.gradient_checkpointing in (False, True):
        accumulate(decoder, optimiser, sequences, StepSettings(micro_batch_rows=40))
        found.append(gradients(decoder))
    assert equal(*found)


def rollout_updates(sequences, decoder, updates, replay=True):
    """Several updates of one rollout, the way the loop does it."""
    optimiser = optimiser_of(decoder)
    scores = score(decoder, sequences, want_kept=True)
    results = []
    for part in mini_batches([s.key for s in sequences], updates, seed=1, step=0):
        old = [scores[i] for i in part]
        if not replay:
            old = [dataclasses.replace(s, kept=(None,) * len(s.logprob_T)) for s in old]
        results.append(accumulate(decoder, optimiser, [sequences[i] for i in part], StepSettings(), old))
        optimiser.apply()
    return results


def test_kept_sets_of_the_rollout_are_replayed_under_later_weights():
    decoder = random_decoder()
    sequences = record_logprobs(decoder, draw_sequences(16, temperature=0.9, top_k=20))
    for sequence in sequences:  # a sampled token lies in its kept set; drawn ones need not
        sequence.loss_mask &= sequence.logprobs_engine.isfinite()
    results = rollout_updates(sequences, decoder, 4)
    first, later = results[0], results[1:]
    assert first.metrics["ratio_max"] == 1.0
    assert first.metrics["kl_k3"] == 0.0
    assert all(math.isfinite(r.loss) and r.metrics["kl_k3"] > 0 for r in later)
    # Negative control: without the kept sets the same tokens are scored under another distribution.
    control = rollout_updates(sequences, random_decoder(), 4, replay=False)
    assert control[0].metrics["ratio_max"] < 1.0


def test_a_batch_in_which_nothing_is_trained_has_no_update():
    decoder = random_decoder()
    sequences = [dataclasses.replace(s, advantage=0.0) for s in draw_sequences(3)]
    before, optimiser = weights(decoder), optimiser_of(decoder, weight_decay=0.5)
    result = accumulate(decoder, optimiser, sequences, StepSettings())
    assert (result.loss, result.metrics, result.trained_tokens, result.micro_batches) == (0.0, {}, 0, 0)
    optimiser.apply()
    assert equal(before, weights(decoder))
    assert optimiser.updates == 1


def test_gradients_of_a_refused_step_are_dropped_by_the_next():
    decoder = random_decoder()
    sequences, optimiser = record_logprobs(decoder, draw_sequences(8)), optimiser_of(decoder)
    accumulate(decoder, optimiser, sequences, StepSettings())
    once = gradients(decoder)
    accumulate(decoder, optimiser, sequences, StepSettings())
    assert equal(once, gradients(decoder))


def test_a_logprob_that_is_not_finite_stops_before_the_weights_move():
    decoder = random_decoder()
    sequences, optimiser = record_logprobs(decoder, draw_sequences(4)), optimiser_of(decoder)
    place = int(sequences[0].trained_places[0])
    sequences[0].logprobs_engine[place] = math.nan
    before = weights(decoder)
    result = accumulate(decoder, optimiser, sequences, StepSettings())
    assert math.isnan(result.loss)
    with pytest.raises(ZerogapError, match="update 0: the gradient of"):
        optimiser.apply()
    assert equal(before, weights(decoder))


def test_sequences_of_two_versions_are_refused():
    decoder = random_decoder()
    sequences = draw_sequences(2)
    sequences[1] = dataclasses.replace(sequences[1], weights_version=1)
    with pytest.raises(UsageError, match="one weights version"):
        accumulate(decoder, optimiser_of(decoder), sequences, StepSettings())
