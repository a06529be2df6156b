"""Ragged packing: whole sequences laid end to end in micro-batches of a bounded number of rows, without padding."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerogap import ops
from zerogap.errors import UsageError
from zerogap.trainer.sample import Key, TrainSequence

KeptRows = tuple[Tensor | None, ...]


def pack(row_counts: Sequence[int], budget: int) -> list[tuple[int, ...]]:
    """Split sequences into micro-batches, keeping their order.

    A micro-batch takes the next sequence as long as the rows fit; a sequence above the budget stands alone. Sequences
    of 0 rows are in no micro-batch. Ragged rows leave nothing to gain from sorting by length.

    Args:
        row_counts: rows of each sequence.
        budget: most rows of a micro-batch; at least 1.

    Returns:
        Indices of the sequences of each micro-batch.
    """
    if budget < 1:
        raise UsageError(f"the micro-batch budget must be at least 1 row, not {budget}")
    batches: list[list[int]] = []
    filled = 0
    for index, rows in enumerate(row_counts):
        if rows == 0:
            continue
        if not batches or filled + rows > budget:
            batches.append([])
            filled = 0
        batches[-1].append(index)
        filled += rows
    return [tuple(batch) for batch in batches]


def mini_batches(keys: Sequence[Key], updates: int, seed: int, step: int) -> list[list[int]]:
    """Deal a rollout's sequences to its optimiser updates.

    The deal is a pure function of (seed, step, keys): sequences are ranked by a hash, which no library version can
    change, and their order of arrival does not matter to which update they fall in.

    Args:
        keys: the sequences' keys, all different.
        updates: number of parts, which differ in size by at most one.
        seed: the run's seed.
        step: the rollout's step.

    Returns:
        Indices into ``keys`` of each part, ascending.

    Raises:
        UsageError: more updates than sequences.
    """
    if not 1 <= updates <= len(keys):
        raise UsageError(
            f"step {step}: {updates} updates per rollout need at least as many sequences, the rollout has {len(keys)}; "
            "lower train.updates_per_rollout"
        )
    ranked = sorted(range(len(keys)), key=lambda i: hashlib.sha256(repr((seed, step, *keys[i])).encode()).digest())
    return [sorted(ranked[update::updates]) for update in range(updates)]


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward and the S tokens to score in it.

    Attributes:
        members: indices of its sequences in the list it was made from.
        tokens: token ids of each member's rows.
        scored_S: int64 row whose output predicts each scored token.
        targets_S: int64 ids of the scored tokens.
        counts: scored tokens of each member; they sum to S.
        settings: sampler settings of the scored rows.
    """

    members: tuple[int, ...]
    tokens: tuple[list[int], ...]
    scored_S: Tensor
    targets_S: Tensor
    counts: tuple[int, ...]
    settings: ops.SamplerRows


def micro_batch(
    sequences: Sequence[TrainSequence], members: tuple[int, ...], kept: Sequence[KeptRows] | None = None
) -> MicroBatch:
    """Lay the member sequences end to end.

    Args:
        sequences: all sequences.
        members: those of this micro-batch, each with at least one trained token.
        kept: kept sets to replay, per sequence and trained token; None lets the sampler settings make them.
    """
    chosen = [sequences[member] for member in members]
    tokens = tuple(sequence.tokens[: sequence.input_rows] for sequence in chosen)
    counts = tuple(sequence.trained_count for sequence in chosen)
    scored, targets, first_row = [], [], 0
    for sequence, rows in zip(chosen, tokens, strict=True):
        places = sequence.trained_places + sequence.prompt_length
        scored.append(places - 1 + first_row)
        targets.append(torch.tensor(sequence.tokens)[places])
        first_row += len(rows)
    return MicroBatch(
        members,
        tokens,
        torch.cat(scored),
        torch.cat(targets),
        counts,
        _settings(chosen, counts, None if kept is None else [kept[member] for member in members]),
    )


def _settings(
    chosen: Sequence[TrainSequence], counts: Sequence[int], kept: Sequence[KeptRows] | None
) -> ops.SamplerRows:
    def rows(name: str, dtype: torch.dtype) -> Tensor:
        values = torch.tensor([getattr(sequence.sampler, name) for sequence in chosen], dtype=dtype)
        return values.repeat_interleave(torch.tensor(counts))

    suppressed, first = [], 0
    for sequence, count in zip(chosen, counts, strict=True):
        rank = {int(place): first + i for i, place in enumerate(sequence.trained_places)}
        suppressed += [(rank[place], ids) for place, ids in sequence.sampler.suppressed if place in rank]
        first += count
    replayed = None
    if kept is not None:
        assert tuple(map(len, kept)) == tuple(counts), "one kept set per trained token"
        replayed = tuple(stored for sets in kept for stored in sets)
    return ops.SamplerRows(
        rows("temperature", torch.float64),
        rows("top_k", torch.int64),
        rows("top_p", torch.float64),
        rows("min_p", torch.float64),
        tuple(suppressed),
        replayed,
    )
