"""Which rows of a batch meet which keys, laid out for the attention kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from zerogap.ops.plan import Chunk


@dataclass(frozen=True)
class AttentionPlan:
    """Built once per batch and shared by all layers. R rows, S sequences, P pages of the longest.

    Attributes:
        start_S: absolute position of each sequence's first row.
        count_S: its rows in the batch.
        table_SP: page of positions [i * page_size, (i + 1) * page_size); 0 where there is none.
        length_S: keys that exist.
        positions_R: absolute position of each row.
        page_size: positions of a page.
        longest: most keys of a sequence.
        shared: some page belongs to several sequences (a cached prefix), so gradients of keys have no single owner.
    """

    start_S: np.ndarray
    count_S: np.ndarray
    table_SP: Tensor
    length_S: Tensor
    positions_R: Tensor
    page_size: int
    longest: int
    shared: bool
    _tiles: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)
    _key_tiles: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)
    _moved: dict[torch.device, AttentionPlan] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def build(chunks: Sequence[Chunk], page_size: int) -> AttentionPlan:
        """Plan a batch whose rows are the chunks' rows in this order; the tensors are the CPU's."""
        start = np.array([chunk.start for chunk in chunks], dtype=np.int64)
        count = np.array([chunk.count for chunk in chunks], dtype=np.int64)
        length = start + count
        pages = -(-length // page_size)
        table = np.zeros((len(chunks), int(pages.max())), dtype=np.int32)
        for row, chunk, used in zip(table, chunks, pages, strict=True):
            row[:used] = chunk.block_table[:used]
        used_pages = table[np.arange(table.shape[1]) < pages[:, None]]
        first_row = np.cumsum(count) - count
        positions = np.arange(int(count.sum())) - np.repeat(first_row - start, count)
        return AttentionPlan(
            start,
            count,
            torch.from_numpy(table),
            torch.from_numpy(length.astype(np.int32)),
            torch.from_numpy(positions.astype(np.int32)),
            page_size,
            int(length.max()),
            len(np.unique(used_pages)) < len(used_pages),
        )

    def on(self, device: torch.device) -> AttentionPlan:
        """Return this plan with its tensors on ``device``; moved once."""
        if self.table_SP.device == device:
            return self
        if device not in self._moved:
            self._moved[device] = AttentionPlan(
                self.start_S,
                self.count_S,
                self.table_SP.to(device, non_blocking=True),
                self.length_S.to(device, non_blocking=True),
                self.positions_R.to(device, non_blocking=True),
                self.page_size,
                self.longest,
                self.shared,
            )
        return self._moved[device]

    def tiles(self, query_rows: int) -> Tensor:
        """Cut each sequence's rows at absolute positions that are multiples of ``query_rows``.

        So the rows of a tile lie in one key block (of which ``query_rows`` is a divisor): each has a visible key in
        every block that the tile walks.

        Returns:
            int32 [T, 4]: first row of the batch, its position, rows, sequence; the longest walks come first.
        """
        if query_rows not in self._tiles:
            start, stop = self.start_S, self.start_S + self.count_S
            first_row = np.cumsum(self.count_S) - self.count_S
            first, last = start // query_rows, -(-stop // query_rows)
            tiles = np.where(self.count_S > 0, last - first, 0)
            sequence = np.repeat(np.arange(len(start)), tiles)
            number = first[sequence] + np.arange(len(sequence)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
            low = np.maximum(number * query_rows, start[sequence])
            high = np.minimum((number + 1) * query_rows, stop[sequence])
            table = np.stack((first_row[sequence] + low - start[sequence], low, high - low, sequence), axis=1)
            table = table[np.argsort(-low, kind="stable")].astype(np.int32)
            self._tiles[query_rows] = torch.from_numpy(table).to(self.table_SP.device, non_blocking=True)
        return self._tiles[query_rows]

    def key_tiles(self, key_block: int) -> Tensor:
        """List the key blocks that some row sees.

        Returns:
            int32 [U, 5]: sequence, first key, and of the sequence: first row of the batch, its position, end.
        """
        if key_block not in self._key_tiles:
            stop = self.start_S + self.count_S
            first_row = np.cumsum(self.count_S) - self.count_S
            blocks = np.where(self.count_S > 0, -(-stop // key_block), 0)
            sequence = np.repeat(np.arange(len(stop)), blocks)
            first_key = (np.arange(len(sequence)) - np.repeat(np.cumsum(blocks) - blocks, blocks)) * key_block
            columns = (sequence, first_key, first_row[sequence], self.start_S[sequence], stop[sequence])
            table = np.stack(columns, axis=1).astype(np.int32)
            self._key_tiles[key_block] = torch.from_numpy(table).to(self.table_SP.device, non_blocking=True)
        return self._key_tiles[key_block]
