"""A batch of rows: which tokens of which sequences, where their keys go, and what they attend to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerogap import ops
from zerogap.models.config import ModelConfig


@dataclass(frozen=True)
class SequenceRows:
    """Consecutive tokens of one sequence, from absolute position ``start``.

    ``block_table[i]`` is the page of positions [i * page_size, (i + 1) * page_size); it covers all tokens so far.
    """

    tokens: Sequence[int]
    start: int
    block_table: Sequence[int]


@dataclass(frozen=True)
class Rows:
    """R rows of several sequences, one after the other.

    Attributes:
        tokens_R: token ids.
        positions_R: absolute positions within the sequences.
        slots_R: where each row's key and value are stored.
        plan: which rows meet which keys.
    """

    tokens_R: Tensor
    positions_R: Tensor
    slots_R: Tensor
    plan: ops.AttentionPlan

    @staticmethod
    def build(sequences: Sequence[SequenceRows], page_size: int) -> Rows:
        """Lay out the chunks of ``sequences`` in this order over pages of ``page_size`` slots."""
        tokens = torch.tensor([token for rows in sequences for token in rows.tokens], dtype=torch.int64)
        plan = ops.AttentionPlan.build(
            [ops.Chunk(rows.start, len(rows.tokens), rows.block_table) for rows in sequences], page_size
        )
        return Rows(tokens, plan.positions_R, plan.slots_R, plan)

    @staticmethod
    def packed(sequences: Sequence[Sequence[int]]) -> Rows:
        """Lay out whole sequences for training: no padding, one slot per row in the order of the rows."""
        start, laid = 0, []
        for tokens in sequences:
            laid.append(SequenceRows(tokens, 0, range(start, start + len(tokens))))
            start += len(tokens)
        return Rows.build(laid, page_size=1)


class PagedCache:
    """Keys and values of all layers in pages of the engine's memory."""

    def __init__(self, config: ModelConfig, num_pages: int, page_size: int, dtype: torch.dtype = torch.float32):
        shape = (config.num_layers, config.num_kv_heads, num_pages * page_size, config.head_dim)
        self.page_size = page_size
        self.num_pages = num_pages
        self._keys = torch.zeros(shape, dtype=dtype)
        self._values = torch.zeros(shape, dtype=dtype)

    @staticmethod
    def page_bytes(config: ModelConfig, page_size: int, dtype: torch.dtype = torch.float32) -> int:
        """Return the memory of one page over all layers, in bytes."""
        return 2 * config.num_layers * config.num_kv_heads * page_size * config.head_dim * dtype.itemsize

    def update(self, layer: int, k_RGD: Tensor, v_RGD: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Store the rows' keys and values; return all of the layer's, [slots, G, D]."""
        keys, values = self._keys[layer], self._values[layer]
        keys.index_copy_(1, rows.slots_R, k_RGD.transpose(0, 1))
        values.index_copy_(1, rows.slots_R, v_RGD.transpose(0, 1))
        return keys.transpose(0, 1), values.transpose(0, 1)

    def clear_pages(self, pages: Sequence[int]) -> None:
        """Zero freed pages, so that nothing of one sequence is left for the next."""
        if not pages:
            return
        shape = (*self._keys.shape[:2], self.num_pages, -1)
        index = torch.tensor(list(pages))
        self._keys.view(shape).index_fill_(2, index, 0.0)
        self._values.view(shape).index_fill_(2, index, 0.0)


class PackedCache:
    """Training keeps no cache: the rows' own keys and values are all there is, and gradients flow through them."""

    def update(self, layer: int, k_RGD: Tensor, v_RGD: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return the rows' keys and values as they came."""
        return k_RGD, v_RGD
