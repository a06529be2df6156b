"""The attention kernels: forward, the merge of its splits, and the two backward passes.

Rows of a tile are query rows times the heads of a group, so that decode fills it with heads; all rows of a tile lie in
one key block (``AttentionPlan.tiles``), so each of them has a visible key in every block walked.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zerogap.ops.triton.elementwise import log, tree_sum

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def locate(tiles_T4, tile, group, SHARE: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return first position, sequence, and per tile row: batch row, head, position, whether it is one."""
    row0 = tl.load(tiles_T4 + tile * 4)
    position0 = tl.load(tiles_T4 + tile * 4 + 1)
    count = tl.load(tiles_T4 + tile * 4 + 2)
    sequence = tl.load(tiles_T4 + tile * 4 + 3)
    query_M = tl.arange(0, BLOCK_M) // SHARE
    real_M = query_M < count
    query_M = tl.where(real_M, query_M, 0)  # padding stands where the first row does
    head_M = group * SHARE + tl.arange(0, BLOCK_M) % SHARE
    return position0, sequence, (row0 + query_M).to(tl.int64), head_M, position0 + query_M, real_M


@triton.jit
def slots(table_P, key_N, exists_N, PAGE_SIZE: tl.constexpr):
    """Return the slot of each key; only pages of keys that exist are looked up."""
    page_N = tl.load(table_P + key_N // PAGE_SIZE, mask=exists_N, other=0)
    return page_N * PAGE_SIZE + key_N % PAGE_SIZE


@triton.jit
def _key_sum(x_MN, LEVELS: tl.constexpr):
    """Sum float32 [M, 2^LEVELS] over keys as a tree of single additions: neighbours, then halves.

    ``tl.sum`` leaves a chain to the compiler, and LLVM's vectoriser as Triton 3.8 ships it may change a chain's order,
    not alike in every program. Neighbours come first because they mostly lie in one thread.
    """
    pairs_MN = tl.sum(tl.reshape(x_MN, [x_MN.shape[0], x_MN.shape[1] // 2, 2]), axis=2)
    return tree_sum(pairs_MN, LEVELS - 1)


@triton.jit
def _walk_split(
    q_MD, k_ptr, v_ptr, table_P, position_M, length, first, last, scale, slot_stride,
    HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, KEY_BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """Walk key blocks ``first`` to ``last`` of one split; return maximum, sum of weights, weighted values."""
    d_D = tl.arange(0, BLOCK_D)
    peak_M = tl.full((q_MD.shape[0],), float("-inf"), tl.float32)
    total_M = tl.zeros((q_MD.shape[0],), tl.float32)
    acc_MD = tl.zeros((q_MD.shape[0], BLOCK_D), tl.float32)
    for block in range(first, last):
        key_N = block * KEY_BLOCK + tl.arange(0, KEY_BLOCK)
        exists_N = key_N < length
        slot_N = slots(table_P, key_N, exists_N, PAGE_SIZE) * slot_stride
        inside_ND = exists_N[:, None] & (d_D < HEAD_DIM)[None, :]
        k_ND = tl.load(k_ptr + slot_N[:, None] + d_D[None, :], mask=inside_ND, other=0.0)
        score_MN = tl.dot(q_MD, k_ND.T, input_precision="ieee") * scale
        score_MN = tl.where(key_N[None, :] <= position_M[:, None], score_MN, float("-inf"))
        new_peak_M = tl.maximum(peak_M, tl.max(score_MN, 1))
        shrink_M = tl.exp2(peak_M - new_peak_M)
        weight_MN = tl.exp2(score_MN - new_peak_M[:, None])
        total_M = total_M * shrink_M + _key_sum(weight_MN, LEVELS)
        v_ND = tl.load(v_ptr + slot_N[:, None] + d_D[None, :], mask=inside_ND, other=0.0)
        acc_MD = tl.dot(weight_MN.to(v_ND.dtype), v_ND, acc_MD * shrink_M[:, None], input_precision="ieee")
        peak_M = new_peak_M
    return peak_M, total_M, acc_MD


@triton.jit(do_not_specialize=["scale", "slot_units", "group_units", "table_width", "rows"])
def attention_kernel(
    q_RHD,
    k,
    v,
    out_RHD,  # with SPLIT_GRID float32 [splits, R, H, D]
    held_RHD,  # float32, read and written only within a program
    log_sum_RH,  # base 2; with SPLIT_GRID maximum and sum of weights [splits, R, H, 2]
    tiles_T4,
    table_SP,
    length_S,
    scale: tl.float32,  # times log2(e)
    slot_units: tl.int32,  # stride of k and v from slot to slot, in units of 16 elements
    group_units: tl.int64,
    table_width: tl.int32,
    rows: tl.int32,
    SPLIT_GRID: tl.constexpr,
    GROUPS: tl.constexpr,
    SHARE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,  # KEY_BLOCK is 2^LEVELS
    SPLIT: tl.constexpr,
) -> None:
    """One tile of one group; with SPLIT_GRID one split of it."""
    group = tl.program_id(1)
    position0, sequence, row_M, head_M, position_M, real_M = locate(tiles_T4, tl.program_id(0), group, SHARE, BLOCK_M)
    blocks = position0 // KEY_BLOCK + 1
    splits = tl.cdiv(blocks, SPLIT // KEY_BLOCK)
    length = tl.load(length_S + sequence)
    table_P = table_SP + sequence.to(tl.int64) * table_width
    k_ptr = k + group * group_units * 16
    v_ptr = v + group * group_units * 16
    d_D = tl.arange(0, BLOCK_D)
    place_M = row_M * (GROUPS * SHARE) + head_M
    inside_MD = real_M[:, None] & (d_D < HEAD_DIM)[None, :]
    q_MD = tl.load(q_RHD + place_M[:, None] * HEAD_DIM + d_D[None, :], mask=inside_MD, other=0.0)

    if SPLIT_GRID:
        split = tl.program_id(2)
        if split < splits:
            first = split * (SPLIT // KEY_BLOCK)
            last = tl.minimum(first + SPLIT // KEY_BLOCK, blocks)
            peak_M, total_M, acc_MD = _walk_split(
                q_MD, k_ptr, v_ptr, table_P, position_M, length, first, last, scale, slot_units * 16,
                HEAD_DIM, PAGE_SIZE, BLOCK_D, KEY_BLOCK, LEVELS,
            )  # fmt: skip
            place_M += split.to(tl.int64) * rows * (GROUPS * SHARE)
            tl.store(out_RHD + place_M[:, None] * HEAD_DIM + d_D[None, :], acc_MD, mask=inside_MD)
            tl.store(log_sum_RH + place_M * 2, peak_M, mask=real_M)
            tl.store(log_sum_RH + place_M * 2 + 1, total_M, mask=real_M)
    else:
        peak_M = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total_M = tl.zeros((BLOCK_M,), tl.float32)
        held_ptrs = held_RHD + place_M[:, None] * HEAD_DIM + d_D[None, :]
        for split in range(0, splits):
            first = split * (SPLIT // KEY_BLOCK)
            last = tl.minimum(first + SPLIT // KEY_BLOCK, blocks)
            split_peak_M, split_total_M, acc_MD = _walk_split(
                q_MD, k_ptr, v_ptr, table_P, position_M, length, first, last, scale, slot_units * 16,
                HEAD_DIM, PAGE_SIZE, BLOCK_D, KEY_BLOCK, LEVELS,
            )  # fmt: skip
            peak_M, old_M, new_M = _shrink(peak_M, split_peak_M)
            total_M = total_M * old_M + split_total_M * new_M
            if split > 0:
                # What is held lies in memory: a second accumulator would not fit into the registers of the walk.
                held_MD = tl.load(held_ptrs, mask=inside_MD, other=0.0)
                acc_MD = held_MD * old_M[:, None] + acc_MD * new_M[:, None]
            if split < splits - 1:
                tl.store(held_ptrs, acc_MD, mask=inside_MD)
                tl.debug_barrier()  # before other threads of the program read it
            else:
                out_MD = _finish(acc_MD, total_M)
                out_ptrs = out_RHD + place_M[:, None] * HEAD_DIM + d_D[None, :]
                tl.store(out_ptrs, out_MD.to(out_RHD.dtype.element_ty), mask=inside_MD)
        tl.store(log_sum_RH + place_M, peak_M + log(total_M) * _LOG2E, mask=real_M)


@triton.jit
def _finish(acc_MD, total_M):
    """Divide by the sum of weights.

    ``+ 0.0``: a later key's 0 * value may have turned -0 into +0 or not; here every 0 becomes +0.
    """
    return tl.div_rn(acc_MD, tl.broadcast_to(total_M[:, None], acc_MD.shape)) + 0.0


@triton.jit
def _shrink(peak, split_peak):
    """Return the common maximum and the factors that bring both sides to it."""
    new_peak = tl.maximum(peak, split_peak)
    return new_peak, tl.exp2(peak - new_peak), tl.exp2(split_peak - new_peak)


@triton.jit(do_not_specialize=["rows"])
def merge_kernel(
    partial_CRHD,
    peak_total_CRH2,
    out_RHD,
    log_sum_RH,
    position_R,
    rows: tl.int32,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """Merge the splits of one row's heads in ascending order, as `attention_kernel` does in registers."""
    row = tl.program_id(0)
    head_H = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d_D = tl.arange(0, BLOCK_D)
    real_H = head_H < HEADS
    place_H = row.to(tl.int64) * HEADS + head_H
    inside_HD = real_H[:, None] & (d_D < HEAD_DIM)[None, :]
    splits = tl.load(position_R + row) // SPLIT + 1
    peak_H = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total_H = tl.zeros((BLOCK_H,), tl.float32)
    acc_HD = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    for split in range(0, splits):
        from_H = place_H + rows.to(tl.int64) * HEADS * split
        split_peak_H = tl.load(peak_total_CRH2 + from_H * 2, mask=real_H, other=0.0)
        split_total_H = tl.load(peak_total_CRH2 + from_H * 2 + 1, mask=real_H, other=1.0)
        split_acc_HD = tl.load(partial_CRHD + from_H[:, None] * HEAD_DIM + d_D[None, :], mask=inside_HD, other=0.0)
        peak_H, old_H, new_H = _shrink(peak_H, split_peak_H)
        total_H = total_H * old_H + split_total_H * new_H
        acc_HD = acc_HD * old_H[:, None] + split_acc_HD * new_H[:, None]
    out_HD = _finish(acc_HD, total_H)
    tl.store(out_RHD + place_H[:, None] * HEAD_DIM + d_D[None, :], out_HD.to(out_RHD.dtype.element_ty), mask=inside_HD)
    tl.store(log_sum_RH + place_H, peak_H + log(total_H) * _LOG2E, mask=real_H)
