"""Ambient state of torch that changes bits behind an op's back, and the guard that neutralises or refuses it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zerogap.errors import UsageError


@contextmanager
def guard() -> Iterator[None]:
    """Run the body without autocast, reduced-precision products or flush-to-zero, whatever the process has set.

    Raises:
        UsageError: another library has set the CPU to flush subnormal numbers to zero and it cannot be undone here.
    """
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast("cpu", enabled=False):
            _keep_subnormals()
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


def _keep_subnormals() -> None:
    if flushes_subnormals():
        torch.set_flush_denormal(False)
        if flushes_subnormals():
            raise UsageError(
                "this process flushes subnormal numbers to zero, which changes results; "
                "find the library that was built with -ffast-math and load it later or not at all"
            )


def flushes_subnormals() -> bool:
    """Whether this process's arithmetic turns subnormal results into 0."""
    return bool((torch.full((1,), 1e-38) * 0.01 == 0).item())
