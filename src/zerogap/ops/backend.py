"""Which backend computes: chosen once per process, the same for engine and trainer, and part of every record.

On a GPU the Triton kernels serve. On the CPU the native kernels (package ``zerogap-kernels``) do if they are installed,
else the portable ops. Tensors in float64 always go to the portable ops: they are the oracle; so do bfloat16 and float16
on the CPU, since the native kernels take rows in float32.
``ZEROGAP_BACKEND=native|portable`` forces one for the CPU, and ``triton`` where Triton's interpreter is on (for tests).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from zerogap.errors import UsageError, nearest
from zerogap.numerics import kernels_missing
from zerogap.ops import record
from zerogap.ops.record import Symbol

CPU_BACKENDS = ("native", "portable")
_INTERPRETED = "triton"
_chosen: str | None = None


def cpu_backend() -> str:
    """Return the name of the backend for CPU tensors.

    Raises:
        UsageError: ``ZEROGAP_BACKEND`` names none, or one that is not here.
    """
    global _chosen
    if _chosen is None:
        asked = os.environ.get("ZEROGAP_BACKEND", "").strip()
        _chosen = _checked(asked, "ZEROGAP_BACKEND") if asked else "portable" if native_missing() else "native"
    return _chosen


@contextmanager
def using(name: str) -> Iterator[None]:
    """Let another backend serve CPU tensors within the body.

    Raises:
        UsageError: it is unknown or not here.
    """
    global _chosen
    before = cpu_backend()
    _chosen = _checked(name, "backend")
    try:
        yield
    finally:
        _chosen = before


@contextmanager
def noting_kernels() -> Iterator[None]:
    """Let the Triton backend take CPU tensors within the body, where launches are noted and not run."""
    global _chosen
    before, _chosen = _chosen, _INTERPRETED
    try:
        yield
    finally:
        _chosen = before


def choose(name: str, where: str) -> None:
    """Choose the backend for CPU tensors from now on.

    Args:
        name: ``native``, ``portable``, or ``auto`` for the default.
        where: the setting that asks for it, for the error's text.

    Raises:
        UsageError: it is unknown or not here.
    """
    global _chosen
    _chosen = None if name == "auto" else _checked(name, where)


def native_missing() -> str | None:
    """Return why the native kernels cannot serve here, or None if they can."""
    return kernels_missing()


def cpu_path() -> str:
    """Return which instruction set the native kernels use: avx512, avx2 or generic, all with the same bits."""
    return str(importlib.import_module("zerogap_kernels").path())


def cpu_paths() -> tuple[str, ...]:
    """Return the instruction sets that the native kernels can use on this machine, best first."""
    return tuple(importlib.import_module("zerogap_kernels").paths_here())


@contextmanager
def on_cpu_path(name: str) -> Iterator[None]:
    """Let the native kernels use another instruction set within the body."""
    kernels = importlib.import_module("zerogap_kernels")
    before = kernels.path()
    kernels.choose_path(name)
    try:
        yield
    finally:
        kernels.choose_path(before)


def describe(dtype: torch.dtype = torch.float32) -> str:
    """Return the CPU backend for rows of a type in words, with the reason where the native one does not serve."""
    if cpu_backend() == "native":
        if name_of(dtype) == "portable":
            return f"portable (rows in {str(dtype).removeprefix('torch.')})"
        return f"native ({cpu_path()})"
    missing = native_missing()
    return f"portable ({missing})" if missing else "portable"


def native_serves(x: Tensor) -> bool:
    """Return whether the native kernels compute with a CPU tensor."""
    return x.dtype == torch.float32 and x.is_contiguous() and cpu_backend() == "native"


def of(x: Tensor | Symbol) -> ModuleType:
    """Return the backend that computes with ``x``; for a symbol, what notes ops down."""
    return record if isinstance(x, Symbol) else on(x.device, x.dtype)


def on(device: torch.device, dtype: torch.dtype) -> ModuleType:
    """Return the backend that computes with tensors of a type on a device."""
    return _module("triton") if device.type == "cuda" and dtype != torch.float64 else of_dtype(dtype)


def of_dtype(dtype: torch.dtype) -> ModuleType:
    """Return the backend that computes with CPU tensors of a type."""
    return _module(name_of(dtype))


def of_host() -> ModuleType:
    """Return the backend for numbers that the host makes, whatever computes with them."""
    return _module("native" if cpu_backend() == "native" else "portable")


def name_of(dtype: torch.dtype) -> str:
    """Return the name of the backend for CPU tensors of a type."""
    chosen = cpu_backend()
    narrow = chosen == "native" and dtype in (torch.bfloat16, torch.float16)
    return "portable" if narrow or dtype == torch.float64 else chosen


@cache
def _module(name: str) -> ModuleType:
    return importlib.import_module(f"zerogap.ops.{name}")


def name_on(device: torch.device, dtype: torch.dtype = torch.float32) -> str:
    """Return what records call the backend of a device: ``gpu-triton``, ``cpu-native`` or ``cpu-portable``."""
    return "gpu-triton" if device.type == "cuda" else f"cpu-{name_of(dtype)}"


def _checked(name: str, where: str) -> str:
    if name == _INTERPRETED and os.environ.get("TRITON_INTERPRET") == "1":
        return name
    if name not in CPU_BACKENDS:
        raise UsageError(f"{where}: {name!r} is none of {', '.join(CPU_BACKENDS)}{nearest(name, CPU_BACKENDS)}")
    missing = native_missing() if name == "native" else None
    if missing:
        raise UsageError(f"{where}: native: {missing}; pip install ./kernels, or use portable")
    return name
