"""Which rows of which sequences the next forward computes.

A deque of waiting sequences and one of running sequences, oldest first. Running sequences come first, each with all
the rows it still lacks (one when it decodes) as far as the step's rows reach; then waiting ones are admitted while
rows, pages and places are left. When pages run out the newest running sequence gives its pages back and is computed
again later from its prompt and the tokens it has. A sequence whose next prompt page another one is computing right
now waits for that page: n samples of a prompt compute it once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from zerogap.engine.pages import PagePool, page_key, root_key
from zerogap.engine.sequence import Sequence


@dataclass(slots=True)
class Chunk:
    """Consecutive rows of one sequence in one forward.

    Attributes:
        sequence: whose rows.
        start: absolute position of the first row.
        count: rows.
        new_pages: pages that the sequence's block table gained for this step, prefix hits first.
        hits: how many of them hold already computed rows.
        admitted: whether the block table begins with this step.
    """

    sequence: Sequence
    start: int
    count: int
    new_pages: tuple[int, ...] = ()
    hits: int = 0
    admitted: bool = False

    @property
    def samples(self) -> bool:
        """Whether the chunk ends with the sequence's last token, so that the next one can be drawn."""
        return self.start + self.count == len(self.sequence.tokens)

    @property
    def decodes(self) -> bool:
        """Whether the chunk is the one row of a token just drawn."""
        return self.count == 1 and self.start >= self.sequence.prompt_len and not self.admitted


class Scheduler:
    """Forms steps from waiting and running sequences.

    Args:
        pool: the pages.
        max_rows: rows per step at most.
        max_sequences: running sequences at most.
    """

    def __init__(self, pool: PagePool, max_rows: int, max_sequences: int) -> None:
        self.pool = pool
        self.max_rows = max_rows
        self.max_sequences = max_sequences
        self.waiting: deque[Sequence] = deque()
        self.running: deque[Sequence] = deque()
        self.preemptions = 0
        self._root = root_key(0)
        self._computing: dict[bytes, Sequence] = {}  # key of a page not yet computed -> who computes it

    def start_version(self, version: int) -> None:
        """Make the pages of other weights unusable; no sequence may be waiting or running."""
        assert not self.waiting
        assert not self.running
        self.pool.drop_published()
        self._root = root_key(version)

    def schedule(self) -> list[Chunk]:
        """Choose the next step's chunks and give them their pages; empty only when there is no sequence."""
        chunks: list[Chunk] = []
        rows_left, preempted = self._continue_running(chunks)
        if not preempted:
            self._admit_waiting(chunks, rows_left)
        assert chunks or not (self.running or self.waiting), "sequences are left, but none can be scheduled"
        return chunks

    def computed(self, chunks: list[Chunk]) -> None:
        """Note that the chunks' keys and values are in their pages, and publish the pages that became full."""
        size = self.pool.page_size
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.computed = end = chunk.start + chunk.count
            if chunk.start // size == end // size:
                continue
            for index in range(chunk.start // size, end // size):
                key = self._key(sequence, index)
                self.pool.publish(sequence.block_table[index], key)
                if self._computing.get(key) is sequence:
                    del self._computing[key]

    def remove(self, sequence: Sequence) -> None:
        """Take a finished or aborted sequence out and release its pages."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self._release(sequence)

    def _continue_running(self, chunks: list[Chunk]) -> tuple[int, bool]:
        rows_left, preempted = self.max_rows, False
        index = 0
        while index < len(self.running) and rows_left:
            sequence = self.running[index]
            count = min(len(sequence.tokens) - sequence.computed, rows_left)
            lacking = self.pool.pages_for(sequence.computed + count) - len(sequence.block_table)
            # Victims are newer than every sequence already scheduled in this step, or the sequence itself.
            while lacking > self.pool.available:
                self._preempt()
                preempted = True
                if index == len(self.running):
                    return rows_left, True
            new_pages = tuple(self.pool.take() for _ in range(lacking)) if lacking > 0 else ()
            sequence.block_table.extend(new_pages)
            chunks.append(Chunk(sequence, sequence.computed, count, new_pages))
            rows_left -= count
            index += 1
        return rows_left, preempted

    def _admit_waiting(self, chunks: list[Chunk], rows_left: int) -> None:
        passed_over: list[Sequence] = []
        while self.waiting and rows_left and len(self.running) < self.max_sequences:
            sequence = self.waiting.popleft()
            hits = self._prefix_hits(sequence)
            if len(hits) < self._most_hits(sequence) and self._key(sequence, len(hits)) in self._computing:
                passed_over.append(sequence)
                continue
            # Room for all it has so far, not only for its first chunk: else it is admitted to be preempted.
            idle_hits = sum(not self.pool.holders[page] for page in hits)
            if self.pool.pages_for(len(sequence.tokens)) - len(hits) > self.pool.available - idle_hits:
                self.waiting.appendleft(sequence)
                break
            chunk = self._admit(sequence, hits, rows_left)
            rows_left -= chunk.count
            chunks.append(chunk)
        self.waiting.extendleft(reversed(passed_over))

    def _admit(self, sequence: Sequence, hits: list[int], rows_left: int) -> Chunk:
        pool = self.pool
        for page in hits:
            pool.share(page)
        sequence.computed = len(hits) * pool.page_size
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed
        count = min(len(sequence.tokens) - sequence.computed, rows_left)
        lacking = pool.pages_for(sequence.computed + count) - len(hits)
        new_pages = (*hits, *(pool.take() for _ in range(lacking)))
        sequence.block_table = list(new_pages)
        self.running.append(sequence)
        if pool.prefix_cache:
            for index in range(len(hits), len(sequence.tokens) // pool.page_size):
                self._computing.setdefault(self._key(sequence, index), sequence)
        return Chunk(sequence, sequence.computed, count, new_pages, len(hits), admitted=True)

    def _most_hits(self, sequence: Sequence) -> int:
        """Return how many pages may come from the prefix cache: the last token's row is always computed."""
        return (len(sequence.tokens) - 1) // self.pool.page_size if self.pool.prefix_cache else 0

    def _prefix_hits(self, sequence: Sequence) -> list[int]:
        hits: list[int] = []
        for index in range(self._most_hits(sequence)):
            page = self.pool.find(self._key(sequence, index))
            if page is None:
                break
            hits.append(page)
        return hits

    def _preempt(self) -> None:
        """Send the newest running sequence back to the front of the waiting ones."""
        sequence = self.running.pop()
        self._release(sequence)
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        for index in range(sequence.computed // self.pool.page_size, len(sequence.page_keys)):
            if self._computing.get(sequence.page_keys[index]) is sequence:
                del self._computing[sequence.page_keys[index]]
        self.pool.release(reversed(sequence.block_table))
        sequence.block_table = []
        sequence.computed = 0

    def _key(self, sequence: Sequence, index: int) -> bytes:
        """Return the chained key of the sequence's full page ``index``."""
        keys, size = sequence.page_keys, self.pool.page_size
        while len(keys) <= index:
            parent = keys[-1] if keys else self._root
            keys.append(page_key(parent, sequence.tokens[len(keys) * size : (len(keys) + 1) * size]))
        return keys[index]
