"""Gradients of attention, repeatable: every element has one owner that adds its terms up in a fixed order.

The gradient of queries walks the keys of a tile in ascending order; that of keys and values walks the rows that see a
tile of keys, sequence by sequence where several have its pages. Weights are computed again from the stored log-sum. No
atomics.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zerogap.ops.triton.aot import KernelConfig
from zerogap.ops.triton.attention_kernels import locate, slots
from zerogap.ops.triton.launch import aligned, launch
from zerogap.ops.triton.plan import AttentionPlan
from zerogap.ops.triton.table import AttentionTile, attention_tile
from zerogap.ops.triton.targets import Target, detect


def backward(
    grad_RHD: Tensor,
    q_RHD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    out_RHD: Tensor,
    log_sum_RH: Tensor,
    plan: AttentionPlan,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values.

    Args:
        grad_RHD: gradient of the output [R, H, D].
        q_RHD: queries, and likewise keys, values and the output, as in `zerogap.ops.triton.attention`.
        k_SGD: keys by slot [slots, G, D].
        v_SGD: values by slot.
        out_RHD: output rows.
        log_sum_RH: base-2 logarithm of the sum of exp(score) [R, H].
        plan: rows against slots.
        scale: factor on the scores.

    Raises:
        ValueError: a page of the plan stands at two positions.
    """
    (rows, heads, width), groups = q_RHD.shape, k_SGD.shape[1]
    share = heads // groups
    target, dtype = detect(q_RHD.device), str(q_RHD.dtype).removeprefix("torch.")
    tile = attention_tile(target, dtype, width, share, "backward")
    plan = plan.on(q_RHD.device)
    q_RHD, grad_RHD, k_SGD, v_SGD = (aligned(x) for x in (q_RHD, grad_RHD, k_SGD, v_SGD))
    delta_RH = (grad_RHD.float() * out_RHD.float()).sum(-1)
    grad_q, grad_k, grad_v = torch.empty_like(q_RHD), torch.zeros_like(k_SGD), torch.zeros_like(v_SGD)
    if not rows:
        return grad_q, grad_k, grad_v
    tiles_T4, (keys_U6, members_M3) = plan.tiles(tile.query_rows(share)), plan.key_tiles(tile.key_block)
    common = (log_sum_RH, delta_RH, plan.table_SP, scale, scale * math.log2(math.e), plan.table_SP.shape[1])
    constexprs = _constexprs(tile, groups, share, width, plan.page_size)
    launch(
        query_kernel, (len(tiles_T4), groups), (q_RHD, k_SGD, v_SGD, grad_RHD, grad_q, tiles_T4, *common), constexprs,
        target, tile.warps, tile.stages,
    )  # fmt: skip
    launch(
        key_kernel, (len(keys_U6), groups),
        (q_RHD, k_SGD, v_SGD, grad_RHD, grad_k, grad_v, keys_U6, members_M3, *common),
        {**constexprs, "QUERY_ROWS": tile.query_rows(share)}, target, tile.warps, tile.stages,
    )  # fmt: skip
    return grad_q, grad_k, grad_v


def _constexprs(tile: AttentionTile, groups: int, share: int, width: int, page_size: int) -> dict[str, Any]:
    return {
        "GROUPS": groups, "SHARE": share, "HEAD_DIM": width, "PAGE_SIZE": page_size, "BLOCK_M": tile.block_m,
        "BLOCK_D": 1 << (width - 1).bit_length(), "KEY_BLOCK": tile.key_block,
    }  # fmt: skip


@triton.jit
def _pair(one, other, at, inside):
    """Load the same elements of two tensors, 0 where there are none."""
    return tl.load(one + at, mask=inside, other=0.0), tl.load(other + at, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["scale", "scale2", "table_width"])
def query_kernel(
    q_RHD,
    k_SGD,
    v_SGD,
    grad_RHD,
    grad_q_RHD,
    tiles_T4,
    log_sum_RH,
    delta_RH,
    table_SP,
    scale: tl.float32,
    scale2: tl.float32,  # times log2(e)
    table_width: tl.int32,
    GROUPS: tl.constexpr,
    SHARE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
) -> None:
    """Gradient of the queries of one tile of one group."""
    group = tl.program_id(1)
    position0, sequence, row_M, head_M, position_M, real_M = locate(tiles_T4, tl.program_id(0), group, SHARE, BLOCK_M)
    last_position = tl.max(position_M)
    d_D = tl.arange(0, BLOCK_D)
    place_M = row_M * (GROUPS * SHARE) + head_M
    inside_MD = real_M[:, None] & (d_D < HEAD_DIM)[None, :]
    at_MD = place_M[:, None] * HEAD_DIM + d_D[None, :]
    q_MD, grad_MD = _pair(q_RHD, grad_RHD, at_MD, inside_MD)
    log_sum_M, delta_M = _pair(log_sum_RH, delta_RH, place_M, real_M)
    table_P = table_SP + sequence.to(tl.int64) * table_width
    acc_MD = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for block in range(0, position0 // KEY_BLOCK + 1):
        key_N = block * KEY_BLOCK + tl.arange(0, KEY_BLOCK)
        exists_N = key_N <= last_position
        slot_N = slots(table_P, key_N, exists_N, PAGE_SIZE) * (GROUPS * HEAD_DIM) + group * HEAD_DIM
        inside_ND = exists_N[:, None] & (d_D < HEAD_DIM)[None, :]
        k_ND, v_ND = _pair(k_SGD, v_SGD, slot_N[:, None] + d_D[None, :], inside_ND)
        score_MN = tl.dot(q_MD, k_ND.T, input_precision="ieee") * scale2
        seen_MN = key_N[None, :] <= position_M[:, None]
        weight_MN = tl.exp2(tl.where(seen_MN, score_MN - log_sum_M[:, None], float("-inf")))
        slope_MN = tl.dot(grad_MD, v_ND.T, input_precision="ieee") - delta_M[:, None]
        grad_score_MN = (weight_MN * slope_MN).to(k_ND.dtype)
        acc_MD = tl.dot(grad_score_MN, k_ND, acc_MD, input_precision="ieee")
    tl.store(grad_q_RHD + at_MD, (acc_MD * scale).to(grad_q_RHD.dtype.element_ty), mask=inside_MD)


@triton.jit(do_not_specialize=["scale", "scale2", "table_width"])
def key_kernel(
    q_RHD,
    k_SGD,
    v_SGD,
    grad_RHD,
    grad_k_SGD,
    grad_v_SGD,
    keys_U6,
    members_M3,
    log_sum_RH,
    delta_RH,
    table_SP,
    scale: tl.float32,
    scale2: tl.float32,  # times log2(e)
    table_width: tl.int32,
    GROUPS: tl.constexpr,
    SHARE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
) -> None:
    """Gradients of the keys and values of one tile of one group, over all rows and heads that see it."""
    group = tl.program_id(1)
    entry = keys_U6 + tl.program_id(0) * 6
    sequence = tl.load(entry)
    key0 = tl.load(entry + 1)
    low = tl.load(entry + 2)
    high = tl.load(entry + 3)
    first_member = tl.load(entry + 4)
    members = tl.load(entry + 5)
    d_D = tl.arange(0, BLOCK_D)
    key_N = key0 + tl.arange(0, KEY_BLOCK)
    exists_N = (key_N >= low) & (key_N < high)
    table_P = table_SP + sequence.to(tl.int64) * table_width
    slot_N = slots(table_P, key_N, exists_N, PAGE_SIZE) * (GROUPS * HEAD_DIM) + group * HEAD_DIM
    inside_ND = exists_N[:, None] & (d_D < HEAD_DIM)[None, :]
    at_ND = slot_N[:, None] + d_D[None, :]
    k_ND, v_ND = _pair(k_SGD, v_SGD, at_ND, inside_ND)
    acc_k_ND = tl.zeros((KEY_BLOCK, BLOCK_D), tl.float32)
    acc_v_ND = tl.zeros((KEY_BLOCK, BLOCK_D), tl.float32)
    query_M = tl.arange(0, BLOCK_M) // SHARE
    head_M = group * SHARE + tl.arange(0, BLOCK_M) % SHARE
    for member in range(first_member, first_member + members):
        row0 = tl.load(members_M3 + member * 3)
        start = tl.load(members_M3 + member * 3 + 1)
        stop = tl.load(members_M3 + member * 3 + 2)
        first = tl.maximum(start, key0)
        for step in range(0, tl.cdiv(stop - first, QUERY_ROWS)):
            position_M = first + step * QUERY_ROWS + query_M
            real_M = (query_M < QUERY_ROWS) & (position_M < stop)
            place_M = (row0 + position_M - start).to(tl.int64) * (GROUPS * SHARE) + head_M
            at_MD = place_M[:, None] * HEAD_DIM + d_D[None, :]
            inside_MD = real_M[:, None] & (d_D < HEAD_DIM)[None, :]
            q_MD, grad_MD = _pair(q_RHD, grad_RHD, at_MD, inside_MD)
            log_sum_M, delta_M = _pair(log_sum_RH, delta_RH, place_M, real_M)
            score_NM = tl.dot(k_ND, q_MD.T, input_precision="ieee") * scale2
            seen_NM = exists_N[:, None] & (key_N[:, None] <= position_M[None, :]) & real_M[None, :]
            weight_NM = tl.exp2(tl.where(seen_NM, score_NM - log_sum_M[None, :], float("-inf")))
            acc_v_ND = tl.dot(weight_NM.to(grad_MD.dtype), grad_MD, acc_v_ND, input_precision="ieee")
            slope_NM = tl.dot(v_ND, grad_MD.T, input_precision="ieee") - delta_M[None, :]
            acc_k_ND = tl.dot((weight_NM * slope_NM).to(q_MD.dtype), q_MD, acc_k_ND, input_precision="ieee")
    tl.store(grad_k_SGD + at_ND, (acc_k_ND * scale).to(grad_k_SGD.dtype.element_ty), mask=inside_ND)
    tl.store(grad_v_SGD + at_ND, acc_v_ND.to(grad_v_SGD.dtype.element_ty), mask=inside_ND)


_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_SHAPES = ((64, 3), (96, 1), (128, 4), (256, 4))


def configs(target: Target) -> Iterator[KernelConfig]:
    """Yield both passes for some head sizes."""
    for dtype, short in _SHORT.items():
        for width, share in _SHAPES:
            tile = attention_tile(target, dtype, width, share, "backward")
            constexprs = _constexprs(tile, 8, share, width, 1)
            row = f"*{short}"
            common = {
                "log_sum_RH": "*fp32", "delta_RH": "*fp32", "table_SP": "*i32",
                "scale": "fp32", "scale2": "fp32", "table_width": "i32",
            }  # fmt: skip
            inputs = {"q_RHD": row, "k_SGD": row, "v_SGD": row, "grad_RHD": row}
            for function, own, extra in (
                (query_kernel, {"grad_q_RHD": row, "tiles_T4": "*i32"}, {}),
                (
                    key_kernel,
                    {"grad_k_SGD": row, "grad_v_SGD": row, "keys_U6": "*i32", "members_M3": "*i32"},
                    {"QUERY_ROWS": tile.query_rows(share)},
                ),
            ):
                yield KernelConfig(
                    name=f"attention/{dtype}/{width}x{share}/{function.__name__}",
                    function=function,
                    signature={**inputs, **own, **common},
                    constexprs={**constexprs, **extra},
                    num_warps=tile.warps,
                    num_stages=tile.stages,
                    dtype=dtype,
                    op=f"attention {function.__name__} {width}x{share}",
                    role="backward",
                )
