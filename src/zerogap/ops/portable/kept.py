"""Kept sets at rest: one per token of a rollout, each as its ids or as one bit per id, whichever is smaller."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

ID_BYTES = 4


def stored_kept_set(kept_V: Tensor) -> Tensor | None:
    """Return a row's kept set to be held: None for the whole vocabulary, int32 ids, or uint8 with a bit per token.

    Args:
        kept_V: bool [V].
    """
    count = int(kept_V.count_nonzero())
    if count == len(kept_V):
        return None
    if ID_BYTES * count <= bitmask_bytes(len(kept_V)):
        return kept_V.nonzero().squeeze(1).to(torch.int32)
    return torch.from_numpy(np.packbits(kept_V.numpy()))


def kept_mask(stored: Tensor, vocab_size: int) -> Tensor:
    """Return what `stored_kept_set` stored, or ids of any integer type, as bool [V]."""
    if stored.dtype == torch.uint8:
        return torch.from_numpy(np.unpackbits(stored.numpy(), count=vocab_size)).bool()
    return torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, stored.to(torch.int64), True)


def bitmask_bytes(vocab_size: int) -> int:
    """Return the bytes of one bit per token."""
    return -(-vocab_size // 8)
