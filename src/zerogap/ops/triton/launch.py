"""Launching a kernel as it is built ahead of time: the same constants, switches and alignment, whatever the batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from zerogap.ops.triton import dry
from zerogap.ops.triton.targets import Target, pinned

_ALIGNMENT = 16


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: Sequence[Any],
    constexprs: dict[str, Any],
    target: Target,
    warps: int,
    stages: int,
) -> None:
    """Run ``kernel`` over ``grid`` on the device of its first tensor."""
    options = {} if target.backend == "interpreter" else {"num_warps": warps, "num_stages": stages, **_switches(target)}
    if (noted := dry.notes()) is not None:
        noted.add(kernel, arguments, {**constexprs, **options})
        return
    device = next(argument.device for argument in arguments if isinstance(argument, Tensor))
    if device.type == "cpu":
        kernel[grid](*arguments, **constexprs, **options)
        return
    with torch.cuda.device(device):  # Triton launches on the current device
        kernel[grid](*arguments, **constexprs, **options)


def aligned(x: Tensor) -> Tensor:
    """Return ``x`` contiguous from a 16-byte address: else Triton would compile another kernel for it."""
    x = x.contiguous()
    return x if x.data_ptr() % _ALIGNMENT == 0 else x.clone()


@cache
def _switches(target: Target) -> dict[str, Any]:
    return pinned(target)
