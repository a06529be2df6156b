"""Ragged packing: sequences laid end to end in micro-batches of a bounded number of rows, without padding.

The samples of one prompt share its rows: a micro-batch computes a prompt once, and each response follows it as a chunk
of its own that attends to the prompt's keys and its own. By the row law every row keeps its bits.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from zerogap import ops
from zerogap.errors import UsageError
from zerogap.models.rows import Rows, SequenceRows
from zerogap.trainer.sample import Key, TrainSequence

KeptRows = tuple[Tensor | None, ...]


def pack(sequences: Sequence[TrainSequence], members: Iterable[int], budget: int) -> list[tuple[int, ...]]:
    """Split sequences into micro-batches, keeping their order.

    Neighbours with the same prompt are a group, whose prompt counts once. A micro-batch takes the next group as long as
    its rows fit. A group above the budget is cut wherever it is full, and its prompt counts in each part; a sequence
    above the budget stands alone. Sequences of 0 rows are in no micro-batch. Ragged rows leave nothing to gain from
    sorting by length.

    Args:
        sequences: all sequences.
        members: indices of those to pack, ascending.
        budget: most rows of a micro-batch; at least 1.

    Returns:
        Indices of the sequences of each micro-batch.
    """
    if budget < 1:
        raise UsageError(f"the micro-batch budget must be at least 1 row, not {budget}")
    batches: list[list[int]] = []
    filled = 0
    present = [index for index in members if sequences[index].input_rows]
    for _, indices in groupby(present, lambda index: sequences[index].prompt_tokens):
        group = list(indices)
        prompt = sequences[group[0]].prompt_tokens
        own = [sequences[index].input_rows - len(prompt) for index in group]
        whole = len(prompt) + sum(own)
        if not batches or (filled + whole > budget >= whole):
            batches.append([])
            filled = 0
        if filled + whole <= budget:
            batches[-1] += group
            filled += whole
            continue
        prompt_rows = len(prompt)  # 0 once the micro-batch at hand has the prompt
        for index, rows in zip(group, own, strict=True):
            if batches[-1] and filled + prompt_rows + rows > budget:
                batches.append([])
                filled, prompt_rows = 0, len(prompt)
            batches[-1].append(index)
            filled += prompt_rows + rows
            prompt_rows = 0
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
        chunks: the rows in their order; a prompt that several members have comes once, before the responses. A page is
            one row, and a row's page is its number.
        places: per member the row of each of its positions, int64.
        scored_S: int64 row whose output predicts each scored token; the last row of a shared prompt comes often.
        targets_S: int64 ids of the scored tokens.
        counts: scored tokens of each member; they sum to S.
        settings: sampler settings of the scored rows.
    """

    members: tuple[int, ...]
    chunks: tuple[SequenceRows, ...]
    places: tuple[Tensor, ...]
    scored_S: Tensor
    targets_S: Tensor
    counts: tuple[int, ...]
    settings: ops.SamplerRows

    def rows(self) -> Rows:
        """Return the rows for the decoder."""
        return Rows.build(self.chunks, page_size=1)

    @property
    def row_count(self) -> int:
        """Number of rows."""
        return sum(len(chunk.tokens) for chunk in self.chunks)


def micro_batch(
    sequences: Sequence[TrainSequence],
    members: tuple[int, ...],
    kept: Sequence[KeptRows] | None = None,
) -> MicroBatch:
    """Lay the member sequences end to end, each prompt once.

    Args:
        sequences: all sequences.
        members: those of this micro-batch, each with at least one trained token.
        kept: kept sets to replay, per sequence and trained token; None lets the sampler settings make them.
    """
    chosen = [sequences[member] for member in members]
    counts = tuple(sequence.trained_count for sequence in chosen)
    chunks, places = lay_out(chosen)
    scored, targets = [], []
    for sequence, places_P in zip(chosen, places, strict=True):
        positions = sequence.trained_places + sequence.prompt_length
        scored.append(places_P[positions - 1])
        targets.append(torch.tensor(sequence.tokens)[positions])
    return MicroBatch(
        members,
        tuple(chunks),
        tuple(places),
        torch.cat(scored),
        torch.cat(targets),
        counts,
        _settings(chosen, counts, None if kept is None else [kept[member] for member in members]),
    )


def lay_out(sequences: Sequence[TrainSequence]) -> tuple[list[SequenceRows], list[Tensor]]:
    """Return the chunks of rows of a micro-batch, and per sequence the row of each of its positions.

    A sequence whose prompt no other has is one chunk.
    """
    sharing = Counter(sequence.prompt_tokens for sequence in sequences)
    chunks: list[SequenceRows] = []
    places: list[Tensor] = []
    prompt_rows: dict[tuple[int, ...], range] = {}
    count = 0

    def add(tokens: Sequence[int], before: range) -> range:
        """Append rows that follow those of ``before`` in their sequence; return their numbers."""
        nonlocal count
        own = range(count, count + len(tokens))
        if tokens:
            chunks.append(SequenceRows(tokens, len(before), [*before, *own]))
        count = own.stop
        return own

    for sequence in sequences:
        prompt, tokens = sequence.prompt_tokens, sequence.tokens[: sequence.input_rows]
        if sharing[prompt] == 1:
            before, own = range(0), add(tokens, range(0))
        else:
            if prompt not in prompt_rows:
                prompt_rows[prompt] = add(prompt, range(0))
            before = prompt_rows[prompt]
            own = add(tokens[len(prompt) :], before)
        places.append(torch.tensor([*before, *own]))
    return chunks, places


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
