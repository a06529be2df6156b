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
        pages_SP: ``table_SP`` for reading on the CPU.
    """

    start_S: np.ndarray
    count_S: np.ndarray
    table_SP: Tensor
    length_S: Tensor
    positions_R: Tensor
    page_size: int
    longest: int
    pages_SP: np.ndarray
    _tiles: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)
    _key_tiles: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False, compare=False)
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
            table,
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
                self.pages_SP,
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

    def key_tiles(self, key_block: int) -> tuple[Tensor, Tensor]:
        """Cut the keys that some row sees into tiles, each with the sequences whose rows see it.

        A page that several sequences have (a shared prompt) is one tile's, which walks them in their order, so that
        its gradient has one owner. Tiles lie within key blocks; those of most sequences come first.

        Returns:
            int32 [U, 6]: a sequence that has the tile's pages, first key of its block, first key, end, place of the
                first of its members, their number; and int32 [M, 3], the members: first row of the batch, its
                position, end.

        Raises:
            ValueError: a page stands at two positions.
        """
        if key_block not in self._key_tiles:
            owner, low, high, members = self._runs()
            count = np.array([len(some) for some in members], dtype=np.int64)
            first_member = np.cumsum(count) - count
            first_block = low // key_block
            blocks = -(-high // key_block) - first_block
            run = np.repeat(np.arange(len(owner)), blocks)
            number = np.arange(len(run)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
            key0 = (first_block[run] + number) * key_block
            columns = (
                owner[run], key0, np.maximum(key0, low[run]), np.minimum(key0 + key_block, high[run]),
                first_member[run], count[run],
            )  # fmt: skip
            table = np.stack(columns, axis=1)[np.argsort(-count[run], kind="stable")]
            sequence = np.concatenate([*members, np.zeros(0, dtype=np.int64)])
            first_row = np.cumsum(self.count_S) - self.count_S
            rows = (first_row, self.start_S, self.start_S + self.count_S)
            listed = np.stack([column[sequence] for column in rows], axis=1)
            device = self.table_SP.device
            tiles_U6, members_M3 = (
                torch.from_numpy(x.astype(np.int32)).to(device, non_blocking=True) for x in (table, listed)
            )
            self._key_tiles[key_block] = tiles_U6, members_M3
        return self._key_tiles[key_block]

    def _runs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray]]:
        """Return runs of keys that the same sequences have: the first of these, first key, end, all of these."""
        stop = np.where(self.count_S > 0, self.start_S + self.count_S, 0)
        pages = -(-stop // self.page_size)
        sequence, index = np.nonzero(np.arange(self.pages_SP.shape[1]) < pages[:, None])
        _, first, page = np.unique(self.pages_SP[sequence, index], return_index=True, return_inverse=True)
        if len(first) == len(page):  # nothing is shared
            owner = np.nonzero(stop)[0]
            return owner, np.zeros_like(owner), stop[owner], [owner[i : i + 1] for i in range(len(owner))]
        if not np.array_equal(index, index[first][page]):
            raise ValueError("attention: a page stands at two positions; its keys' gradients have no one place")
        has_PS = np.zeros((len(first), len(stop)), dtype=bool)
        has_PS[page, sequence] = True
        owned = np.sort(first)  # of each page the entry of the first sequence that has it, by sequence and place
        owner, place, has_PS = sequence[owned], index[owned], has_PS[page[owned]]
        begins = np.ones(len(owned), dtype=bool)
        begins[1:] = (owner[1:] != owner[:-1]) | (place[1:] != place[:-1] + 1) | (has_PS[1:] != has_PS[:-1]).any(1)
        begin = np.nonzero(begins)[0]
        last = np.append(begin[1:], len(owned)) - 1
        members = [np.nonzero(has_PS[at])[0] for at in begin]
        end = np.array([stop[some].max() for some in members], dtype=np.int64)
        low, high = place[begin] * self.page_size, (place[last] + 1) * self.page_size
        return owner[begin], low, np.minimum(high, end), members
