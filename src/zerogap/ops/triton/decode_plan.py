"""The attention kernel's plan of a decode step whose inputs lie on the device and are filled anew every step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zerogap.ops.plan import DecodeTensors


@dataclass(frozen=True)
class DecodePlan:
    """One row per sequence: what the forward kernel reads of an ``AttentionPlan``; there is no backward pass.

    Attributes:
        table_SP: page of positions [i * page_size, (i + 1) * page_size).
        length_S: keys that exist.
        positions_R: absolute position of each row.
        tiles_R4: each row as a tile.
        page_size: positions of a page.
        longest: most keys that a sequence might have: all splits up to there are launched.
    """

    table_SP: Tensor
    length_S: Tensor
    positions_R: Tensor
    tiles_R4: Tensor
    page_size: int
    longest: int

    def on(self, device: torch.device) -> DecodePlan:
        """Return this plan: it is there."""
        assert self.table_SP.device == device
        return self

    def tiles(self, query_rows: int) -> Tensor:
        """Return the tiles: of one row, whatever their height."""
        return self.tiles_R4


def decode_plan(tensors: DecodeTensors) -> DecodePlan:
    """Return the plan over tensors on the device, as if each sequence might fill the whole width."""
    return DecodePlan(
        tensors.table_RW,
        tensors.length_R,
        tensors.position_R,
        tensors.tile_R4,
        tensors.page_size,
        tensors.table_RW.shape[1] * tensors.page_size,
    )
