"""Counter-based uniform numbers by the kernels: those of ``zerogap.ops.portable``, in one pass over the keys."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from zerogap.ops.native import calls as kernels


def uniform(seed: int, keys: Sequence[tuple[int, int, int, int]]) -> Tensor:
    """Return one number in [0, 1) per key (step, prompt, sample, position), float64 [R]."""
    words = np.array(keys, dtype=np.uint64).reshape(-1, 4).view(np.int64)
    numbers_R = torch.empty(len(words), dtype=torch.float64)
    kernels.uniform(seed, torch.from_numpy(words), numbers_R)
    return numbers_R
