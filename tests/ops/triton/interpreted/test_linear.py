"""Law 1 for the linear kernel under the interpreter: places, masks and the order of sums, not a GPU's bits."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from zerogap.ops.triton import choices, linear
from zerogap.ops.triton.linear import product
from zerogap.ops.triton.table import linear_tiles
from zerogap.ops.triton.targets import INTERPRETER

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# [N, K], segments: one walk, a width that is no multiple of a tile, an odd one, trees of 2 and 8.
SHAPES = [(64, 96, 1), (70, 96, 1), (33, 50, 1), (40, 128, 2), (64, 512, 8)]
SWITCH = linear_tiles(INTERPRETER, "float32", 64, 1).tiles[0].rows  # more rows take another tile
assert SWITCH is not None


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def broken(op: Callable[[Tensor], Tensor], x: Tensor, before: Tensor, after: Tensor) -> bool:
    """Whether rows of ``op`` differ from the same rows alone when others stand before and behind them."""
    together = op(torch.cat((before, x, after)))[len(before) : len(before) + len(x)]
    alone = torch.cat([op(x[row : row + 1]) for row in range(len(x))])
    return not torch.equal(bits(together), bits(alone))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    shape=st.sampled_from(SHAPES),
    dtype=st.sampled_from(sorted(DTYPES)),
    rows=st.integers(1, 3),
    before=st.integers(0, SWITCH + 2),
    after=st.integers(0, SWITCH + 2),
    fill=st.sampled_from([0.0, 1.0, 1e4, torch.nan, torch.inf]),
    bias=st.booleans(),
)
def test_row_law(
    shape: tuple[int, int, int], dtype: str, rows: int, before: int, after: int, fill: float, bias: bool
) -> None:
    out_features, in_features, segments = shape
    weight = normal(out_features, in_features, seed=1, dtype=DTYPES[dtype])
    added = normal(out_features, seed=2, dtype=DTYPES[dtype]) if bias else None
    x = normal(rows, in_features, seed=3, dtype=DTYPES[dtype])
    others = [normal(n, in_features, seed=4, dtype=DTYPES[dtype]) * fill for n in (before, after)]
    assert not broken(lambda y: linear(y, weight, added, segments), x, *others)


def test_control_fails() -> None:
    """K split by the number of rows: the fault that the kernel must not have."""
    weight = normal(64, 512, seed=1)

    def by_rows(y: Tensor) -> Tensor:
        return linear(y, weight, segments=8 if len(y) > SWITCH else 1)

    x, others = normal(2, 512, seed=3), normal(SWITCH, 512, seed=4)
    assert not broken(lambda y: linear(y, weight, segments=8), x, others, others), "sound with one cut for all rows"
    assert broken(by_rows, x, others, others)


@pytest.mark.parametrize("rows", [1, SWITCH, SWITCH + 1, 2 * SWITCH + 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_values(shape: tuple[int, int, int], rows: int) -> None:
    out_features, in_features, segments = shape
    for name, dtype in DTYPES.items():
        x, weight = normal(rows, in_features, dtype=dtype), normal(out_features, in_features, seed=1, dtype=dtype)
        bias = normal(out_features, seed=2, dtype=dtype)
        exact = x.double() @ weight.double().T + bias.double()
        error = (linear(x, weight, bias, segments).double() - exact).abs().max() / exact.abs().max()
        assert error < {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}[name], name


@pytest.mark.parametrize("rows", [2, SWITCH + 1])
def test_segments_meet_in_the_stated_tree(rows: int) -> None:
    """Law 6: ranks that hold whole segments give the same bits, with the tree in memory and in registers."""
    x, weight = normal(rows, 512), normal(48, 512, seed=1)
    parts = [product(x[:, k : k + 64], weight[:, k : k + 64]) for k in range(0, 512, 64)]
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    whole = product(x, weight, segments=8)
    assert torch.equal(bits(whole), bits(parts[0]))
    assert not torch.equal(bits(whole), bits(product(x, weight))), "the control: another tree, other bits"


def test_rounded_once_after_the_bias() -> None:
    """In float16: the interpreter truncates to bfloat16 where a GPU rounds to nearest."""
    x, weight = normal(3, 96).half(), normal(32, 96, seed=1).half()
    bias = normal(32, seed=2).half()
    exact = product(x, weight, out_dtype=torch.float32) + bias.float()
    assert torch.equal(bits(linear(x, weight, bias)), bits(exact.half()))
    twice = product(x, weight) + bias
    assert not torch.equal(bits(twice), bits(exact.half())), "the control: rounded before the bias too"


def test_layout_does_not_matter() -> None:
    x, weight = normal(5, 96), normal(32, 96, seed=1)
    expected = linear(x, weight)
    for other in (x.T.contiguous().T, torch.cat((torch.zeros(1), x.flatten()))[1:].view(5, 96)):
        assert torch.equal(bits(linear(other, weight)), bits(expected))


@pytest.mark.parametrize("segments", [1, 2])
def test_gradients(segments: int) -> None:
    x, weight, bias = normal(7, 128), normal(24, 128, seed=1), normal(24, seed=2)
    ours = [t.clone().requires_grad_() for t in (x, weight, bias)]
    theirs = [t.double().requires_grad_() for t in (x, weight, bias)]
    scale = normal(7, 24, seed=3)
    (linear(*ours, segments) * scale).sum().backward()
    (torch.nn.functional.linear(*theirs) * scale.double()).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        assert (a.grad.double() - b.grad).abs().max() < 1e-5 * b.grad.abs().max()


def test_no_rows_and_bad_shapes() -> None:
    assert linear(normal(0, 96), normal(8, 96)).shape == (0, 8)
    with pytest.raises(ValueError, match=r"rows are torch\.float32, the weight is torch\.float16"):
        linear(normal(2, 96), normal(8, 96).half())
    with pytest.raises(ValueError, match="segments of 48 are no multiple of 32"):
        linear(normal(2, 96), normal(8, 96), segments=2)


def test_choices_are_recorded() -> None:
    linear(normal(2, 96), normal(8, 96))
    assert "block_k=32" in choices()["linear 8x96/1 float32 interpreter"]
