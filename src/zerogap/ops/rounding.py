"""Weights that are computed with as bfloat16, while the tensors stay float32: masters that an optimiser moves.

The mark lies on the parameter, so that every op and every decoder over the same parameter sees the same values. What is
rounded, to nearest with ties to even, is the weight alone: products, sums and everything else stay float32.
"""

from __future__ import annotations

from torch import Tensor

_ATTRIBUTE = "_zerogap_rounded"


def round_weight(weight: Tensor, rounded: bool) -> None:
    """Say whether ops compute with the weight rounded to bfloat16."""
    setattr(weight, _ATTRIBUTE, rounded)


def is_rounded(weight: Tensor) -> bool:
    """Return whether ops compute with the weight rounded to bfloat16."""
    return bool(getattr(weight, _ATTRIBUTE, False))
