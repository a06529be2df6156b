"""Linear layers on fixed tiles: every product the library sees has the same shape, whatever the number of rows.

A BLAS picks its path by shape: MKL takes another one below 8 rows, and splits narrow outputs by thread. Rows are
therefore padded to tiles of ``TILE`` and multiplied as one batch of equal tiles, and outputs are padded to
``OUTPUT_MULTIPLE`` columns. That the library keeps the row law on these shapes is proved at start-up
(``zerogap.ops.portable.selftest``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from zerogap.ops.portable.elementwise import wide

TILE = 16
OUTPUT_MULTIPLE = 64


def linear(x_RK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, segments: int = 1) -> Tensor:
    """Return ``x_RK @ weight_NK.T + bias_N`` with the row law kept.

    Args:
        x_RK: input rows [R, K].
        weight_NK: weight [N, K].
        bias_N: added after the segments are summed.
        segments: K is cut into this many equal parts (``segment_count``), whose partial sums meet in a balanced
            tree, so that tensor-parallel ranks which hold whole segments can give the same bits.

    Returns:
        Rows [R, N] in the dtype of ``x_RK``; from 16 bits wide, all is float32 in between and rounded once.
    """
    return _Linear.apply(x_RK, weight_NK, bias_N, segments)


def segment_count(in_features: int, unit: int = 64) -> int:
    """Return the largest power of two up to 8 that cuts ``in_features`` into multiples of 64 and ``unit``."""
    for segments in (8, 4, 2):
        width, remainder = divmod(in_features, segments)
        if not remainder and width % 64 == 0 and width % unit == 0:
            return segments
    return 1


def stale_copies(weights: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the weights whose copy is stale: none, this backend keeps no copies."""
    return []


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, segments: int) -> Tensor:
        if x_RK.dtype != weight_NK.dtype:
            raise ValueError(f"linear: rows are {x_RK.dtype}, the weight is {weight_NK.dtype}")
        ctx.save_for_backward(x_RK, weight_NK)
        ctx.has_bias = bias_N is not None
        y_RN = tiled_product(wide(x_RK), pad_outputs(wide(weight_NK)), segments)[:, : len(weight_NK)]
        return (y_RN if bias_N is None else y_RN.add_(bias_N)).to(x_RK.dtype)

    @staticmethod
    def backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x_RK, weight_NK = (wide(saved) for saved in ctx.saved_tensors)
        grad_RN = wide(grad_RN)
        grad_x = grad_RN @ weight_NK if ctx.needs_input_grad[0] else None
        grad_weight = grad_RN.T @ x_RK if ctx.needs_input_grad[1] else None
        grad_bias = grad_RN.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None


def pad_outputs(weight_NK: Tensor) -> Tensor:
    """Return the weight with zero rows up to a multiple of ``OUTPUT_MULTIPLE``; itself if it has one already."""
    missing = -len(weight_NK) % OUTPUT_MULTIPLE
    return pad(weight_NK, (0, 0, 0, missing)) if missing else weight_NK


def tiled_product(x_RK: Tensor, weight_NK: Tensor, segments: int) -> Tensor:
    """Return ``x_RK @ weight_NK.T`` without autograd.

    Args:
        x_RK: input rows [R, K].
        weight_NK: weight as `pad_outputs` returns it, [N, K].
        segments: as in `linear`.
    """
    assert len(weight_NK) % OUTPUT_MULTIPLE == 0, "on other widths the row law is not proved"
    rows, in_features = x_RK.shape
    tiles = -(-rows // TILE)
    if tiles * TILE != rows:
        x_RK = pad(x_RK, (0, 0, 0, tiles * TILE - rows))
    x_TMK = x_RK.contiguous().view(tiles, TILE, in_features)
    width = in_features // segments
    partials = [
        torch.bmm(x_TMK[:, :, start : start + width], weight_NK[:, start : start + width].T.expand(tiles, -1, -1))
        for start in range(0, in_features, width)
    ]
    while len(partials) > 1:  # neighbours first, so that a rank with adjacent segments holds a whole subtree
        partials = [left.add_(right) for left, right in zip(partials[::2], partials[1::2], strict=True)]
    return partials[0].view(tiles * TILE, -1)[:rows]
