"""Keys and values of all layers in pages of one tensor each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class KVMemory:
    """Keys and values of all layers in pages.

    Args:
        layers: decoder layers.
        pages: pages in all.
        page_size: positions per page.
        kv_heads: key/value heads.
        head_dim: elements of a head.
        dtype: of keys and values.
        device: where they lie.
    """

    def __init__(
        self,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ):
        self._pages = pages
        self._keys = torch.zeros(layers, kv_heads, pages * page_size, head_dim, dtype=dtype, device=device)
        self._values = torch.zeros_like(self._keys)

    @staticmethod
    def page_bytes(layers: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Return the memory of one page over all layers, in bytes."""
        return 2 * layers * kv_heads * page_size * head_dim * dtype.itemsize

    def store(self, layer: int, slots_R: Tensor, k_RGD: Tensor, v_RGD: Tensor) -> tuple[Tensor, Tensor]:
        """Store the rows' keys and values; return all of the layer's, [slots, G, D]."""
        keys, values = self._keys[layer], self._values[layer]
        keys.index_copy_(1, slots_R, k_RGD.transpose(0, 1))
        values.index_copy_(1, slots_R, v_RGD.transpose(0, 1))
        return keys.transpose(0, 1), values.transpose(0, 1)

    def clear(self, pages: Sequence[int]) -> None:
        """Zero pages in all layers."""
        shape = (*self._keys.shape[:2], self._pages, -1)
        index = torch.tensor(list(pages)).to(self._keys.device, non_blocking=True)
        self._keys.view(shape).index_fill_(2, index, 0.0)
        self._values.view(shape).index_fill_(2, index, 0.0)
