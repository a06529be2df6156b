"""One optimiser update in two calls, so that the gate stands between them.

`accumulate` runs forward and backward and returns the trainer's log-probs; nothing has moved yet. If they equal what
the engine recorded, `Optimiser.apply` moves the weights.

With one update per rollout, the engine's log-probs are the old log-probs and the training forward is the comparison:

    result = accumulate(decoder, optimiser, sequences, settings)
    ...compare result.scores with the sequences...
    optimiser.apply()

With more, the rollout is scored first, which is the comparison; kept sets are replayed, since they belong to the
weights that sampled. The forward of the first update still has those weights, so it is compared too:

    scores = score(decoder, sequences, settings.micro_batch_rows, want_kept=True)
    ...compare...
    for part in mini_batches([s.key for s in sequences], updates, seed, step):
        accumulate(decoder, optimiser, [sequences[i] for i in part], settings, old=[scores[i] for i in part])
        ...compare, the first time...
        optimiser.apply()
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from zerogap.models.decoder import Decoder
from zerogap.ops.adding import adding_gradients
from zerogap.trainer.losses import LossSettings, policy_metrics, sequence_weights, token_losses
from zerogap.trainer.optimiser import Optimiser
from zerogap.trainer.packing import MicroBatch, micro_batch, pack
from zerogap.trainer.sample import TrainSequence, one_version
from zerogap.trainer.scoring import Scored, check_sequences, forward, score, split_scores


@dataclass(frozen=True)
class StepSettings:
    """How an update is computed.

    Attributes:
        loss: clipping and aggregation.
        micro_batch_rows: most rows of one forward and backward; with ``Decoder.gradient_checkpointing`` it bounds the
            memory of activations.
        score_untrained: also run sequences whose advantage is 0 through a forward without gradient, so that their
            tokens can be compared (``gap.scope = "all"``), unless scores of them are given. The update's bits do not
            depend on it.
    """

    loss: LossSettings = field(default_factory=LossSettings)
    micro_batch_rows: int = 2048
    score_untrained: bool = False


@dataclass(frozen=True)
class StepResult:
    """An update that has been computed and not applied; the gradients lie in the parameters.

    Attributes:
        loss: the batch's loss.
        scores: per sequence what the forward said, or None for a sequence that was not run.
        metrics: of the trained tokens: see `policy_metrics`, and their mean ``entropy``.
        trained_sequences: sequences with a gradient.
        trained_tokens: their trained tokens.
        micro_batches: forward and backward runs.
        micro_batch_rows_max: rows of the largest of them.
        rows: rows of all of them; a prompt that several sequences of a micro-batch have counts once.
    """

    loss: float
    scores: list[Scored | None]
    metrics: dict[str, float]
    trained_sequences: int
    trained_tokens: int
    micro_batches: int
    micro_batch_rows_max: int
    rows: int


def with_gradient(sequences: Sequence[TrainSequence]) -> list[int]:
    """Return the indices of the sequences that `accumulate` runs with gradient, in the order it packs them."""
    return [i for i, sequence in enumerate(sequences) if sequence.advantage != 0 and sequence.trained_count > 0]


def without_gradient(sequences: Sequence[TrainSequence]) -> list[int]:
    """Return the indices of the other sequences, which ``score_untrained`` runs, in the order it packs them."""
    return sorted(set(range(len(sequences))) - set(with_gradient(sequences)))


def accumulate(
    decoder: Decoder,
    optimiser: Optimiser,
    sequences: Sequence[TrainSequence],
    settings: StepSettings,
    old: Sequence[Scored] | None = None,
) -> StepResult:
    """Compute the gradients of one optimiser batch, micro-batch by micro-batch, in a fixed order.

    A sequence with advantage 0 has no gradient: it counts in the loss's normalisers and is not run (unless
    ``score_untrained``).

    Args:
        decoder: the model being trained.
        optimiser: its optimiser; earlier gradients are dropped.
        sequences: the whole optimiser batch, sampled by one weights version.
        settings: loss and memory.
        old: scores of the same sequences at the version that sampled them, with kept sets; None if the weights are
            still that version, so that the engine's own log-probs are the old ones.

    Raises:
        UsageError: sequences of different versions, or that the model cannot take.
    """
    one_version(sequences)
    check_sequences(decoder, sequences)
    optimiser.clear_gradients()
    weights = sequence_weights([sequence.trained_count for sequence in sequences], settings.loss)
    trained = with_gradient(sequences)
    kept = None if old is None else [_kept(scored) for scored in old]
    scores: list[Scored | None] = [None] * len(sequences)
    tokens: list[_Tokens] = []
    losses: list[float] = []
    rows: list[int] = []
    for members in pack(sequences, trained, settings.micro_batch_rows):
        batch = micro_batch(sequences, members, kept)
        rows.append(batch.row_count)
        result = forward(decoder, batch)
        old_S = torch.cat(
            [sequences[m].trained_logprobs_engine if old is None else old[m].logprob_T for m in members]
        ).to(result.logprob_R)
        advantage_S = _per_token([sequences[m].advantage for m in members], batch, result.logprob_R)
        weight_S = _per_token([weights[m] for m in members], batch, result.logprob_R)
        loss_S = token_losses(result.logprob_R, old_S, advantage_S, settings.loss) * weight_S
        with adding_gradients():
            loss_S.sum().backward()
        losses += loss_S.detach().tolist()
        tokens.append(_Tokens(result.logprob_R.detach(), old_S, advantage_S, result.entropy_R.detach()))
        for member, scored in zip(members, split_scores(batch, result), strict=True):
            scores[member] = scored
    if settings.score_untrained and old is None:  # `old` are scores of all sequences already
        rest = without_gradient(sequences)
        scored_rest = score(decoder, [sequences[i] for i in rest], settings.micro_batch_rows)
        for index, scored in zip(rest, scored_rest, strict=True):
            scores[index] = scored
    return StepResult(
        loss=math.fsum(losses) if math.isfinite(sum(losses)) else math.nan,
        scores=scores,
        metrics=_metrics(tokens, settings.loss),
        trained_sequences=len(trained),
        trained_tokens=sum(sequences[index].trained_count for index in trained),
        micro_batches=len(rows),
        micro_batch_rows_max=max(rows, default=0),
        rows=sum(rows),
    )


@dataclass(frozen=True)
class _Tokens:
    logprob_S: Tensor
    old_S: Tensor
    advantage_S: Tensor
    entropy_S: Tensor


def _kept(scored: Scored) -> tuple[Tensor | None, ...]:
    assert scored.kept is not None, "old scores must carry their kept sets (want_kept=True)"
    return scored.kept


def _per_token(values: list[float], batch: MicroBatch, like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype).repeat_interleave(torch.tensor(batch.counts))


def _metrics(tokens: list[_Tokens], settings: LossSettings) -> dict[str, float]:
    if not tokens:
        return {}

    def column(name: str) -> np.ndarray:
        return torch.cat([getattr(part, name) for part in tokens]).numpy()

    metrics = policy_metrics(column("logprob_S"), column("old_S"), column("advantage_S"), settings)
    return metrics | {"entropy": float(np.mean(column("entropy_S").astype(np.float64)))}
