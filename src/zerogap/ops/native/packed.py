"""Packed copies of weights: made when first used, renewed when the weight has changed, shared by all who use it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import zerogap_kernels as kernels

_ATTRIBUTE = "_zerogap_packed"


def packed(weight_NK: Tensor, segments: int = 1) -> Any:
    """Return the packed copy of a weight [N, K], in the layout that the kernels read.

    The copy hangs on the tensor object. torch counts in-place changes of a tensor; a copy of another count is renewed
    in place, so that everyone who holds it sees the new values.

    Args:
        weight_NK: float32 or bfloat16, elements of a row side by side.
        segments: equal parts of K whose sums meet in a tree.
    """
    version = None if weight_NK.is_inference() else weight_NK._version
    held = getattr(weight_NK, _ATTRIBUTE, None)
    if held is not None and held[0].segments == segments:
        copy, at, where = held
        if version is not None and at == version and where == weight_NK.data_ptr():
            return copy
        copy.repack(plain(weight_NK), torch.get_num_threads())
    else:
        copy = kernels.pack(plain(weight_NK), segments, torch.get_num_threads())
    setattr(weight_NK, _ATTRIBUTE, (copy, version, weight_NK.data_ptr()))
    return copy


def stale_copies(weights: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the weights whose packed copy does not hold them, in their order.

    Copies are renewed first where torch's count says so. What is found then was changed behind torch's back: a write
    that it does not count, or broken memory.

    Args:
        weights: by name, as the ops get them (the attribute of a ``state_dict`` entry is not that of its parameter).
    """
    found = []
    for name, weight in weights.items():
        held = getattr(weight, _ATTRIBUTE, None)
        if held is None:
            continue
        if not packed(weight, held[0].segments).matches(plain(weight), torch.get_num_threads()):
            found.append(name)
    return found


def plain(x: Tensor) -> Tensor:
    """Return the tensor as the kernels take it: without gradient, elements of a row side by side."""
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
