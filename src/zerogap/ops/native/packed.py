"""Packed copies of weights: made when first used, renewed when the weight has changed, shared by all who use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerogap.ops.native import calls as kernels
from zerogap.ops.rounding import is_rounded

_ATTRIBUTE = "_zerogap_packed"
_TABLE = "_zerogap_table"


def packed(weight_NK: Tensor, segments: int = 1) -> Any:
    """Return the packed copy of a weight [N, K], in the layout that the kernels read.

    The copy hangs on the tensor object. torch counts in-place changes of a tensor; a copy of another count is renewed
    in place, so that everyone who holds it sees the new values.

    Args:
        weight_NK: float32 or bfloat16, elements of a row side by side; a float32 one that is marked to be rounded
            (``zerogap.ops.rounding``) is packed as bfloat16.
        segments: equal parts of K whose sums meet in a tree.
    """
    held, state = getattr(weight_NK, _ATTRIBUTE, None), _state(weight_NK)
    rounded = is_rounded(weight_NK)
    if held is not None and held.rounded == rounded and held.copy.segments == segments:
        if held.state is not None and held.state == state:
            return held.copy
        kernels.call(held.copy.repack, computed_with(weight_NK), torch.get_num_threads())
        copy = held.copy
    else:
        copy = kernels.pack(computed_with(weight_NK), segments, torch.get_num_threads())
    setattr(weight_NK, _ATTRIBUTE, _Held(copy, state, rounded))
    return copy


def table(weight_VK: Tensor) -> Tensor:
    """Return the rows of an embedding as the kernels read them: the weight itself, or its values in bfloat16.

    Those are held and renewed as packed copies are.
    """
    if not is_rounded(weight_VK):
        return plain(weight_VK)
    held, state = getattr(weight_VK, _TABLE, None), _state(weight_VK)
    if held is not None and held.state is not None and held.state == state:
        return held.copy
    with torch.inference_mode(False), torch.no_grad():
        if held is None:
            copy = torch.empty_like(weight_VK, dtype=torch.bfloat16, requires_grad=False)
        else:
            copy = held.copy
        copy.copy_(weight_VK.detach())
    setattr(weight_VK, _TABLE, _Held(copy, state, True))
    return copy


def computed_with(weight: Tensor) -> Tensor:
    """Return the values of a weight that ops compute with: float32, or bfloat16 if they are rounded."""
    weight_ = plain(weight)
    return weight_.bfloat16() if is_rounded(weight) else weight_


@dataclass(frozen=True)
class _Held:
    """A copy of a weight, and what the weight was like when it was made; a state of None is never current."""

    copy: Any
    state: tuple[int, int] | None
    rounded: bool

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a tensor that is copied or stored goes without


def _state(weight: Tensor) -> tuple[int, int] | None:
    return None if weight.is_inference() else (weight._version, weight.data_ptr())


def stale_copies(weights: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the weights whose packed copy does not hold them, in their order.

    Copies are renewed first where torch's count says so. What is found then was changed behind torch's back: a write
    that it does not count, or broken memory.

    Args:
        weights: by name, as the ops get them (the attribute of a ``state_dict`` entry is not that of its parameter).
    """
    found = []
    for name, weight in weights.items():
        held, values, same = getattr(weight, _ATTRIBUTE, None), computed_with(weight), True
        if held is not None:
            same = kernels.call(packed(weight, held.copy.segments).matches, values, torch.get_num_threads())
        if hasattr(weight, _TABLE) and is_rounded(weight):
            same = same and torch.equal(table(weight).view(torch.int16), values.view(torch.int16))
        if not same:
            found.append(name)
    return found


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
