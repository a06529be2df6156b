"""Tiles of the matrix kernels, read from ``tiles.toml``, and a record of those that were used."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from zerogap.errors import UsageError
from zerogap.ops.triton.targets import Target


@dataclass(frozen=True)
class LinearTile:
    """How a program of the linear kernel is shaped.

    Attributes:
        rows: largest number of rows that it is meant for; None: any.
        block_m: rows of a tile.
        block_n: outputs of a tile.
        warps: warps of a program.
        stages: depth of the software pipeline.
        tree: where the partial sums of segments meet: ``memory`` or ``registers``.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    rows: int | None = None
    tree: str = "memory"


@dataclass(frozen=True)
class LinearTiles:
    """What the table says about one weight: K is walked in steps of ``block_k`` whatever the number of rows."""

    block_k: int
    tiles: tuple[LinearTile, ...]

    def tile(self, rows: int) -> LinearTile:
        """Return the tile for a number of rows."""
        return next(tile for tile in self.tiles if tile.rows is None or rows <= tile.rows)


@cache
def linear_tiles(target: Target, dtype: str, out_features: int, segments: int) -> LinearTiles:
    """Look a weight up; the answer depends on architecture, dtype, N and the cut of K, never on rows."""
    for entry in _table()["linear"]:
        if target.name in entry["architectures"] and dtype in entry["dtypes"]:
            if out_features < entry.get("min_out", 0):
                continue
            tiles = entry["segment_tiles" if segments > 1 else "tiles"]
            return LinearTiles(entry["block_k"], tuple(LinearTile(**tile) for tile in tiles))
    raise KeyError(f"tiles.toml has no linear entry for {target.name}, {dtype}")


@dataclass(frozen=True)
class AttentionTile:
    """How a program of an attention kernel is shaped: one shape for decode, prefill and training.

    Attributes:
        block_m: query rows times heads of a group.
        key_block: absolute key positions that meet a tile in one product.
        warps: warps of a program.
        stages: depth of the software pipeline.
        split: keys whose weighted sums are finished before the next are begun, so that a long context can be walked
            in parallel; a size, never a number of parts.
    """

    block_m: int
    key_block: int
    warps: int
    stages: int
    split: int

    def query_rows(self, share: int) -> int:
        """Return how many query rows of ``share`` heads each fill a tile: a power of two that divides key_block."""
        return min(1 << ((self.block_m // share).bit_length() - 1), self.key_block)


@cache
def attention_tile(target: Target, dtype: str, head_dim: int, share: int, kernel: str = "forward") -> AttentionTile:
    """Look attention up by head size; ``kernel`` is ``forward`` or ``backward``.

    A group of more heads than the tile has rows gets a taller tile.
    """
    for entry in _table()["attention"]:
        if target.name in entry["architectures"] and dtype in entry["dtypes"] and head_dim <= entry["max_head_dim"]:
            tile = AttentionTile(**entry[kernel], split=entry["split"])
            return replace(tile, block_m=max(tile.block_m, 1 << (share - 1).bit_length()))
    raise UsageError(f"attention on {target.name} has no kernel for heads of {head_dim} in {dtype}")


_used: dict[str, Any] = {}


def note(op: str, target: Target, dtype: str, shape: str, choice: Any) -> None:
    """Remember what was chosen for an op, for the run's record."""
    _used.setdefault(f"{op} {shape} {dtype} {target.name}", choice)


def choices() -> dict[str, str]:
    """Return what the table chose for each op, shape and dtype that has run in this process."""
    return {key: repr(choice) for key, choice in sorted(_used.items())}


@cache
def _table() -> dict[str, list[dict[str, Any]]]:
    return tomllib.loads(resources.files("zerogap.ops.triton").joinpath("tiles.toml").read_text())
