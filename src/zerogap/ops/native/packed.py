"""Packed copies of weights: made when first used, renewed when the weight has changed, shared by all who use it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import zerogap_kernels as kernels

_ATTRIBUTE = "_zerogap_packed"


class _Held(NamedTuple):
    copy: Any
    version: int | None
    place: int

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a tensor that is copied or stored goes without


def packed(weight_NK: Tensor, segments: int = 1) -> Any:
    """Return the packed copy of a weight [N, K], in the layout that the kernels read.

    The copy hangs on the tensor object. torch counts in-place changes of a tensor; a copy of another count is renewed
    in place, so that everyone who holds it sees the new values.

    Args:
        weight_NK: float32 or bfloat16, elements of a row side by side.
        segments: equal parts of K whose sums meet in a tree.
    """
    version = None if weight_NK.is_inference() else weight_NK._version
    held: _Held | None = getattr(weight_NK, _ATTRIBUTE, None)
    if held is not None and held.copy.segments == segments:
        copy = held.copy
        if version is not None and held.version == version and held.place == weight_NK.data_ptr():
            return copy
        copy.repack(plain(weight_NK), torch.get_num_threads())
    else:
        copy = kernels.pack(plain(weight_NK), segments, torch.get_num_threads())
    setattr(weight_NK, _ATTRIBUTE, _Held(copy, version, weight_NK.data_ptr()))
    return copy


def plain(x: Tensor) -> Tensor:
    """Return the tensor as the kernels take it: without gradient, elements of a row side by side.

    Raises:
        ValueError: it is not in the CPU's memory.
    """
    if not x.is_cpu:
        raise ValueError(f"tensor {list(x.shape)} is on {x.device}: the native kernels take tensors of the CPU")
    x = x.detach()
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def rows(x: Tensor) -> Tensor:
    """Return a tensor of two dimensions as `plain` does, rows not overlapping (an expanded tensor is copied)."""
    x = plain(x)
    return x if x.shape[0] < 2 or x.stride(0) >= x.shape[1] else x.contiguous()


def heads(x_RHD: Tensor) -> Tensor:
    """Return heads as the kernels take them: elements of a row side by side, rows not overlapping."""
    x = plain(x_RHD)
    whole = x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2])
    return x if whole and (len(x) < 2 or x.stride(0) >= x.shape[1] * x.shape[2]) else x.contiguous()
