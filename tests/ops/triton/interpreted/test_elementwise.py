"""exp, log, sigmoid, rounding and tree sums in kernels: the portable backend's bits under the interpreter."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.ops.triton.interpreted.laws import DEVICE, INTERPRETED, bits, normal, relative_error, same
from zerogap.ops.portable import elementwise as portable
from zerogap.ops.triton import elementwise
from zerogap.ops.triton.run import row_config, run

_COUNT = 1024


@triton.jit
def exp_kernel(x_ptr, out_ptr, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    tl.store(out_ptr + place, elementwise.exp(tl.load(x_ptr + place)))


@triton.jit
def log_kernel(x_ptr, out_ptr, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    tl.store(out_ptr + place, elementwise.log(tl.load(x_ptr + place)))


@triton.jit
def sigmoid_kernel(x_ptr, out_ptr, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    tl.store(out_ptr + place, elementwise.sigmoid(tl.load(x_ptr + place)))


@triton.jit
def rounded_kernel(x_ptr, out_ptr, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    tl.store(out_ptr + place, elementwise.rounded(tl.load(x_ptr + place), tl.bfloat16))


@triton.jit
def tree_kernel(x_ptr, out_ptr, COUNT: tl.constexpr, LEVELS: tl.constexpr):
    place = tl.arange(0, COUNT)
    x = tl.reshape(tl.load(x_ptr + place), [COUNT >> LEVELS, 1 << LEVELS])
    tl.store(out_ptr + tl.arange(0, COUNT >> LEVELS), elementwise.tree_sum(x, LEVELS))


def _apply(kernel: object, x: Tensor, warps: int = 4, **constexprs: int) -> Tensor:
    out = torch.empty_like(x)
    config = row_config(kernel, "test", torch.float32, "x_ptr out_ptr", "", {"COUNT": _COUNT, **constexprs}, warps)
    run(config, (1,), x, out)
    return out


def _values() -> Tensor:
    edges = torch.tensor([0.0, -0.0, 87.0, -87.0, -87.5, 200.0, -200.0, torch.inf, -torch.inf, 1e-40], device=DEVICE)
    return torch.cat((normal(500), 30 * normal(_COUNT - 500 - len(edges)), edges))


@pytest.mark.parametrize(
    ("kernel", "reference", "exact"),
    [
        (exp_kernel, portable.exp, torch.exp),
        (sigmoid_kernel, portable.sigmoid, torch.sigmoid),
        (log_kernel, lambda x: portable.log(x), torch.log),
    ],
    ids=["exp", "sigmoid", "log"],
)
def test_values(kernel: object, reference: object, exact: object) -> None:
    x = _values()
    x = x.abs() if kernel is log_kernel else x
    out = _apply(kernel, x)
    if INTERPRETED:
        assert same(out, reference(x))
    inside = (x.abs() < 87) & (x.abs() > 1e-30)
    ours, true = out[inside].cpu().double(), exact(x[inside].cpu().double())
    error = ((ours - true).abs() / true.abs().clamp(min=1e-3)).max()
    assert error < 4e-7
    assert bool(_apply(kernel, torch.full_like(x, torch.nan)).isnan().all())


def test_rounding_is_to_nearest_even() -> None:
    words = torch.arange(_COUNT, dtype=torch.int32) * 0x3FFF + 0x3F800000
    ties = (torch.arange(8, dtype=torch.int32) << 16) + 0x3F808000
    x = torch.cat((ties, words[8:])).view(torch.float32).to(DEVICE)
    x[-1], x[-2], x[-3] = torch.inf, torch.finfo(torch.float32).max, 1e-41
    assert same(_apply(rounded_kernel, x), x.bfloat16().float())


@pytest.mark.parametrize("levels", [3, 6, 10])
@pytest.mark.parametrize("warps", [1, 8])
def test_tree_is_the_portable_one(levels: int, warps: int) -> None:
    x = normal(_COUNT) * torch.logspace(-6, 6, _COUNT, device=DEVICE)
    sums = _apply(tree_kernel, x, warps, LEVELS=levels)[: _COUNT >> levels]
    assert same(sums, portable.tree_sum(x.cpu().view(-1, 1 << levels)))
    ascending = x.cpu().view(-1, 1 << levels).cumsum(1)[:, -1]
    assert bool((bits(sums) != bits(ascending)).any()), "these values cannot tell one order from another"
    assert relative_error(sums, x.cpu().double().view(-1, 1 << levels).sum(1)) < 1e-5
