"""What the engine sampled for the comparison with a trainer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Sampled:
    """One sequence as the engine sampled it, at temperature 1 and without truncation.

    Attributes:
        prompt: token ids.
        tokens: T generated token ids.
        logprob_T: float32, nats, as recorded when sampled.
        cached: prompt tokens from the engine's prefix cache, 0 when not told.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprob_T: Floats
    cached: int
