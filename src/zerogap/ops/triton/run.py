"""Runs a kernel exactly as its ``KernelConfig`` says and the ahead-of-time tests build it."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from zerogap.ops.triton import dry
from zerogap.ops.triton.aot import KernelConfig, compile_options
from zerogap.ops.triton.targets import Target, detect

SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}  # as Triton's signatures write them
DTYPES = tuple(SHORT)


def run(config: KernelConfig, grid: tuple[int, ...], *arguments: Any) -> None:
    """Run ``grid`` programs of a kernel.

    Args:
        config: kernel, constants and compiler switches.
        grid: programs along each axis; an empty one runs nothing.
        arguments: those that are no constants, in the kernel's order; the first tensor says the device.
    """
    if 0 in grid:
        return
    if (noted := dry.notes()) is not None:
        noted.add(config.function, arguments, {**config.constexprs, **compile_options(config, noted.target)})
        return
    device = next(argument.device for argument in arguments if isinstance(argument, Tensor))
    target = _target(device)
    if device.type == "cpu":
        config.function[grid](*arguments, **config.constexprs)
        return
    with torch.cuda.device(device):  # Triton launches on the current device
        config.function[grid](*arguments, **config.constexprs, **compile_options(config, target))


@cache
def _target(device: torch.device) -> Target:
    return detect(device)


def row_config(
    function: Any,
    name: str,
    dtype: torch.dtype,
    pointers: str,
    numbers: str,
    constexprs: dict[str, Any],
    warps: int = 4,
) -> KernelConfig:
    """Return the configuration of a kernel on rows.

    Args:
        function: the kernel.
        name: of the op.
        dtype: of its rows.
        pointers: pointer arguments in words; one with a type, as ``scale_ptr:fp32``, has that one, else the rows'.
        numbers: the other arguments, as ``rows:i32``.
        constexprs: constant arguments.
        warps: of a program.
    """
    signature = {}
    for word in pointers.split():
        argument, _, kind = word.partition(":")
        signature[argument] = f"*{kind or SHORT[dtype]}"
    for word in numbers.split():
        argument, _, kind = word.partition(":")
        signature[argument] = kind
    plain = str(dtype).removeprefix("torch.")
    sizes = "-".join(f"{key.lower()}{value:d}" for key, value in constexprs.items())
    return KernelConfig(
        name=f"{name}/{plain}/{sizes}",
        function=function,
        signature=signature,
        constexprs=constexprs,
        num_warps=warps,
        dtype=plain,
        op=name,
    )


def warps_for(elements: int) -> int:
    """Return the warps of a program that holds ``elements`` at a time; no bit depends on it."""
    return 4 if elements <= 4096 else 8 if elements <= 8192 else 16
