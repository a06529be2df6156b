"""The optimiser's two passes over a parameter, by the kernels: bits that no thread count changes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from zerogap.ops.native import calls as kernels


def sum_of_squares(values: Tensor) -> float:
    """Return the float64 sum of squares of a float32 tensor."""
    return kernels.sum_of_squares(values.detach().contiguous(), torch.get_num_threads())


def adamw_step(
    parameter: Tensor,
    gradient: Tensor,
    moments: tuple[Tensor, Tensor],
    step: int,
    learning_rate: float,
    betas: tuple[float, float],
    epsilon: float,
    weight_decay: float,
    gradient_scale: float,
) -> None:
    """Move a parameter by AdamW (arXiv 1711.05101), decoupled decay, in place.

    Args:
        parameter: float32, contiguous; its count of changes rises, since torch does not see the kernel write.
        gradient: of the same shape.
        moments: running means of the gradient and of its square, renewed in place.
        step: 1 for the first.
        learning_rate: of this step.
        betas: decays of the two means.
        epsilon: added to the root in the denominator.
        weight_decay: per unit of learning rate.
        gradient_scale: the gradient counts this much (clipping).
    """
    kernels.adamw_step(
        parameter.detach(), gradient.detach().contiguous(), *moments, step, learning_rate, *betas, epsilon,
        weight_decay, gradient_scale, torch.get_num_threads(),
    )  # fmt: skip
    increment_version(parameter)
