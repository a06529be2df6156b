"""The schedule of every forward under the current weights, and its exact repetition.

A fault that depends on the batch vanishes when its sequence runs alone; repeated in the recorded composition it shows
again, and hooks on the decoder's ops then tell which op's row differs first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from zerogap.engine.params import Key
from zerogap.engine.scheduler import Chunk
from zerogap.engine.sequence import Sequence
from zerogap.models.decoder import Decoder, Hook
from zerogap.models.rows import PagedCache, Rows, SequenceRows
from zerogap.ops import ambient


class Span(NamedTuple):
    """Consecutive rows of one sequence in one forward.

    Attributes:
        number: the sequence's place in ``ScheduleTrace.keys``.
        start: absolute position of the first row.
        rows: how many.
        new_pages: pages that the block table gained before the forward, prefix hits first.
        hits: how many of them held rows computed before.
        admitted: whether the block table began with this step (first admission, or again after preemption).
    """

    number: int
    start: int
    rows: int
    new_pages: tuple[int, ...]
    hits: int
    admitted: bool


class StepTrace(NamedTuple):
    """One forward: its spans in row order, and the pages cleared before it."""

    spans: tuple[Span, ...]
    cleared: tuple[int, ...]


@dataclass
class ScheduleTrace:
    """Every forward of one weights version.

    Attributes:
        version: of the weights.
        keys: key of each sequence, in order of arrival.
        tokens: its token ids, the engine's own growing list.
        steps: the forwards in order.
    """

    version: int
    keys: list[Key] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    steps: list[StepTrace] = field(default_factory=list)

    def register(self, key: Key, tokens: list[int]) -> int:
        """Add a sequence and return its number."""
        self.keys.append(key)
        self.tokens.append(tokens)
        return len(self.keys) - 1

    def record(self, chunks: list[Chunk], cleared: tuple[int, ...]) -> None:
        """Add a forward."""
        self.steps.append(
            StepTrace(
                tuple(
                    Span(chunk.sequence.number, chunk.start, chunk.count, chunk.new_pages, chunk.hits, chunk.admitted)
                    for chunk in chunks
                ),
                cleared,
            )
        )


@dataclass(frozen=True)
class ReplayedStep:
    """A repeated forward.

    Attributes:
        index: place in ``ScheduleTrace.steps``.
        rows: (key, absolute positions) of consecutive rows, in row order.
        hidden_RK: the decoder's output.
    """

    index: int
    rows: tuple[tuple[Key, range], ...]
    hidden_RK: torch.Tensor

    def rows_of(self, key: Key) -> tuple[slice, range] | None:
        """Return which rows are those of a sequence, and their positions; None if it had no part in the step."""
        first = 0
        for name, positions in self.rows:
            if name == key:
                return slice(first, first + len(positions)), positions
            first += len(positions)
        return None


def sequence_rows(sequence: Sequence, start: int, count: int) -> SequenceRows:
    """Return the decoder's view of some rows of a sequence."""
    return SequenceRows(sequence.tokens[start : start + count], start, sequence.block_table)


def replay(
    trace: ScheduleTrace,
    decoder: Decoder,
    cache_factory: Callable[[], PagedCache],
    hooks: tuple[Hook, ...] = (),
) -> Iterator[ReplayedStep]:
    """Repeat the recorded forwards exactly: the same rows in the same order, chunks and pages, without sampling.

    Args:
        trace: of the engine; it must not grow meanwhile.
        decoder: with the weights of ``trace.version``.
        cache_factory: makes an empty cache of the engine's page count and page size (``Engine.new_cache``).
        hooks: passed to the decoder; they are called before the step is yielded, for its rows in order.

    Yields:
        each forward after it ran; stop iterating to stop replaying.
    """
    cache = cache_factory()
    block_tables: list[list[int]] = [[] for _ in trace.keys]
    for index, step in enumerate(trace.steps):
        parts = []
        for span in step.spans:
            if span.admitted:
                block_tables[span.number] = []
            block_tables[span.number].extend(span.new_pages)
            tokens = trace.tokens[span.number][span.start : span.start + span.rows]
            parts.append(SequenceRows(tokens, span.start, block_tables[span.number]))
        with ambient.guard(), torch.inference_mode():
            if step.cleared:
                cache.clear_pages(list(step.cleared))
            hidden_RK = decoder.hidden(Rows.build(parts, cache.page_size), cache, hooks)
        names = tuple((trace.keys[span.number], range(span.start, span.start + span.rows)) for span in step.spans)
        yield ReplayedStep(index, names, hidden_RK)
