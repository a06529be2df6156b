"""Causal attention over paged keys and values: one kernel for decode, chunked prefill and packed training.

Keys are walked by absolute position in full blocks; splits of a fixed size are finished one by one and merged in
ascending order, in parallel where there are few tiles and in one program where there are many: the same operations
either way. Keys past the end of a sequence are zeros that were selected, so a freed page is never read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from zerogap.errors import UsageError
from zerogap.ops.plan import Chunk
from zerogap.ops.triton.aot import KernelConfig
from zerogap.ops.triton.attention_backward import backward
from zerogap.ops.triton.attention_kernels import attention_kernel, merge_kernel
from zerogap.ops.triton.elementwise import levels
from zerogap.ops.triton.launch import aligned, launch
from zerogap.ops.triton.plan import AttentionPlan
from zerogap.ops.triton.table import AttentionTile, attention_tile, note
from zerogap.ops.triton.targets import Target, detect

__all__ = ["AttentionPlan", "Chunk", "attention"]

_UNIT = 16
_PROGRAMS = 1024  # with fewer tiles than this, splits are walked in parallel: a matter of speed alone
_MERGED_HEADS = 4


def attention(q_RHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """Return softmax(q k^T * scale) v over each row's own earlier keys, [R, H, D] (arXiv 1706.03762, GQA arXiv
    2305.13245).

    Args:
        q_RHD: queries [R, H, D], D a multiple of 16 up to 256; head h reads key/value head h // (H / G).
        k_SGD: keys by slot [slots, G, D]; only slots that the plan names are read.
        v_SGD: values, likewise.
        plan: rows against slots.
        scale: factor on the scores, applied in float32.

    Raises:
        UsageError: there is no kernel for this head size and dtype.
    """
    return _Attention.apply(q_RHD, k_SGD, v_SGD, plan, scale)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_RHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        if not q_RHD.dtype == k_SGD.dtype == v_SGD.dtype:
            raise ValueError(f"attention: q is {q_RHD.dtype}, keys {k_SGD.dtype}, values {v_SGD.dtype}")
        out_RHD, log_sum_RH = _forward(q_RHD, k_SGD, v_SGD, plan, scale)
        ctx.save_for_backward(q_RHD, k_SGD, v_SGD, out_RHD, log_sum_RH)
        ctx.plan, ctx.scale = plan, scale
        return out_RHD

    @staticmethod
    def backward(ctx: Any, grad_RHD: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q_RHD, k_SGD, v_SGD, out_RHD, log_sum_RH = ctx.saved_tensors
        grads = backward(grad_RHD, q_RHD, k_SGD, v_SGD, out_RHD, log_sum_RH, ctx.plan, ctx.scale)
        return *grads, None, None


def _forward(q_RHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, plan: AttentionPlan, scale: float) -> tuple[Tensor, Tensor]:
    (rows, heads, width), groups = q_RHD.shape, k_SGD.shape[1]
    share = heads // groups
    target, dtype = detect(q_RHD.device), str(q_RHD.dtype).removeprefix("torch.")
    tile = attention_tile(target, dtype, width, share)
    note("attention", target, dtype, f"{heads}/{groups}x{width}", tile)
    plan, q_RHD = plan.on(q_RHD.device), aligned(q_RHD)
    k, v, slot_stride, group_stride = strided(k_SGD, v_SGD)
    out_RHD = torch.empty_like(q_RHD)
    log_sum_RH = torch.empty(rows, heads, dtype=torch.float32, device=q_RHD.device)
    if not rows:
        return out_RHD, log_sum_RH
    tiles_T4 = plan.tiles(tile.query_rows(share))
    splits = -(-plan.longest // tile.split)
    parallel = splits > 1 and len(tiles_T4) * groups < _PROGRAMS
    goal, sums = out_RHD, log_sum_RH
    if parallel:
        goal = torch.empty(splits, rows, heads, width, dtype=torch.float32, device=q_RHD.device)
        sums = torch.empty(splits, rows, heads, 2, dtype=torch.float32, device=q_RHD.device)
    held = log_sum_RH if parallel or splits == 1 else torch.empty_like(q_RHD, dtype=torch.float32)
    arguments = (
        q_RHD, k, v, goal, held, sums, tiles_T4, plan.table_SP, plan.length_S,
        scale * math.log2(math.e), slot_stride // _UNIT, group_stride // _UNIT, plan.table_SP.shape[1], rows,
    )  # fmt: skip
    constexprs = {"SPLIT_GRID": parallel, **_constexprs(tile, groups, share, width, plan.page_size)}
    grid = (len(tiles_T4), groups, splits if parallel else 1)
    launch(attention_kernel, grid, arguments, constexprs, target, tile.warps, tile.stages)
    if parallel:
        launch(
            merge_kernel, (rows, -(-heads // _MERGED_HEADS)),
            (goal, sums, out_RHD, log_sum_RH, plan.positions_R, rows), _merge_constexprs(heads, width, tile),
            target, 4, 1,
        )  # fmt: skip
    return out_RHD, log_sum_RH


def strided(k_SGD: Tensor, v_SGD: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """Return keys, values and their common strides in elements, copied only if a kernel could not read them."""

    def readable(x: Tensor) -> bool:
        regular = x.stride(2) == 1 and x.stride(0) % _UNIT == 0 and x.stride(1) % _UNIT == 0
        return regular and x.data_ptr() % 16 == 0

    if k_SGD.stride() != v_SGD.stride() or not (readable(k_SGD) and readable(v_SGD)):
        k_SGD, v_SGD = aligned(k_SGD), aligned(v_SGD)
    if len(k_SGD) * k_SGD.stride(0) >= 1 << 31:  # offsets are 32-bit: half the registers of pointers
        raise UsageError(f"attention: {len(k_SGD)} slots are too many for one layer's cache; use fewer pages")
    return k_SGD, v_SGD, k_SGD.stride(0), k_SGD.stride(1)


def _constexprs(tile: AttentionTile, groups: int, share: int, width: int, page_size: int) -> dict[str, Any]:
    return {
        "GROUPS": groups,
        "SHARE": share,
        "HEAD_DIM": width,
        "PAGE_SIZE": page_size,
        "BLOCK_M": tile.block_m,
        "BLOCK_D": padded_width(width),
        "KEY_BLOCK": tile.key_block,
        "LEVELS": levels(tile.key_block),
        "SPLIT": tile.split,
    }


def padded_width(width: int) -> int:
    """Return the power of two that a head is padded to, with zeros."""
    return 1 << (width - 1).bit_length()


def _merge_constexprs(heads: int, width: int, tile: AttentionTile) -> dict[str, Any]:
    return {
        "HEADS": heads, "HEAD_DIM": width, "BLOCK_H": _MERGED_HEADS, "BLOCK_D": padded_width(width),
        "SPLIT": tile.split,
    }  # fmt: skip


_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
# Head size and heads per group that builds are tried on: SmolLM2, Phi, Phi-3, Qwen3 and Llama 3, Gemma.
_SHAPES = ((64, 3), (80, 1), (96, 1), (128, 4), (256, 4))

# Any role may walk splits in parallel or one after the other; these are the four programs that come of it.
_ROLES = (("decode", True, 16), ("prefill", False, 16), ("training", False, 1), ("training", True, 1))


def configs(target: Target) -> Iterator[KernelConfig]:
    """Yield decode, prefill and training variants for each head size."""
    for dtype, short in _SHORT.items():
        for width, share in _SHAPES:
            tile = attention_tile(target, dtype, width, share)
            for role, split_grid, page_size in _ROLES:
                goal = "fp32" if split_grid else short
                yield KernelConfig(
                    name=f"attention/{dtype}/{width}x{share}/{role}" + ("/split" if split_grid else ""),
                    function=attention_kernel,
                    signature={
                        "q_RHD": f"*{short}", "k": f"*{short}", "v": f"*{short}", "out_RHD": f"*{goal}",
                        "held_RHD": "*fp32", "log_sum_RH": "*fp32", "tiles_T4": "*i32", "table_SP": "*i32",
                        "length_S": "*i32",
                        "scale": "fp32", "slot_units": "i32", "group_units": "i64", "table_width": "i32",
                        "rows": "i32",
                    },
                    constexprs={"SPLIT_GRID": split_grid, **_constexprs(tile, 8, share, width, page_size)},
                    num_warps=tile.warps,
                    num_stages=tile.stages,
                    dtype=dtype,
                    op=f"attention {width}x{share}",
                    role=role,
                )  # fmt: skip
            yield KernelConfig(
                name=f"attention/{dtype}/{width}x{share}/merge",
                function=merge_kernel,
                signature={
                    "partial_CRHD": "*fp32", "peak_total_CRH2": "*fp32", "out_RHD": f"*{short}", "log_sum_RH": "*fp32",
                    "position_R": "*i32", "rows": "i32",
                },
                constexprs=_merge_constexprs(8 * share, width, tile),
                dtype=dtype,
                op=f"attention merge {width}x{share}",
            )  # fmt: skip
