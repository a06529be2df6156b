"""Ambient state of torch that changes bits behind an op's back, and the guard that neutralises or refuses it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from zerogap.errors import UsageError

# Elements that the library hands to one thread at least (ATen's grain size).
_GRAIN = 32768


@contextmanager
def guard() -> Iterator[None]:
    """Run the body without autocast, reduced-precision products or flush-to-zero, whatever the process has set.

    Raises:
        UsageError: another library has set the CPU to flush subnormal numbers to zero and it cannot be undone here.
    """
    # The per-operation setting: the older getter raises where a process has used both.
    kinds = (torch.backends.mkldnn.matmul, torch.backends.cuda.matmul)  # type: ignore[attr-defined]
    precisions = [products.fp32_precision for products in kinds]
    for products in kinds:
        products.fp32_precision = "ieee"
    try:
        with torch.autocast("cpu", enabled=False), _no_gpu_autocast():
            if flushes_subnormals():
                torch.set_flush_denormal(False)
                require_subnormals()
            yield
    finally:
        for products, precision in zip(kinds, precisions, strict=True):
            products.fp32_precision = precision


def _no_gpu_autocast() -> AbstractContextManager[object]:
    """Switch autocast off for the GPU as well; without one, asking for it would only warn."""
    return torch.autocast("cuda", enabled=False) if torch.cuda.is_available() else nullcontext()


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
    return not bool((torch.full((elements,), 1.5e-38, dtype=torch.float32) * 0.5).view(torch.int32).all())
