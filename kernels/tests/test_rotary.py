"""Rotary embedding: exact operations, the fused form against its parts, the gradient, the cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from zerogap_kernels import _kernels as kernels

EPS = 1e-6


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def table(dim: int, positions: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.arange(positions).double()[:, None] / 10000.0 ** (torch.arange(0, dim, 2).double() / dim)
    return angle.cos().float(), angle.sin().float()


def rotated(x: torch.Tensor, positions: torch.Tensor, inverse: bool = False, threads: int = 1) -> torch.Tensor:
    out = torch.full_like(x, torch.nan)
    kernels.rotary(x, positions, *table(x.shape[2]), out, inverse, threads)
    return out


def normal(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """RMS norm of one head by float32 operations one by one, in the order that rotary.h states."""
    f = np.float32
    lanes = np.zeros(16, dtype=f)
    for i, value in enumerate(x):
        # An FMA: the product of two float32 is exact in float64, and the sum's two roundings nearly always are one.
        lanes[i % 16] = f(np.float64(value) * np.float64(value) + np.float64(lanes[i % 16]))
    for width in (8, 4, 2, 1):
        lanes = lanes[:width] + lanes[width : 2 * width]
    factor = f(1) / np.sqrt(lanes[0] / f(len(x)) + f(EPS))
    return (x * factor) * weight


@pytest.mark.parametrize("dim", [2, 6, 32, 64, 80, 96, 128, 256])
def test_rotation_is_single_operations(dim: int, path: str) -> None:
    x = torch.randn(40, 3, dim, generator=torch.Generator().manual_seed(dim))
    positions = torch.arange(40) * 7
    first, second = x.chunk(2, -1)
    cos, sin = (part[positions].unsqueeze(1) for part in table(dim))
    assert same(rotated(x, positions), torch.cat((first * cos - second * sin, second * cos + first * sin), -1))
    assert same(
        rotated(x, positions, inverse=True), torch.cat((first * cos + second * sin, second * cos - first * sin), -1)
    )


@pytest.mark.parametrize("threads", [1, 2, 3, 5, 8])
def test_a_row_depends_on_itself_alone(threads: int, path: str) -> None:
    x = torch.randn(37, 4, 80, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(37) * 5
    alone = torch.cat([rotated(x[r : r + 1], positions[r : r + 1]) for r in range(37)])
    assert same(rotated(x, positions, threads=threads), alone)
    extreme = x.clone()
    extreme[::2] = torch.nan
    assert same(rotated(extreme, positions, threads=threads)[1::2], alone[1::2])


@pytest.mark.parametrize("dim", [32, 64, 80, 128])
@pytest.mark.parametrize("page_size", [1, 5, 16, 20])
@pytest.mark.parametrize("normed", [False, True])
def test_fused_gives_the_bits_of_its_parts(dim: int, page_size: int, normed: bool, path: str) -> None:
    rows, heads, kv_heads = 33, 4, 2
    generator = torch.Generator().manual_seed(dim)
    # Queries, keys and values of a row side by side, as one product gives them.
    fused = torch.randn(rows, heads + 2 * kv_heads, dim, generator=generator)
    q, k, v = fused.split([heads, kv_heads, kv_heads], 1)
    weights = [torch.randn(dim, generator=generator) for _ in range(2)] if normed else [None, None]
    cache = kernels.Cache(2, 40, page_size, kv_heads, dim)
    slots = torch.randperm(40 * page_size, generator=generator)[:rows]
    positions = torch.arange(rows) * 3
    expected = []
    for x, weight in zip((q, k), weights, strict=True):
        x = x.contiguous()
        if weight is not None:
            flat = x.reshape(-1, dim).numpy()
            x = torch.from_numpy(np.stack([normal(head, weight.numpy()) for head in flat])).view_as(x)
        expected.append(rotated(x, positions))
    value = v.clone()
    for threads in (1, 3):
        rerun = fused.clone()
        q, k, v = rerun.split([heads, kv_heads, kv_heads], 1)
        kernels.rotary_cache(q, k, v, positions, *table(dim), *weights, EPS, cache, 1, slots, q, threads)
        assert same(q, expected[0])
        keys, values = torch.empty(rows, kv_heads, dim), torch.empty(rows, kv_heads, dim)
        cache.load(1, slots, keys, values)
        assert same(keys, expected[1])
        assert same(values, value)
    cache.load(0, slots, keys, values)
    assert not any(side.any() for side in (keys, values))


def test_gradient_is_the_inverse_rotation(path: str) -> None:
    x = torch.randn(9, 2, 64, dtype=torch.float64, requires_grad=True)
    positions = torch.arange(9) * 11
    first, second = x.chunk(2, -1)
    cos, sin = (part.double()[positions].unsqueeze(1) for part in table(64))
    out = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    grad = torch.randn(9, 2, 64)
    out.backward(grad.double())
    assert (rotated(grad, positions, inverse=True).double() - x.grad).abs().max() < 1e-6


def test_no_rows(path: str) -> None:
    assert rotated(torch.empty(0, 3, 64), torch.empty(0, dtype=torch.int64)).shape == (0, 3, 64)


def test_wrong_arrays_are_refused() -> None:
    x, positions, (cos, sin) = torch.randn(4, 2, 64), torch.arange(4), table(64)
    out = torch.empty_like(x)
    for wrong in (
        (x.double(), positions, cos, sin, out),
        (x[..., ::2], positions, cos, sin, out),
        (x.transpose(0, 1), positions, cos, sin, out),
        (x, positions.int(), cos, sin, out),
        (x, positions[:3], cos, sin, out),
        (x, positions + 297, cos, sin, out),
        (x, positions - 1, cos, sin, out),
        (x, positions, cos[:, :16], sin, out),
        (x, positions, cos, sin[:5], out),
        (x, positions, cos, sin, out[:3]),
        (x[..., :63].contiguous(), positions, cos, sin, out),
    ):
        with pytest.raises(ValueError, match=r"\[|head size"):
            kernels.rotary(*wrong, False, 1)
    both = torch.randn(5, 2, 64)
    with pytest.raises(ValueError, match="overlaps"):
        kernels.rotary(both[:4], positions, cos, sin, both[1:], False, 1)
    cache = kernels.Cache(1, 2, 16, 2, 64)
    for slots in (torch.tensor([0, 1, 2, 32]), torch.tensor([0, 1, 2, -1]), torch.tensor([0, 1, 2])):
        with pytest.raises(ValueError, match="slot"):
            kernels.rotary_cache(x, x, x, positions, cos, sin, None, None, EPS, cache, 0, slots, out, 1)
    with pytest.raises(ValueError, match="layer = 1"):
        kernels.rotary_cache(x, x, x, positions, cos, sin, None, None, EPS, cache, 1, torch.arange(4), out, 1)
