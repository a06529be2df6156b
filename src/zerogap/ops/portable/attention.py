"""Causal attention over paged keys and values: one entry for decode, chunked prefill and packed training.

A row attends to the keys of its own sequence at positions 0 to its own. Keys are walked in fixed blocks of
``KEY_BLOCK`` absolute positions, whatever the page size; within a block they meet in one matrix product of fixed
shape, and the blocks are added up in ascending order from +0. Keys beyond the row's position score -inf, weigh +0 and
so leave the sum as it is: a row's bits do not depend on which later keys happen to exist. Positions past the end of a
sequence read the sequence's own first slot, so that neither a freed page nor a neighbour is ever touched, not even
multiplied by 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from zerogap.ops import plan as shared
from zerogap.ops.plan import AttentionPlan, Chunk
from zerogap.ops.portable.elementwise import exp, tree_sum, wide, wide_dtype

KEY_BLOCK = 32
QUERY_TILE = 8
_SCORES_AT_ONCE = 1 << 22  # score elements held at a time


@dataclass(frozen=True)
class Tiles:
    """Which rows meet which keys; built once per batch and shared by all layers.

    T query tiles of ``QUERY_TILE`` rows, sorted by falling number of key blocks; S sequences; L padded length.
    """

    slots_SL: Tensor  # slot of each absolute position
    sequence_T: Tensor
    rows_TQ: Tensor  # row of the batch; padding repeats the tile's first row
    positions_TQ: Tensor
    place_R: Tensor  # where row r stands in the flattened tiles
    blocks: tuple[int, ...]  # key blocks of each tile
    used: tuple[int, ...]  # rows of each tile that are no padding; they come first

    @staticmethod
    def build(chunks: Sequence[Chunk], page_size: int) -> Tiles:
        """Plan a batch whose rows are the chunks' rows in this order."""
        start = np.array([chunk.start for chunk in chunks], dtype=np.int64)
        count = np.array([chunk.count for chunk in chunks], dtype=np.int64)
        length = start + count
        padded = -(-int(length.max()) // KEY_BLOCK) * KEY_BLOCK
        pages = -(-length // page_size)
        table = np.zeros((len(chunks), -(-padded // page_size)), dtype=np.int64)
        for row, chunk, used in zip(table, chunks, pages, strict=True):
            row[:used] = chunk.block_table[:used]
        position = np.arange(padded)
        position = np.where(position < length[:, None], position, 0)
        slots = np.take_along_axis(table, position // page_size, axis=1) * page_size + position % page_size

        tiles = -(-count // QUERY_TILE)
        sequence = np.repeat(np.arange(len(chunks)), tiles)
        first = (np.arange(len(sequence)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * QUERY_TILE
        offset = first[:, None] + np.arange(QUERY_TILE)
        real = offset < count[sequence][:, None]
        offset = np.where(real, offset, first[:, None])
        blocks = (start[sequence] + offset.max(axis=1)) // KEY_BLOCK + 1
        order = np.argsort(-blocks, kind="stable")
        sequence, offset, real, blocks = sequence[order], offset[order], real[order], blocks[order]
        rows = (np.cumsum(count) - count)[sequence][:, None] + offset
        place = np.empty(int(count.sum()), dtype=np.int64)
        place[rows[real]] = np.flatnonzero(real)
        return Tiles(
            torch.from_numpy(slots),
            torch.from_numpy(sequence),
            torch.from_numpy(rows),
            torch.from_numpy(start[sequence][:, None] + offset),
            torch.from_numpy(place),
            tuple(blocks.tolist()),
            tuple(real.sum(axis=1).tolist()),
        )


def decode_plan(tensors: shared.DecodeTensors) -> Tiles:
    """Return the tiles of one row per sequence: each walks the whole width of the table, which changes no bit."""
    rows, width = tensors.table_RW.shape
    padded = -(-width * tensors.page_size // KEY_BLOCK) * KEY_BLOCK
    key_RL = torch.arange(padded).expand(rows, -1)
    key_RL = torch.where(key_RL < tensors.length_R.unsqueeze(1), key_RL, 0)
    page_RL = tensors.table_RW.gather(1, key_RL // tensors.page_size).to(torch.int64)
    row_R = torch.arange(rows)
    return Tiles(
        slots_SL=page_RL * tensors.page_size + key_RL % tensors.page_size,
        sequence_T=row_R,
        rows_TQ=row_R.unsqueeze(1).expand(-1, QUERY_TILE),
        positions_TQ=tensors.position_R.unsqueeze(1).expand(-1, QUERY_TILE),
        place_R=row_R * QUERY_TILE,
        blocks=(padded // KEY_BLOCK,) * rows,
        used=(1,) * rows,
    )


def attention(q_RHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, plan: AttentionPlan | Tiles, scale: float) -> Tensor:
    """Return softmax(q k^T * scale) v over each row's own earlier keys, [R, H, D] (arXiv 1706.03762, GQA arXiv
    2305.13245).

    Args:
        q_RHD: queries [R, H, D]; head h reads key/value head h // (H / G).
        k_SGD: keys by slot [slots, G, D]; only slots that the plan names are read.
        v_SGD: values, likewise.
        plan: rows against slots, shared or already laid out.
        scale: factor on the queries.
    """
    tiles = plan if isinstance(plan, Tiles) else _tiles_of(plan)
    return _Attention.apply(q_RHD, k_SGD, v_SGD, tiles, scale)


@lru_cache(maxsize=8)
def _tiles_of(plan: AttentionPlan) -> Tiles:
    return Tiles.build(plan.chunks, plan.page_size)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_RHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, plan: Tiles, scale: float) -> Tensor:
        q_GTMD = _tiles(wide(q_RHD) * scale, plan, k_SGD.shape[1])
        out_GTMD = torch.empty_like(q_GTMD)
        peak_GTM1, total_GTM1 = (q_GTMD.new_empty(*q_GTMD.shape[:3], 1) for _ in range(2))
        for group in _groups(plan, q_GTMD):
            out, peak, total = _forward_group(q_GTMD[:, group], k_SGD, v_SGD, plan, group)
            out_GTMD[:, group], peak_GTM1[:, group], total_GTM1[:, group] = out, peak, total
        out_RHD = _rows(out_GTMD, plan).to(q_RHD.dtype)
        ctx.save_for_backward(q_RHD, k_SGD, v_SGD, out_RHD, peak_GTM1, total_GTM1)
        ctx.plan, ctx.scale = plan, scale
        return out_RHD

    @staticmethod
    def backward(ctx: Any, grad_RHD: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q_RHD, k_SGD, v_SGD, out_RHD, peak_GTM1, total_GTM1 = ctx.saved_tensors
        plan, scale, heads = ctx.plan, ctx.scale, k_SGD.shape[1]
        q_GTMD = _tiles(wide(q_RHD) * scale, plan, heads)
        # Padding repeats a real row, so its gradient is cut: it must not count twice.
        real_TM = torch.zeros(plan.rows_TQ.numel(), dtype=torch.bool).index_fill_(0, plan.place_R, True)
        real_1TM1 = real_TM.view(1, len(plan.blocks), QUERY_TILE, 1).repeat_interleave(
            q_GTMD.shape[2] // QUERY_TILE, dim=2
        )
        grad_GTMD = _tiles(wide(grad_RHD), plan, heads) * real_1TM1
        delta_GTM1 = (grad_GTMD * _tiles(wide(out_RHD), plan, heads)).sum(-1, keepdim=True)
        grad_q_GTMD = torch.zeros_like(q_GTMD)
        grad_k, grad_v = (
            torch.zeros(heads, k_SGD.shape[0], k_SGD.shape[2], dtype=wide_dtype(q_RHD.dtype)) for _ in range(2)
        )
        for group in _groups(plan, q_GTMD):
            for block, tiles in _blocks(plan, group):
                q, grad = q_GTMD[:, tiles], grad_GTMD[:, tiles]
                slots = _block_slots(plan, tiles, block)
                k, v = _gather(k_SGD, slots), _gather(v_SGD, slots)
                weights = exp(_scores(q, k, plan, tiles, block) - peak_GTM1[:, tiles]) / total_GTM1[:, tiles]
                grad_scores = weights * (grad @ v.transpose(2, 3) - delta_GTM1[:, tiles])
                grad_q_GTMD[:, tiles] += grad_scores @ k
                grad_k.index_add_(1, slots.flatten(), (grad_scores.transpose(2, 3) @ q).flatten(1, 2))
                grad_v.index_add_(1, slots.flatten(), (weights.transpose(2, 3) @ grad).flatten(1, 2))
        return _rows(grad_q_GTMD, plan) * scale, grad_k.transpose(0, 1), grad_v.transpose(0, 1), None, None


def _forward_group(
    q_GTMD: Tensor, k_SGD: Tensor, v_SGD: Tensor, plan: Tiles, group: slice
) -> tuple[Tensor, Tensor, Tensor]:
    blocks = list(_blocks(plan, group))
    slots = [_block_slots(plan, tiles, block) for block, tiles in blocks]
    # Products need the full tile; the rest is row by row, so it is spared for padding (most of a decode step).
    height = q_GTMD.shape[2]
    used = max(plan.used[group]) * (height // QUERY_TILE)
    padding = (0, 0, 0, height - used)
    scores = [
        _scores(q_GTMD[:, : tiles.stop - tiles.start], _gather(k_SGD, s), plan, tiles, block)[:, :, :used]
        for (block, tiles), s in zip(blocks, slots, strict=True)
    ]
    peak = scores[0].amax(-1, keepdim=True)
    for part in scores[1:]:
        some = peak[:, : part.shape[1]]
        torch.maximum(some, part.amax(-1, keepdim=True), out=some)
    out = torch.zeros_like(q_GTMD)
    total = torch.zeros_like(peak)
    for part, s in zip(scores, slots, strict=True):
        reach = part.shape[1]
        weights = exp(part - peak[:, :reach])
        total[:, :reach] += tree_sum(weights).unsqueeze(-1)
        out[:, :reach] += _product(pad(weights, padding), _gather(v_SGD, s))
    out[:, :, :used].div_(total)
    return out, pad(peak, padding), pad(total, padding, value=1.0)


def _scores(q_GTMD: Tensor, k_GTBD: Tensor, plan: Tiles, tiles: slice, block: int) -> Tensor:
    scores_GTMB = _product(q_GTMD, k_GTBD.transpose(2, 3))
    key = torch.arange(block * KEY_BLOCK, (block + 1) * KEY_BLOCK)
    hidden_TQB = key > plan.positions_TQ[tiles].unsqueeze(-1)
    share = q_GTMD.shape[2] // QUERY_TILE
    return scores_GTMB.masked_fill_(hidden_TQB.repeat_interleave(share, dim=1), -torch.inf)


def _product(a_GTMK: Tensor, b_GTKN: Tensor) -> Tensor:
    """Multiply matrices of one fixed shape as one flat batch."""
    shape = a_GTMK.shape[:3]
    return torch.bmm(a_GTMK.flatten(0, 1), b_GTKN.flatten(0, 1)).view(*shape, -1)


def _tiles(x_RHD: Tensor, plan: Tiles, heads: int) -> Tensor:
    """Lay rows out as [G, T, M, D] with M = QUERY_TILE * (H / G): the heads that share keys stand together."""
    _, total, width = x_RHD.shape
    tiles = len(plan.blocks)
    x = x_RHD.index_select(0, plan.rows_TQ.flatten()).view(tiles, QUERY_TILE, heads, total // heads, width)
    return x.permute(2, 0, 1, 3, 4).reshape(heads, tiles, QUERY_TILE * (total // heads), width)


def _rows(x_GTMD: Tensor, plan: Tiles) -> Tensor:
    heads, tiles, _, width = x_GTMD.shape
    x = x_GTMD.view(heads, tiles * QUERY_TILE, -1, width).index_select(1, plan.place_R)
    return x.transpose(0, 1).reshape(len(plan.place_R), -1, width)


def _groups(plan: Tiles, q_GTMD: Tensor) -> list[slice]:
    """Cut the tiles into runs whose scores fit in memory; a tile's result does not depend on its run."""
    limit = max(1, _SCORES_AT_ONCE // (q_GTMD.shape[0] * q_GTMD.shape[2] * KEY_BLOCK))
    groups, start, pairs = [], 0, 0
    for tile, blocks in enumerate(plan.blocks):
        if pairs and pairs + blocks > limit:
            groups.append(slice(start, tile))
            start, pairs = tile, 0
        pairs += blocks
    return [*groups, slice(start, len(plan.blocks))]


def _blocks(plan: Tiles, group: slice) -> list[tuple[int, slice]]:
    """List (key block, the group's tiles that reach it): a prefix of the group, since tiles are sorted by blocks."""
    stop, listed = group.stop, []
    for block in range(plan.blocks[group.start]):
        while plan.blocks[stop - 1] <= block:
            stop -= 1
        listed.append((block, slice(group.start, stop)))
    return listed


def _block_slots(plan: Tiles, tiles: slice, block: int) -> Tensor:
    return plan.slots_SL[:, block * KEY_BLOCK : (block + 1) * KEY_BLOCK].index_select(0, plan.sequence_T[tiles])


def _gather(x_SGD: Tensor, slots_TB: Tensor) -> Tensor:
    """Fetch keys or values as [G, T, B, D], widened."""
    return wide(x_SGD.transpose(0, 1).index_select(1, slots_TB.flatten())).unflatten(1, tuple(slots_TB.shape))
