"""What the kernel tests share: the device (a GPU, or the CPU under the interpreter), bits, and rows in company."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
RowOp = Callable[[Tensor], Tensor]


def bits(x: Tensor) -> Tensor:
    """Return the words of a tensor, on the CPU."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.detach().contiguous().cpu().view(integer)


def same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same bits."""
    return one.shape == other.shape and torch.equal(bits(one), bits(other))


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers from a normal distribution on the device."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def row_law_holds(run: RowOp, pool: Tensor, counts: tuple[int, ...] = (2, 5)) -> bool:
    """Return whether rows have alone the bits they have among others: reversed, among NaN, among extreme values."""
    alone = [run(pool[row : row + 1])[0] for row in range(len(pool))]
    for count in counts:
        first = pool[:count]
        calls = [(first, range(count)), (first.flip(0), range(count - 1, -1, -1))]
        for value in (torch.nan, 1e30):
            lonely = torch.full_like(first, value)
            lonely[count // 2] = pool[0]
            calls.append((lonely, [0 if place == count // 2 else None for place in range(count)]))
        for call, originals in calls:
            out = run(call)
            for place, original in enumerate(originals):
                if original is not None and not same(out[place], alone[original]):
                    return False
    return True


def gradients(run: Callable[..., Tensor | tuple[Tensor, ...]], *inputs: Tensor) -> list[Tensor]:
    """Return the gradients of inputs for one fixed upstream gradient."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = run(*leaves)
    outs = out if isinstance(out, tuple) else (out,)
    upstream = [normal(*x.shape, seed=3).to(x.dtype) for x in outs]
    return list(torch.autograd.grad(outs, leaves, upstream))


def relative_error(ours: Tensor, exact: Tensor) -> float:
    """Return the largest difference relative to the largest exact value."""
    exact = exact.detach().cpu().double()
    return float((ours.detach().cpu().double() - exact).abs().max() / exact.abs().max().clamp(min=1e-30))
