"""A batch of rows: which tokens of which sequences, where their keys go, and what they attend to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zerogap import ops
from zerogap.models.config import ModelConfig
from zerogap.ops import backend

_CPU = torch.device("cpu")


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
    _moved: dict[torch.device, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def build(sequences: Sequence[SequenceRows], page_size: int) -> Rows:
        """Lay out the chunks of ``sequences`` in this order over pages of ``page_size`` slots."""
        tokens = torch.tensor([token for rows in sequences for token in rows.tokens], dtype=torch.int64)
        plan = ops.AttentionPlan.build(
            [ops.Chunk(rows.start, len(rows.tokens), rows.block_table) for rows in sequences], page_size
        )
        return Rows(tokens, plan.positions_R, plan.slots_R, plan)

    def slots_on(self, device: torch.device) -> Tensor:
        """Return ``slots_R`` on a device; it is brought there once for all layers."""
        moved = self._moved.get(device)
        if moved is None:
            moved = self._moved[device] = self.slots_R.to(device, non_blocking=True)
        return moved

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

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device = _CPU,
    ):
        self.page_size = page_size
        self.num_pages = num_pages
        kind = backend.on(device, dtype).KVMemory
        sizes = (config.num_layers, num_pages, page_size, config.num_kv_heads, config.head_dim, dtype)
        self.memory = kind(*sizes) if device.type == "cpu" else kind(*sizes, device)

    @staticmethod
    def page_bytes(
        config: ModelConfig, page_size: int, dtype: torch.dtype = torch.float32, device: torch.device = _CPU
    ) -> int:
        """Return the memory of one page over all layers, in bytes."""
        kind = backend.on(device, dtype).KVMemory
        return kind.page_bytes(config.num_layers, page_size, config.num_kv_heads, config.head_dim, dtype)

    def update(self, layer: int, k_RGD: Tensor, v_RGD: Tensor, rows: Rows) -> tuple[Any, Any]:
        """Store the rows' keys and values; return what ``ops.attention`` takes as all of the layer's."""
        return self.memory.store(layer, rows.slots_on(k_RGD.device), k_RGD, v_RGD)

    def clear_pages(self, pages: Sequence[int]) -> None:
        """Zero freed pages, so that nothing of one sequence is left for the next."""
        if pages:
            self.memory.clear(pages)


class PackedCache:
    """Training keeps no cache: the rows' own keys and values are all there is, and gradients flow through them."""

    def update(self, layer: int, k_RGD: Tensor, v_RGD: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return the rows' keys and values as they came."""
        return k_RGD, v_RGD
