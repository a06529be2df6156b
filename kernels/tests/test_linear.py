"""Linear layers: the stated chain, row law, segments, bfloat16 weights, any strides, what is refused."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

import zerogap_kernels as kernels
from laws import assert_bits, assert_row_law


def normals(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def linear(x: np.ndarray, packed: kernels.Packed, bias: np.ndarray | None = None, threads: int = 1) -> np.ndarray:
    y = np.full((len(x), packed.shape[0]), np.nan, np.float32)
    kernels.linear(x, packed, bias, y, threads)
    return y


def rounded(value: Fraction) -> np.float32:
    """One rounding of an exact number to float32, to nearest; float64 between would round twice."""
    near = np.float32(float(value))
    around = (near, np.nextafter(near, np.float32(-np.inf)), np.nextafter(near, np.float32(np.inf)))
    return min(around, key=lambda x: (abs(Fraction(float(x)) - value), int(x.view(np.int32)) & 1))


def chain(x: np.ndarray, w: np.ndarray) -> np.float32:
    total = np.float32(0)
    for a, b in zip(x, w, strict=True):
        total = rounded(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(total)))
    return total


def by_definition(x: np.ndarray, w: np.ndarray, segments: int, bias: np.float32) -> np.float32:
    parts = [chain(a, b) for a, b in zip(np.split(x, segments), np.split(w, segments), strict=True)]
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return np.float32(parts[0] + bias)


@pytest.mark.parametrize("segments", [1, 2, 4, 8])
def test_an_element_is_the_stated_chain(segments: int, path: str) -> None:
    x, weight, bias = normals(3, 40), normals(5, 40, seed=1), normals(5, seed=2)
    y = linear(x, kernels.pack(weight, segments, 1), bias)
    exact = [[by_definition(row, w, segments, b) for w, b in zip(weight, bias, strict=True)] for row in x]
    assert_bits(y, np.array(exact, np.float32))


@pytest.mark.parametrize(("out", "depth", "segments"), [(1, 1, 1), (17, 40, 1), (96, 64, 4), (130, 576, 8)])
@pytest.mark.parametrize("bf16", [False, True])
def test_row_law(out: int, depth: int, segments: int, bf16: bool) -> None:
    weight = torch.from_numpy(normals(out, depth, seed=1))
    packed = kernels.pack(weight.bfloat16() if bf16 else weight, segments, 2)
    assert_row_law(lambda x, threads: linear(x, packed, normals(out, seed=2), threads), normals(37, depth))


def test_the_row_law_check_can_fail() -> None:
    packed = [kernels.pack(normals(17, 40, seed=1), segments, 1) for segments in (1, 4)]
    with pytest.raises(AssertionError, match="differ"):
        assert_row_law(lambda x, threads: linear(x, packed[len(x) > 12]), normals(37, 40))
    with pytest.raises(AssertionError, match="threads"):
        assert_row_law(lambda x, threads: linear(x, packed[threads > 2]), normals(37, 40))


def test_bf16_weights_are_widened_exactly() -> None:
    weight = torch.from_numpy(normals(33, 64, seed=1)).bfloat16()
    x = normals(9, 64)
    assert_bits(linear(x, kernels.pack(weight, 2, 1)), linear(x, kernels.pack(weight.float(), 2, 1)))


def test_weights_of_any_strides(path: str) -> None:
    wide = torch.from_numpy(normals(40, 80, seed=1))
    x = normals(4, 20)
    views = (wide[:, :20], wide[:, 60:], wide[:, ::4], wide.T[::4, :20].T[:20], wide[:1, :20].expand(40, 20))
    for view in views:
        assert_bits(linear(x, kernels.pack(view, 1, 2)), linear(x, kernels.pack(view.contiguous(), 1, 1)))
    flipped = wide[:, :20].numpy()[::-1]
    assert_bits(linear(x, kernels.pack(flipped, 1, 1)), linear(x, kernels.pack(flipped.copy(), 1, 1)))


@pytest.mark.parametrize(("rows", "out", "depth"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0), (1, 1, 1)])
def test_nothing_and_one(rows: int, out: int, depth: int, path: str) -> None:
    y = linear(normals(rows, depth), kernels.pack(normals(out, depth), 1, 3), threads=3)
    assert y.shape == (rows, out)
    if depth == 0:
        assert (y == 0).all()


def test_refused() -> None:
    weight, x = normals(3, 8), normals(2, 8)
    packed = kernels.pack(weight, 1, 1)
    for segments, words in ((3, "must be 1, 2, 4 or 8"), (16, "must be 1, 2, 4 or 8")):
        with pytest.raises(ValueError, match=words):
            kernels.pack(weight, segments, 1)
    with pytest.raises(ValueError, match=r"weight \[3, 9\]: 2 segments do not divide its columns"):
        kernels.pack(normals(3, 9), 2, 1)
    with pytest.raises(ValueError, match=r"weight \[3\]: must have 2 dimensions"):
        kernels.pack(normals(3), 1, 1)
    for other in (torch.float16, torch.float64, torch.int32, torch.bool):
        with pytest.raises(ValueError, match=rf"weight \[3, 8\]: wrong dtype {str(other)[6:]}"):
            kernels.pack(torch.ones(3, 8).to(other), 1, 1)
    with pytest.raises(ValueError, match=r"weight \[3, 8\]: bfloat16, the packed one is the other"):
        packed.repack(torch.ones(3, 8).bfloat16(), 1)
    with pytest.raises(ValueError, match=r"weight \[3, 7\]: the packed one is \[3, 8\]"):
        packed.repack(normals(3, 7), 1)
    y = np.empty((2, 3), np.float32)
    for bad, words in (
        (normals(2, 7), r"x \[2, 7\]: the weight has 8 inputs"),
        (x.astype(np.float64), r"x \[2, 8\]: wrong dtype float64, must be float32"),
        (normals(2, 16)[:, ::2], r"x \[2, 8\]: elements of a row must be contiguous"),
        (x[::-1], r"x \[2, 8\]: rows overlap"),
        (x[0], r"x \[8\]: must have 2 dimensions"),
    ):
        with pytest.raises(ValueError, match=words):
            kernels.linear(bad, packed, None, y, 1)
    for bad in (np.empty((2, 4), np.float32), np.empty((3, 3), np.float32)):
        with pytest.raises(ValueError, match=r"y \[.*\]: must be \[2, 3\]"):
            kernels.linear(x, packed, None, bad, 1)
    with pytest.raises(ValueError, match=r"bias \[4\]: must be \[3\]"):
        kernels.linear(x, packed, normals(4), y, 1)
    for threads in (0, -1, 1025):
        with pytest.raises(ValueError, match="must be 1 to 1024"):
            kernels.linear(x, packed, None, y, threads)


def misaligned(values: torch.Tensor, offset: int) -> torch.Tensor:
    """The same values in memory that starts `offset` bytes beyond an aligned place."""
    words = values.contiguous().view(torch.uint8).flatten().numpy().tobytes()
    room = bytearray(offset) + bytearray(words)
    return torch.frombuffer(room, dtype=values.dtype, offset=offset).reshape(values.shape)


def test_misaligned_memory_is_refused() -> None:
    x, weight = torch.from_numpy(normals(2, 8)), torch.from_numpy(normals(3, 8))
    packed, y = kernels.pack(weight, 1, 1), torch.empty(2, 3)
    with pytest.raises(ValueError, match=r"x \[2, 8\]: its memory is not aligned"):
        kernels.linear(misaligned(x, 2), packed, None, y, 1)
    with pytest.raises(ValueError, match=r"weight \[3, 8\]: its memory is not aligned"):
        kernels.pack(misaligned(weight, 2), 1, 1)
    with pytest.raises(ValueError, match=r"weight \[3, 8\]: its memory is not aligned"):
        kernels.pack(misaligned(weight.bfloat16(), 1), 1, 1)
    # Aligned to its elements, not to a register: that is fine.
    kernels.linear(misaligned(x, 4), packed, None, y, 1)
    assert_bits(y.numpy(), linear(x.numpy(), packed))
