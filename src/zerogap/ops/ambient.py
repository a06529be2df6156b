"""Ambient state of torch that changes bits behind an op's back, and the guard that neutralises or refuses it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from zerogap.errors import UsageError

# Elements that the library hands to one thread at least (ATen's grain size).
_GRAIN = 32768

_SMALLEST, _HALF = sys.float_info.min, 0.5  # names: a constant product would be computed when this file is compiled


@contextmanager
def guard() -> Iterator[None]:
    """Run the body without autocast, reduced-precision products or flush-to-zero, whatever the process has set.

    Raises:
        UsageError: another library has set the CPU to flush subnormal numbers to zero and it cannot be undone here.
    """
    # The per-operation setting: the older getter raises where a process has used both.
    kinds = (torch.backends.mkldnn.matmul, torch.backends.cuda.matmul)  # type: ignore[attr-defined]
    set_otherwise = [(products, found) for products in kinds if (found := products.fp32_precision) != "ieee"]
    for products, _ in set_otherwise:
        products.fp32_precision = "ieee"
    try:
        with _no_autocast():
            if flushes_subnormals():
                torch.set_flush_denormal(False)
                require_subnormals()
            yield
    finally:
        for products, precision in set_otherwise:
            products.fp32_precision = precision


@contextmanager
def _no_autocast() -> Iterator[None]:
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def require_subnormals() -> None:
    """Refuse a process of which any thread turns subnormal numbers into 0.

    The mode belongs to each thread, and a worker inherits it when it begins: once a library has switched it on, it
    can be switched off for the calling thread only.

    Raises:
        UsageError: some thread does.
    """
    if flushes_subnormals(torch.get_num_threads() * _GRAIN):
        raise UsageError(
            "this process flushes subnormal numbers to zero, at least in its worker threads, which changes results; "
            "find the library that was built with -ffast-math and load it later or not at all"
        )


def flushes_subnormals(elements: int = 1) -> bool:
    """Whether this process's arithmetic turns subnormal results into 0, in as many threads as share ``elements``."""
    if elements == 1:
        return _SMALLEST * _HALF == 0.0  # the calling thread's mode is Python's too
    return not bool((torch.full((elements,), 1.5e-38, dtype=torch.float32) * 0.5).view(torch.int32).all())
