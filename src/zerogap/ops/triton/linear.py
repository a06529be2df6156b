"""Linear layers on matrix instructions: one order of K for every number of rows.

K is walked in steps of ``block_k`` from its first element to its last and accumulated in float32; tiles of rows and
outputs differ between decode and prefill, the instruction and the order of K do not (``tiles.toml``). Rows past the
end and columns past K are zeros that were selected, never garbage that was multiplied by 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from zerogap.ops.portable.linear import segment_count
from zerogap.ops.triton.aot import KernelConfig
from zerogap.ops.triton.launch import aligned, launch
from zerogap.ops.triton.table import LinearTile, linear_tiles, note
from zerogap.ops.triton.targets import Target, detect

__all__ = ["linear", "product", "segment_count", "wide_product"]

_GROUP_M = 8  # tiles of rows that share a panel of the weight in the cache
_UNIT = 16  # widths in this unit let the compiler load 16 bytes at a time
_COMBINE = 512  # elements that a program of the second kernel adds up


def linear(x_RK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, segments: int = 1) -> Tensor:
    """Return ``x_RK @ weight_NK.T + bias_N`` with the row law kept.

    Args:
        x_RK: input rows [R, K], bfloat16, float16 or float32.
        weight_NK: weight [N, K] of the same dtype.
        bias_N: added in float32 after the segments are summed.
        segments: K is cut into this many equal parts (``segment_count``), whose float32 partial sums meet in a
            balanced tree, neighbours first.

    Returns:
        Rows [R, N], rounded once, in the dtype of ``x_RK``.
    """
    return _Linear.apply(x_RK, weight_NK, bias_N, segments)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, segments: int) -> Tensor:
        ctx.save_for_backward(x_RK, weight_NK)
        ctx.has_bias = bias_N is not None
        return product(x_RK, weight_NK, bias_N, segments)

    @staticmethod
    def backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x_RK, weight_NK = ctx.saved_tensors
        grad_x = grad_RN @ weight_NK if ctx.needs_input_grad[0] else None
        grad_weight = wide_product(grad_RN.T, x_RK) if ctx.needs_input_grad[1] else None
        grad_bias = None
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grad_bias = grad_RN.sum(0, dtype=torch.float32)
        return grad_x, grad_weight, grad_bias, None


def wide_product(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """Return ``a @ b`` in float32, the library's accumulators unrounded: gradients of weights, which add up."""
    if a_MK.is_cuda and a_MK.dtype != torch.float32:
        return torch.mm(a_MK, b_KN, out_dtype=torch.float32)
    return a_MK.float() @ b_KN.float()


def product(
    x_RK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    segments: int = 1,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return what `linear` does, without autograd, rounded to ``out_dtype`` (float32 keeps the accumulator's bits)."""
    if x_RK.dtype != weight_NK.dtype:
        raise ValueError(f"linear: rows are {x_RK.dtype}, the weight is {weight_NK.dtype}")
    (rows, in_features), out_features = x_RK.shape, len(weight_NK)
    if weight_NK.shape[1] != in_features or in_features % segments:
        raise ValueError(f"linear: rows of {in_features}, weight {tuple(weight_NK.shape)}, {segments} segments")
    target, dtype = detect(x_RK.device), str(x_RK.dtype).removeprefix("torch.")
    tiles = linear_tiles(target, dtype, out_features, segments)
    if missing := -(in_features // segments) % tiles.block_k:  # no real model: such rows are padded with zeros
        if segments > 1:
            raise ValueError(f"linear: segments of {in_features // segments} are no multiple of {tiles.block_k}")
        x_RK, weight_NK = pad(x_RK, (0, missing)), pad(weight_NK, (0, missing))
        in_features += missing
    note("linear", target, dtype, f"{out_features}x{in_features}/{segments}", tiles)
    out_RN = torch.empty(rows, out_features, dtype=out_dtype or x_RK.dtype, device=x_RK.device)
    if not rows:
        return out_RN
    tile = tiles.tile(rows)
    constexprs = _constexprs(tile, tiles.block_k, out_features, segments, bias_N is not None)
    sizes = (rows, out_features // constexprs["N_UNIT"], in_features // tiles.block_k)
    grid_mn = -(-rows // tile.block_m) * -(-out_features // tile.block_n)
    x_RK, weight_NK = aligned(x_RK), aligned(weight_NK)
    bias = out_RN if bias_N is None else aligned(bias_N)
    split = segments > 1 and tile.tree == "memory"
    goal = torch.empty(segments, rows, out_features, dtype=torch.float32, device=x_RK.device) if split else out_RN
    launch(
        linear_kernel, (grid_mn, segments if split else 1), (x_RK, weight_NK, bias, goal, *sizes), constexprs,
        target, tile.warps, tile.stages,
    )  # fmt: skip
    if split:
        launch(
            combine_kernel, (-(-rows * out_features // _COMBINE),), (goal, bias, out_RN, rows, out_features),
            {"SEGMENTS": segments, "HAS_BIAS": bias_N is not None, "BLOCK": _COMBINE}, target, 4, 1,
        )  # fmt: skip
    return out_RN


def _constexprs(tile: LinearTile, block_k: int, out_features: int, segments: int, has_bias: bool) -> dict[str, Any]:
    split = segments > 1 and tile.tree == "memory"
    return {
        "SEGMENTS": segments,
        "SPLIT": split,
        "HAS_BIAS": has_bias and not split,
        "N_UNIT": _UNIT if out_features % _UNIT == 0 else 1,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": block_k,
        "GROUP_M": _GROUP_M,
    }


@triton.jit
def _walk(x_ptrs, weight_ptrs, row_M, column_N, start, steps, BLOCK_K: tl.constexpr):
    """Sum ``steps`` blocks of K in ascending order from +0."""
    acc_MN = tl.zeros((row_M.shape[0], column_N.shape[0]), dtype=tl.float32)
    for step in range(start, start + steps):
        k_K = step * BLOCK_K + tl.arange(0, BLOCK_K)
        x_MK = tl.load(x_ptrs + k_K[None, :], mask=row_M[:, None], other=0.0)
        weight_KN = tl.load(weight_ptrs + k_K[:, None], mask=column_N[None, :], other=0.0)
        acc_MN = tl.dot(x_MK, weight_KN, acc_MN, input_precision="ieee")
    return acc_MN


@triton.jit(do_not_specialize=["rows", "out_units", "blocks"])
def linear_kernel(
    x_RK,
    weight_NK,
    bias_N,
    out,  # [R, N], or float32 [SEGMENTS, R, N] if SPLIT
    rows: tl.int32,
    out_units: tl.int32,
    blocks: tl.int32,  # of K
    SEGMENTS: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    N_UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
) -> None:
    """One tile of outputs; with SPLIT one segment of it."""
    out_features = out_units * N_UNIT
    in_features = blocks * BLOCK_K
    steps = blocks // SEGMENTS
    # Neighbouring programs share a panel of the weight.
    tiles_m = tl.cdiv(rows, BLOCK_M)
    per_group = GROUP_M * tl.cdiv(out_features, BLOCK_N)
    group = tl.program_id(0) // per_group
    group_m = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    tile_m = group * GROUP_M + (tl.program_id(0) % per_group) % group_m
    tile_n = (tl.program_id(0) % per_group) // group_m

    m_M = tl.arange(0, BLOCK_M)
    n_N = tl.arange(0, BLOCK_N)
    row_M = tile_m * BLOCK_M + m_M < rows
    column_N = tile_n * BLOCK_N + n_N < out_features
    x_ptrs = x_RK + (tile_m * BLOCK_M).to(tl.int64) * in_features + m_M[:, None] * in_features
    weight_ptrs = weight_NK + (tile_n * BLOCK_N).to(tl.int64) * in_features + n_N[None, :] * in_features
    out_ptrs = (
        out
        + (tile_m * BLOCK_M).to(tl.int64) * out_features
        + (m_M[:, None] * out_features + (tile_n * BLOCK_N + n_N)[None, :])
    )
    inside_MN = row_M[:, None] & column_N[None, :]

    if SPLIT:
        segment = tl.program_id(1)
        acc_MN = _walk(x_ptrs, weight_ptrs, row_M, column_N, segment * steps, steps, BLOCK_K)
        tl.store(out_ptrs + segment.to(tl.int64) * rows * out_features, acc_MN, mask=inside_MN)
    else:
        sum_MN = _walk(x_ptrs, weight_ptrs, row_M, column_N, 0, steps, BLOCK_K)
        if SEGMENTS > 1:
            # A balanced tree, neighbours first: a segment that completes a pair is added at once, so that at most one
            # pending sum of each size is held.
            one_MN, two_MN, four_MN = sum_MN, sum_MN, sum_MN
            for s in range(1, SEGMENTS):
                sum_MN = _walk(x_ptrs, weight_ptrs, row_M, column_N, s * steps, steps, BLOCK_K)
                if s % 2 == 0:
                    one_MN = sum_MN
                else:
                    sum_MN = one_MN + sum_MN
                    if s % 4 == 1:
                        two_MN = sum_MN
                    else:
                        sum_MN = two_MN + sum_MN
                        if s % 8 == 3:
                            four_MN = sum_MN
                        else:
                            sum_MN = four_MN + sum_MN
        if HAS_BIAS:
            bias = tl.load(bias_N + tile_n * BLOCK_N + n_N, mask=column_N, other=0.0)
            sum_MN += bias.to(tl.float32)[None, :]
        tl.store(out_ptrs, sum_MN.to(out.dtype.element_ty), mask=inside_MN)


@triton.jit(do_not_specialize=["rows", "out_features"])
def combine_kernel(
    partial_SRN,
    bias_N,
    out_RN,
    rows: tl.int32,
    out_features: tl.int32,
    SEGMENTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Add partial sums in the tree of `linear_kernel`, then the bias; round once."""
    total = rows.to(tl.int64) * out_features
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < total
    for s in tl.static_range(SEGMENTS):
        summed = tl.load(partial_SRN + s * total + place, mask=inside, other=0.0)
        if s % 2 == 0:
            one = summed
        else:
            summed = one + summed
            if s % 4 == 1:
                two = summed
            else:
                summed = two + summed
                if s % 8 == 3:
                    four = summed
                else:
                    summed = four + summed
    if HAS_BIAS:
        bias = tl.load(bias_N + place % out_features, mask=inside, other=0.0)
        summed += bias.to(tl.float32)
    tl.store(out_RN + place, summed.to(out_RN.dtype.element_ty), mask=inside)


# Weights [N, K] and their segments that builds are tried on: row-parallel, narrow, an LM head, an odd width.
_SHAPES = ((2560, 4096, 8), (1024, 2560, 1), (151936, 2560, 1), (70, 128, 1))
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def configs(target: Target) -> Iterator[KernelConfig]:
    """Yield every configuration that the table may choose on ``target``, once."""
    seen = set()
    for dtype, short in _SHORT.items():
        for out_features, in_features, segments in _SHAPES:
            tiles = linear_tiles(target, dtype, out_features, segments)
            for place, tile in enumerate(tiles.tiles):
                for has_bias in (False, True):
                    constexprs = _constexprs(tile, tiles.block_k, out_features, segments, has_bias)
                    goal = "fp32" if constexprs["SPLIT"] else short
                    key = (dtype, tile, *constexprs.values())
                    if key in seen:
                        continue
                    seen.add(key)
                    yield KernelConfig(
                        name=f"linear/{dtype}/{out_features}x{in_features}/{segments}/{tile.block_m}x{tile.block_n}"
                        + ("/bias" if has_bias else ""),
                        function=linear_kernel,
                        signature={
                            "x_RK": f"*{short}", "weight_NK": f"*{short}", "bias_N": f"*{short}", "out": f"*{goal}",
                            "rows": "i32", "out_units": "i32", "blocks": "i32",
                        },
                        constexprs=constexprs,
                        num_warps=tile.warps,
                        num_stages=tile.stages,
                        dtype=dtype,
                        op=f"linear {out_features}x{in_features}/{segments}",
                        role="decode" if place == 0 else "prefill",
                    )  # fmt: skip
        for has_bias in (False, True):
            yield KernelConfig(
                name=f"linear/{dtype}/combine" + ("/bias" if has_bias else ""),
                function=combine_kernel,
                signature={
                    "partial_SRN": "*fp32", "bias_N": f"*{short}", "out_RN": f"*{short}",
                    "rows": "i32", "out_features": "i32",
                },
                constexprs={"SEGMENTS": 8, "HAS_BIAS": has_bias, "BLOCK": _COMBINE},
                dtype=dtype,
                op="linear combine",
            )  # fmt: skip
