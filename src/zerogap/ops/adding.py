"""Gradients of weights that add up in place, from one micro-batch to the next.

What an op returns as the gradient of a weight autograd keeps until every use of the weight has given its own (for tied
embeddings that is the whole backward), and adds it to ``.grad`` in a pass of its own. Within `adding_gradients` an op
adds to the ``.grad`` that is there and returns nothing, as Megatron-LM does under the name of gradient accumulation
fusion: less memory at the peak, and one pass less over every weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_adding = ContextVar("_adding", default=False)


@contextmanager
def adding_gradients() -> Iterator[None]:
    """Let the backwards that run in this block, in this thread, add to ``.grad``; for ``backward()`` alone.

    ``torch.autograd.grad`` would miss what went to ``.grad``, and hooks of the weights do not see it.
    """
    token = _adding.set(True)
    try:
        yield
    finally:
        _adding.reset(token)


def sum_so_far(weight: Tensor) -> Tensor | None:
    """Return the float32 gradient that this backward's is to be added to in place, or None if it is to be returned."""
    if not (_adding.get() and weight.is_leaf and weight.requires_grad):
        return None
    grad = weight.grad
    fits = grad is not None and grad.dtype == torch.float32 and grad.shape == weight.shape and grad.is_contiguous()
    return grad if fits else None
