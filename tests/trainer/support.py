"""Sequences that a small random decoder could have sampled."""

from __future__ import annotations

import torch

from zerogap.models.decoder import Decoder
from zerogap.trainer.sample import SequenceSampler, TrainSequence
from zerogap.trainer.scoring import score

VOCAB = 50


def draw_sequences(count: int, seed: int = 0, **sampler: float) -> list[TrainSequence]:
    """Random sequences of random lengths; some tokens are masked, one sequence in four has advantage 0."""
    generator = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    sequences = []
    for index in range(count):
        prompt, response = integer(1, 6), integer(1, 12)
        mask = torch.rand(response, generator=generator) < 0.8
        mask[integer(0, response)] = True
        sequences.append(
            TrainSequence(
                key=(seed, index // 4, index % 4),
                tokens=torch.randint(0, VOCAB, (prompt + response,), generator=generator).tolist(),
                prompt_length=prompt,
                logprobs_engine=torch.full((response,), -4.0),
                loss_mask=mask,
                advantage=0.0 if index % 4 == 3 else float(torch.randn((), generator=generator)),
                weights_version=0,
                sampler=SequenceSampler(**sampler),  # type: ignore[arg-type]
            )
        )
    return sequences


def record_logprobs(decoder: Decoder, sequences: list[TrainSequence], shift: float = 0.0) -> list[TrainSequence]:
    """Write the decoder's log-probs down as the engine's, moved by up to ``shift`` so that ratios differ from 1."""
    generator = torch.Generator().manual_seed(len(sequences))
    for sequence, scored in zip(sequences, score(decoder, sequences), strict=True):
        noise = shift * (2 * torch.rand(len(scored.logprob_T), generator=generator) - 1)
        sequence.logprobs_engine[sequence.loss_mask] = scored.logprob_T.float() + noise
    return sequences


def gradients(decoder: Decoder) -> dict[str, torch.Tensor]:
    """Copies of all gradients."""
    return {name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None}
