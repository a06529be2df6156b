"""Which rows of a batch meet which keys: said once, laid out by each backend as it likes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Chunk:
    """The rows of one sequence in a batch: ``count`` rows from absolute position ``start``.

    ``block_table[i]`` is the page that holds positions [i * page_size, (i + 1) * page_size).
    """

    start: int
    count: int
    block_table: Sequence[int]


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """A batch's rows, chunk after chunk, and the pages of their keys; built once and shared by all layers."""

    chunks: tuple[Chunk, ...]
    page_size: int

    @staticmethod
    def build(chunks: Sequence[Chunk], page_size: int) -> AttentionPlan:
        """Plan a batch whose rows are the chunks' rows in this order."""
        return AttentionPlan(tuple(chunks), page_size)

    @cached_property
    def start_S(self) -> np.ndarray:
        """First position of each chunk, int64."""
        return np.array([chunk.start for chunk in self.chunks], dtype=np.int64)

    @cached_property
    def count_S(self) -> np.ndarray:
        """Rows of each chunk, int64."""
        return np.array([chunk.count for chunk in self.chunks], dtype=np.int64)

    @cached_property
    def _decodes(self) -> bool:
        """Whether every chunk is one row, so that plain Python is faster than arrays."""
        return all(chunk.count == 1 for chunk in self.chunks)

    @cached_property
    def tables(self) -> tuple[np.ndarray, np.ndarray]:
        """All block tables one after the other, int32, and where each chunk's begins, int64 [S + 1]."""
        used = [-(-(chunk.start + chunk.count) // self.page_size) for chunk in self.chunks]
        flat = [page for chunk, pages in zip(self.chunks, used, strict=True) for page in chunk.block_table[:pages]]
        return np.array(flat, dtype=np.int32), np.array([0, *accumulate(used)], dtype=np.int64)

    @cached_property
    def positions_R(self) -> Tensor:
        """Absolute position of each row, int64."""
        return torch.from_numpy(self._owned[1])

    @cached_property
    def slots_R(self) -> Tensor:
        """Slot of each row's own key and value (page * page_size + offset), int64."""
        size = self.page_size
        if self._decodes:
            slots = [each.block_table[each.start // size] * size + each.start % size for each in self.chunks]
            return torch.tensor(slots, dtype=torch.int64)
        owner, positions = self._owned
        flat, offsets = self.tables
        pages = flat[offsets[owner] + positions // self.page_size].astype(np.int64)
        return torch.from_numpy(pages * self.page_size + positions % self.page_size)

    @cached_property
    def _owned(self) -> tuple[np.ndarray, np.ndarray]:
        """Chunk and absolute position of each row."""
        if self._decodes:
            return np.arange(len(self.chunks)), self.start_S.copy()
        owner = np.repeat(np.arange(len(self.chunks)), self.count_S)
        first = np.cumsum(self.count_S) - self.count_S
        return owner, np.arange(len(owner)) - first[owner] + self.start_S[owner]


@dataclass(frozen=True, eq=False)
class DecodeTensors:
    """A plan of one row per sequence that lies on the device in tensors of fixed shape, to be filled anew every step.

    A backend's ``decode_plan`` makes of it what its attention takes, without reading a value on the host.

    Attributes:
        position_R: absolute position of each row, int32.
        length_R: keys that the row's sequence has, its own included, int32.
        table_RW: page of each W of the row's pages, int32; past the sequence's end anything that is a page.
        tile_R4: each row as a tile (row, position, 1, row), int32, in any order: the longest first is fastest.
        page_size: positions of a page.
    """

    position_R: Tensor
    length_R: Tensor
    table_RW: Tensor
    tile_R4: Tensor
    page_size: int
