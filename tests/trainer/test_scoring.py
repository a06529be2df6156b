import dataclasses

import pytest
import torch

from tests.support import random_decoder, same_bits
from tests.trainer.support import VOCAB, draw_sequences
from zerogap import ops
from zerogap.errors import UsageError
from zerogap.models.rows import PackedCache, Rows
from zerogap.ops import portable
from zerogap.ops.portable.kept import kept_mask
from zerogap.trainer.sample import TrainSequence, suppressed_below
from zerogap.trainer.scoring import score


def alone(decoder, sequence):
    """Log-probs of the trained tokens by the plain way: the whole sequence by itself, row by row."""
    hidden = decoder.hidden(Rows.packed([sequence.tokens]), PackedCache())
    sampler = sequence.sampler
    settings = ops.SamplerRows.uniform_settings(1, sampler.temperature, sampler.top_k, sampler.top_p, sampler.min_p)
    places = sequence.trained_places + sequence.prompt_length
    return torch.cat(
        [
            ops.token_logprobs(
                hidden[place - 1 : place],
                decoder.lm_head_weight,
                torch.tensor(sequence.tokens[place : place + 1]),
                settings,
            ).logprob_R
            for place in places.tolist()
        ]
    )


@pytest.mark.parametrize("sampler", [{}, {"temperature": 0.7, "top_p": 0.9, "top_k": 8, "min_p": 0.05}])
def test_scores_are_those_of_each_sequence_alone_in_any_packing(sampler):
    decoder, sequences = random_decoder(), draw_sequences(9, **sampler)
    with torch.no_grad():
        expected = [alone(decoder, sequence) for sequence in sequences]
    for rows in (1, 20, 33, 2048):
        for order in (1, -1):
            scores = score(decoder, sequences[::order], rows)[::order]
            assert all(same_bits(s.logprob_T, e) for s, e in zip(scores, expected, strict=True))


def test_a_model_that_breaks_the_row_law_is_seen_by_its_scores():
    """Negative control of the test above: the last rows are made to depend on how many run together."""
    decoder, sequences = random_decoder(), draw_sequences(9)
    honest = decoder.hidden
    decoder.hidden = lambda *arguments: (x := honest(*arguments)) * (1 + 2**-20 * len(x))
    first, second = ([s.logprob_T for s in score(decoder, sequences, rows)] for rows in (20, 2048))
    assert not all(same_bits(a, b) for a, b in zip(first, second, strict=True))


def test_kept_sets_replay_to_the_same_bits_and_go_on_holding():
    decoder, sequences = random_decoder(), draw_sequences(6, temperature=0.8, top_k=5)
    scores = score(decoder, sequences, want_kept=True)
    for sequence, scored in zip(sequences, scores, strict=True):
        assert scored.kept is not None
        assert len(scored.kept) == sequence.trained_count
        targets = torch.tensor(sequence.tokens)[sequence.trained_places + sequence.prompt_length].tolist()
        for stored, target, value in zip(scored.kept, targets, scored.logprob_T, strict=True):
            assert stored is not None
            mask = kept_mask(stored, VOCAB)
            assert mask.count_nonzero() == 5
            assert mask[target] == torch.isfinite(value)


def test_suppressed_stop_ids_are_out_of_the_distribution():
    decoder = random_decoder()
    tokens = [1, 2, 3, 4]
    base = TrainSequence(
        (0, 0, 0), tokens, 1, torch.zeros(3), torch.ones(3, dtype=torch.bool), advantage=1.0, weights_version=0
    )
    held = dataclasses.replace(
        base, sampler=dataclasses.replace(base.sampler, suppressed=suppressed_below(2, [7, 9], length=3))
    )
    table = portable.log_distribution(
        decoder.logits(decoder.hidden(Rows.packed([tokens]), PackedCache())).detach(),
        ops.SamplerRows.uniform_settings(4),
    ).logprob_RV.double()
    free, suppressed = (score(decoder, [s])[0].logprob_T for s in (base, held))
    left = 1 - table[:, [7, 9]].exp().sum(1)
    for place in range(3):
        expected = table[place, tokens[place + 1]] - (left[place].log() if place < 2 else 0)
        assert float(suppressed[place]) == pytest.approx(float(expected), abs=1e-6)
    assert same_bits(free[2], suppressed[2])


def test_sequences_without_trained_tokens_have_empty_scores():
    sequences = draw_sequences(3)
    sequences[1].loss_mask[:] = False
    scores = score(random_decoder(), sequences, want_kept=True)
    assert [len(s.logprob_T) for s in scores] == [s.trained_count for s in sequences]
    assert scores[1].kept == ()


def test_scoring_leaves_no_gradient():
    decoder = random_decoder()
    assert not any(s.logprob_T.requires_grad for s in score(decoder, draw_sequences(2)))
    assert all(p.grad is None for p in decoder.parameters())


def test_what_the_model_cannot_take_is_refused_by_key():
    decoder = random_decoder(max_position_embeddings=16)
    sequence = draw_sequences(1)[0]
    foreign = dataclasses.replace(sequence, tokens=[VOCAB, *sequence.tokens[1:]])
    with pytest.raises(UsageError, match=r"\(step 0, prompt 0, sample 0\) has token ids .* the model has 0 to 49"):
        score(decoder, [foreign])
    long = TrainSequence(
        (4, 5, 6), [1] * 18, 1, torch.zeros(17), torch.ones(17, dtype=torch.bool), advantage=1.0, weights_version=0
    )
    with pytest.raises(UsageError, match=r"\(step 4, prompt 5, sample 6\) has 17 rows; the model's context is 16"):
        score(decoder, [long])
