"""How tensors reach the kernels: as DLPack capsules, which torch makes in one call without Python code in between.

Given tensors themselves, the binding would call their ``__dlpack__``. Ctrl-C may arrive in that Python code, and the
binding takes any exception of it for a refusal, drops it and asks in another way: the interrupt would be lost.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

import zerogap_kernels

_POOLED_FLOATS = 1 << 16  # smaller tensors are the system allocator's


def empty(*shape: int) -> Tensor:
    """Return a float32 tensor with any contents, a large one in memory that is kept for the next of its size."""
    if prod(shape) < _POOLED_FLOATS:
        return torch.empty(shape)
    return from_dlpack(zerogap_kernels.empty(list(shape)))


def call(function: Callable[..., Any], *values: Any, **named: Any) -> Any:
    """Call a function of ``zerogap_kernels`` with tensors, lists of them, and other values."""
    return function(*map(_handed, values), **{name: _handed(value) for name, value in named.items()})


def _handed(value: Any) -> Any:
    if isinstance(value, Tensor):
        return to_dlpack(value)
    return [_handed(each) for each in value] if isinstance(value, list) else value


@cache
def _function(name: str) -> Callable[..., Any]:
    return lambda *values, **named: call(getattr(zerogap_kernels, name), *values, **named)


def __getattr__(name: str) -> Any:
    """Return a function of ``zerogap_kernels`` that takes tensors; its types as they are."""
    if name.startswith("_"):
        raise AttributeError(name)
    return getattr(zerogap_kernels, name) if name[0].isupper() else _function(name)
