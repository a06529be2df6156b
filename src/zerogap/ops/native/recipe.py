"""What a linear layer's backward computes again instead of keeping: outputs of cheap ops whose inputs are kept anyway.

The input of a linear layer is mostly a norm's or a gated activation's output; the op before it keeps its own inputs for
its own backward. Computing the output again from them costs little, gives the same bits, and spares the memory of one
activation in three.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

_ATTRIBUTE = "_zerogap_recipe"


@dataclass(frozen=True)
class Recipe:
    """How to get a tensor again.

    Attributes:
        compute: gives it from the inputs, without autograd.
        inputs: without autograd.
    """

    compute: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]


def noted(y: Tensor, compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return ``y``, with the note that ``compute(*inputs)`` gives it again, where a backward may want it."""
    if y.requires_grad:
        setattr(y, _ATTRIBUTE, Recipe(compute, tuple(x.detach() for x in inputs)))
    return y


def recipe_of(x: Tensor) -> Recipe:
    """Return how to get ``x`` again: by its note, else by keeping it."""
    return getattr(x, _ATTRIBUTE, None) or Recipe(_same, (x,))


def _same(x: Tensor) -> Tensor:
    return x
