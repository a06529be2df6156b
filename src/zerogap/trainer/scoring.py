"""Log-probs of sampled tokens under the trainer's weights: the trainer's half of every comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerogap import ops
from zerogap.errors import UsageError
from zerogap.models.decoder import Decoder
from zerogap.models.rows import PackedCache
from zerogap.trainer.packing import KeptRows, MicroBatch, micro_batch, pack
from zerogap.trainer.sample import TrainSequence


@dataclass(frozen=True)
class Scored:
    """What a forward says about the T trained tokens of one sequence, in their order.

    Attributes:
        logprob_T: float32 (the decoder's dtype), in nats, under the sampler settings of the sequence.
        entropy_T: entropy in nats of the distribution that each token was drawn from.
        kept: each token's kept set (``zerogap.ops.portable.kept``), or None if not asked for.
        kept_mass_T: probability of each token's kept set before it was cut out, at the sequence's temperature; 1 where
            nothing was cut. None if the backend does not say.
    """

    logprob_T: Tensor
    entropy_T: Tensor
    kept: KeptRows | None = None
    kept_mass_T: Tensor | None = None


def check_sequences(decoder: Decoder, sequences: Sequence[TrainSequence]) -> None:
    """Refuse what the decoder cannot take, before any work is done.

    Raises:
        UsageError: a token id outside the vocabulary or a sequence beyond the model's context, by key.
    """
    vocab, context = decoder.config.vocab_size, decoder.config.max_positions
    for sequence in sequences:
        where = "sequence (step {}, prompt {}, sample {})".format(*sequence.key)
        if not 0 <= min(sequence.tokens) <= max(sequence.tokens) < vocab:
            raise UsageError(
                f"{where} has token ids {min(sequence.tokens)} to {max(sequence.tokens)}; "
                f"the model has 0 to {vocab - 1}"
            )
        if sequence.input_rows > context:
            raise UsageError(f"{where} has {sequence.input_rows} rows; the model's context is {context}")


def forward(decoder: Decoder, batch: MicroBatch, want_kept: bool = False) -> ops.TokenLogprobs:
    """Run one micro-batch and score its S tokens; differentiable in the weights.

    Args:
        decoder: the model being trained.
        batch: rows and tokens.
        want_kept: also return the kept set of every token.
    """
    hidden_RK = decoder.hidden(batch.rows(), PackedCache())
    hidden_SK = hidden_RK.index_select(0, batch.scored_S.to(decoder.device))
    targets_S = batch.targets_S.to(decoder.device)
    result = ops.token_logprobs(hidden_SK, decoder.lm_head_weight, targets_S, batch.settings, want_kept=want_kept)
    # The loss stands on one number per token: it is the CPU's, wherever the model is.
    mass_R = None if result.kept_mass_R is None else result.kept_mass_R.cpu()
    return ops.TokenLogprobs(result.logprob_R.cpu(), result.entropy_R.cpu(), result.kept, mass_R)


def split_scores(batch: MicroBatch, result: ops.TokenLogprobs) -> list[Scored]:
    """Cut the scores of a micro-batch into one `Scored` per member."""
    logprobs = result.logprob_R.detach().split(batch.counts)
    entropies = result.entropy_R.detach().split(batch.counts)
    mass_S = result.kept_mass_R
    masses = [None] * len(batch.counts) if mass_S is None else mass_S.detach().split(batch.counts)
    scored, first = [], 0
    for logprob_T, entropy_T, mass_T, count in zip(logprobs, entropies, masses, batch.counts, strict=True):
        kept = None if result.kept is None else result.kept[first : first + count]
        scored.append(Scored(logprob_T.clone(), entropy_T.clone(), kept, None if mass_T is None else mass_T.clone()))
        first += count
    return scored


@torch.no_grad()
def score(
    decoder: Decoder,
    sequences: Sequence[TrainSequence],
    micro_batch_rows: int = 2048,
    want_kept: bool = False,
) -> list[Scored]:
    """Score every sequence without gradient.

    At the version that sampled, this is the comparison with the engine, the old log-probs and (``want_kept``) the kept
    sets for all updates of a rollout.

    Args:
        decoder: the trainer's model.
        sequences: any sequences; those without trained tokens get empty scores.
        micro_batch_rows: most rows of one forward.
        want_kept: keep the kept sets, to be replayed after the weights have moved on.

    Returns:
        One `Scored` per sequence.
    """
    check_sequences(decoder, sequences)
    empty = torch.empty(0)
    scores = [Scored(empty, empty, () if want_kept else None, empty)] * len(sequences)
    for members in pack(sequences, range(len(sequences)), micro_batch_rows):
        batch = micro_batch(sequences, members)
        for member, scored in zip(members, split_scores(batch, forward(decoder, batch, want_kept)), strict=True):
            scores[member] = scored
    return scores
