"""The samples of a prompt share its rows: the same bits as each sequence alone, right and repeatable gradients."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.support import random_decoder, same_bits
from tests.trainer.support import VOCAB, gradients, record_logprobs
from zerogap.certify.rows import torch_threads as threads
from zerogap.models.decoder import Decoder
from zerogap.models.rows import PackedCache, Rows
from zerogap.trainer.optimiser import Optimiser, OptimiserSettings
from zerogap.trainer.packing import MicroBatch, micro_batch
from zerogap.trainer.sample import SequenceSampler, TrainSequence
from zerogap.trainer.scoring import forward, score
from zerogap.trainer.step import StepSettings, accumulate

THREADS = (1, 2, 3, 5, 8)
# Around the borders of query tiles (8 rows) and key blocks (32 positions).
PROMPTS = (1, 8, 31, 45)


def draw_groups(
    prompts: tuple[int, ...] = PROMPTS, samples: int = 4, longest: int = 40, vocabulary: int = VOCAB, seed: int = 0
) -> list[TrainSequence]:
    """Groups of samples with a common prompt; one of each group trains its first token alone."""
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for prompt, length in enumerate(prompts):
        start = torch.randint(vocabulary, (length,), generator=generator).tolist()
        for sample in range(samples):
            response = int(torch.randint(1, longest, (1,), generator=generator))
            mask = torch.rand(response, generator=generator) < 0.8
            mask[0] = True
            if sample == samples - 1:
                mask[1:] = False
            tokens = [*start, *torch.randint(vocabulary, (response,), generator=generator).tolist()]
            sequences.append(
                TrainSequence(
                    key=(seed, prompt, sample),
                    tokens=tokens,
                    prompt_length=length,
                    logprobs_engine=torch.full((response,), -4.0),
                    loss_mask=mask,
                    advantage=float(torch.randn((), generator=generator)),
                    weights_version=0,
                    sampler=SequenceSampler(temperature=0.8, top_k=0),
                )
            )
    return sequences


def whole(decoder: Decoder, sequence: TrainSequence) -> torch.Tensor:
    """Hidden rows of a sequence by itself, as one chunk."""
    return decoder.hidden(Rows.packed([sequence.tokens[: sequence.input_rows]]), PackedCache())


@pytest.mark.parametrize("count", THREADS)
@pytest.mark.parametrize("budget", [2048, 90, 1])
def test_log_probs_have_the_bits_of_each_sequence_alone(count: int, budget: int) -> None:
    decoder, sequences = random_decoder(), draw_groups()
    with threads(count):
        shared = score(decoder, sequences, budget)
        alone = [score(decoder, [sequence])[0] for sequence in sequences]
    for one, other in zip(shared, alone, strict=True):
        assert same_bits(one.logprob_T, other.logprob_T)
        assert same_bits(one.entropy_T, other.entropy_T)


@torch.no_grad()
def test_every_row_has_the_bits_of_its_sequence_alone_and_a_neighbours_prompt_has_not() -> None:
    """The second half is the control: the same batch with one response behind another prompt of the same length."""
    decoder, sequences = random_decoder(), draw_groups(prompts=(9, 9, 40))
    batch = micro_batch(sequences, tuple(range(len(sequences))))
    assert batch.row_count < sum(s.input_rows for s in sequences)
    expected = [whole(decoder, sequence) for sequence in sequences]

    def same(batch: MicroBatch) -> list[bool]:
        hidden_RK = decoder.hidden(batch.rows(), PackedCache())
        return [same_bits(hidden_RK[p], e) for p, e in zip(batch.places, expected, strict=True)]

    assert all(same(batch))
    chunks = list(batch.chunks)
    number = next(i for i, chunk in enumerate(chunks) if chunk.start == 9)
    other = next(c for c in chunks[1:] if c.start == 0)
    chunks[number] = dataclasses.replace(
        chunks[number], block_table=[*other.block_table, *chunks[number].block_table[9:]]
    )
    assert same(dataclasses.replace(batch, chunks=tuple(chunks))).count(False) == 1


def test_a_model_that_breaks_the_row_law_is_seen_across_shared_prompts() -> None:
    decoder, sequences = random_decoder(), draw_groups()
    honest = decoder.hidden
    decoder.hidden = lambda *arguments: (x := honest(*arguments)) * (1 + 2**-20 * len(x))  # type: ignore[method-assign]
    shared = score(decoder, sequences)
    alone = [score(decoder, [sequence])[0] for sequence in sequences]
    assert not all(same_bits(a.logprob_T, b.logprob_T) for a, b in zip(shared, alone, strict=True))


def test_gradients_are_those_of_the_sequences_unshared_in_float64() -> None:
    decoder = random_decoder(dtype=torch.float64, tie_word_embeddings=True)
    sequences = record_logprobs(decoder, draw_groups(), shift=0.1)
    weight_of = {sequence.key: 1 + number for number, sequence in enumerate(sequences)}

    def loss_of(members: tuple[int, ...]) -> torch.Tensor:
        batch = micro_batch(sequences, members)
        weights = [float(weight_of[sequences[m].key]) for m in members]
        weight_S = torch.tensor(weights, dtype=torch.float64).repeat_interleave(torch.tensor(batch.counts))
        return (forward(decoder, batch).logprob_R * weight_S).sum()

    loss_of(tuple(range(len(sequences)))).backward()
    shared = gradients(decoder)
    decoder.zero_grad()
    for member in range(len(sequences)):
        loss_of((member,)).backward()
    for name, gradient in gradients(decoder).items():
        torch.testing.assert_close(shared[name], gradient, rtol=1e-9, atol=1e-11)


def test_gradients_of_the_backend_in_use_are_near_those_in_float64() -> None:
    """The backward may be any correct one: float32 against float64, each sequence alone there."""
    found = {}
    for dtype in (torch.float32, torch.float64):
        decoder = random_decoder(dtype=dtype, tie_word_embeddings=True)
        sequences = draw_groups()
        members = range(len(sequences))
        for some in [tuple(members)] if dtype == torch.float32 else [(member,) for member in members]:
            forward(decoder, micro_batch(sequences, some)).logprob_R.sum().backward()
        found[dtype] = gradients(decoder)
    for name, exact in found[torch.float64].items():
        error = (found[torch.float32][name].double() - exact).norm() / exact.norm()
        assert error < 1e-5, name


@pytest.mark.parametrize("count", THREADS)
def test_a_step_repeats_bit_for_bit(count: int) -> None:
    # Large enough for the library to share its loops among threads.
    decoder = random_decoder(hidden_size=256, intermediate_size=512, vocab_size=4096)
    sequences = record_logprobs(decoder, draw_groups(samples=8, vocabulary=4096), shift=0.1)
    optimiser = Optimiser(decoder.named_parameters(), OptimiserSettings())
    found = []
    with threads(count):
        for _ in range(3):
            result = accumulate(decoder, optimiser, sequences, StepSettings(micro_batch_rows=400))
            found.append(gradients(decoder))
    assert result.rows < sum(s.input_rows for s in sequences)
    assert all(same_bits(found[0][name], again[name]) for again in found[1:] for name in found[0])


def test_rows_saved_are_counted() -> None:
    decoder = random_decoder()
    sequences = record_logprobs(decoder, draw_groups())
    optimiser = Optimiser(decoder.named_parameters(), OptimiserSettings())
    result = accumulate(decoder, optimiser, sequences, StepSettings(micro_batch_rows=4096))
    assert (result.micro_batches, result.rows) == (1, result.micro_batch_rows_max)
    assert result.rows == sum(s.input_rows for s in sequences) - 3 * sum(PROMPTS)
