"""RMSNorm, residual addition, gated SiLU, embedding: row law, values, gradients, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import zerogap_kernels as kernels
from laws import THREADS, assert_bits, assert_row_law, bits, every_path

WIDTHS = (1, 15, 16, 17, 64, 576, 1000)
EPS = 1e-5


def normals(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def rms_norm(x: np.ndarray, weight: np.ndarray, threads: int = 1) -> np.ndarray:
    y = np.empty_like(x)
    kernels.rms_norm(x, weight, EPS, y, threads)
    return y


def silu_mul(gate: np.ndarray, up: np.ndarray, threads: int = 1) -> np.ndarray:
    y = np.empty_like(gate)
    kernels.silu_mul(gate, up, y, threads)
    return y


def norm_64(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_keeps_the_row_law(width: int) -> None:
    weight = normals(width, seed=1)
    assert_row_law(lambda x, threads: rms_norm(x, weight, threads), normals(37, width))


@pytest.mark.parametrize("width", [1, 17, 1536])
def test_silu_mul_keeps_the_row_law(width: int) -> None:
    def op(both: np.ndarray, threads: int) -> np.ndarray:
        return silu_mul(both[:, :width], both[:, width:], threads)

    assert_row_law(op, normals(37, 2 * width) * 20)


def test_the_row_law_check_can_fail() -> None:
    def by_row_count(x: np.ndarray, threads: int) -> np.ndarray:
        # The order of the sum changes with the number of rows.
        half = 16 if len(x) > 2 else 8
        total = (x[:, :half] ** 2).sum(1) + (x[:, half:] ** 2).sum(1)
        return (x / np.sqrt(total / np.float32(x.shape[1]))[:, None]).astype(np.float32)

    with pytest.raises(AssertionError, match="differ"), np.errstate(all="ignore"):
        assert_row_law(by_row_count, normals(37, 33))


@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_bits_are_as_defined(width: int) -> None:
    x, weight = normals(5, width), normals(width, seed=1)
    padded = np.zeros((5, -(-width // 16) * 16), np.float32)
    padded[:, :width] = x
    lanes = np.zeros((5, 16), np.float64)
    for start in range(0, padded.shape[1], 16):
        # An FMA: the product of two float32 numbers is exact in float64, and so nearly always is its sum with a third.
        lanes = (padded[:, start : start + 16].astype(np.float64) ** 2 + lanes).astype(np.float32).astype(np.float64)
    tree = lanes.astype(np.float32)
    while tree.shape[1] > 1:
        half = tree.shape[1] // 2
        tree = tree[:, :half] + tree[:, half:]
    scale = np.float32(1) / np.sqrt(tree / np.float32(width) + np.float32(EPS))
    assert_bits(rms_norm(x, weight), x * scale * weight)


@pytest.mark.parametrize("width", WIDTHS)
def test_add_rms_norm_has_the_bits_of_both_steps(width: int) -> None:
    weight, added = normals(width, seed=1), normals(21, width, seed=2)
    for _ in every_path():
        for threads in THREADS:
            x, y = normals(21, width), np.empty((21, width), np.float32)
            total = x + added
            kernels.add_rms_norm(x, added, weight, EPS, y, threads)
            assert_bits(x, total)
            assert_bits(y, rms_norm(total, weight))


def test_values() -> None:
    x, weight = normals(9, 576) * 3, normals(576, seed=1)
    exact = norm_64(torch.from_numpy(x).double(), torch.from_numpy(weight).double()).numpy()
    np.testing.assert_allclose(rms_norm(x, weight), exact, rtol=1e-6)
    gate, up = normals(9, 100) * 30, normals(9, 100, seed=1)
    exact = (torch.nn.functional.silu(torch.from_numpy(gate).double()) * torch.from_numpy(up)).numpy()
    np.testing.assert_allclose(silu_mul(gate, up), exact, rtol=1e-6, atol=1e-35)


def test_strided_rows_and_results_in_place() -> None:
    both = normals(11, 96)
    gate, up = both[:, :48], both[:, 48:]
    apart = silu_mul(gate.copy(), up.copy())
    assert_bits(silu_mul(gate, up), apart)
    kernels.silu_mul(gate, up, gate, 2)
    assert_bits(gate.copy(), apart)
    weight = normals(48, seed=3)
    assert_bits(rms_norm(up, weight), rms_norm(up.copy(), weight))


def test_no_rows() -> None:
    empty = np.empty((0, 8), np.float32)
    weight = np.ones(8, np.float32)
    assert rms_norm(empty, weight, 3).shape == (0, 8)
    kernels.silu_mul(empty, empty, empty.copy(), 2)
    grad_weight = np.ones(8, np.float32)
    kernels.rms_norm_backward(empty, weight, EPS, empty, empty.copy(), grad_weight, False, 2)
    assert (grad_weight == 1).all()


@pytest.mark.parametrize(("rows", "width"), [(1, 16), (5, 17), (64, 64), (65, 64), (200, 576)])
def test_rms_norm_gradients(rows: int, width: int) -> None:
    x, weight, grad = normals(rows, width), normals(width, seed=1), normals(rows, width, seed=2)
    x64 = torch.from_numpy(x).double().requires_grad_()
    weight64 = torch.from_numpy(weight).double().requires_grad_()
    norm_64(x64, weight64).backward(torch.from_numpy(grad).double())
    results = []
    for _ in every_path():
        for threads in THREADS:
            grad_x, grad_weight = np.empty_like(x), np.zeros_like(weight)
            kernels.rms_norm_backward(x, weight, EPS, grad, grad_x, grad_weight, False, threads)
            results.append((grad_x, grad_weight))
    for grad_x, grad_weight in results:
        assert_bits(grad_x, results[0][0])
        assert_bits(grad_weight, results[0][1])
    assert x64.grad is not None
    assert weight64.grad is not None
    np.testing.assert_allclose(results[0][0], x64.grad.numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(results[0][1], weight64.grad.numpy(), rtol=1e-4, atol=1e-4)
    onto = np.ones_like(x)
    kernels.rms_norm_backward(x, weight, EPS, grad, onto, np.zeros_like(weight), True, 2)
    assert_bits(onto, results[0][0] + np.float32(1))


def test_silu_mul_gradients() -> None:
    gate, up, grad = normals(20, 33) * 5, normals(20, 33, seed=1), normals(20, 33, seed=2)
    gate64, up64 = (torch.from_numpy(a).double().requires_grad_() for a in (gate, up))
    (torch.nn.functional.silu(gate64) * up64).backward(torch.from_numpy(grad).double())
    results = []
    for _ in every_path():
        for threads in THREADS:
            pair = np.empty_like(gate), np.empty_like(up)
            kernels.silu_mul_backward(gate, up, grad, *pair, threads)
            results.append(pair)
    for pair in results:
        assert_bits(pair[0], results[0][0])
        assert_bits(pair[1], results[0][1])
    assert gate64.grad is not None
    assert up64.grad is not None
    np.testing.assert_allclose(results[0][0], gate64.grad.numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(results[0][1], up64.grad.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [1, 16, 21, 576])
def test_embedding(width: int) -> None:
    table = torch.from_numpy(normals(50, width))
    ids = torch.tensor([3, 3, 49, 0, 7, 3])
    for _ in every_path():
        for held in (table, table.bfloat16()):
            y = torch.empty(6, width)
            kernels.embedding(ids, held, y, 2)
            assert_bits(y.numpy(), held[ids].float().numpy())


def test_embedding_gradient_adds_rows_in_order() -> None:
    grad = normals(500, 70)
    ids = np.random.default_rng(0).integers(0, 9, 500)
    expected = normals(12, 70, seed=4)
    start = expected.copy()
    for row, token in enumerate(ids):
        expected[token] += grad[row]
    for _ in every_path():
        for threads in THREADS:
            table = start.copy()
            kernels.embedding_backward(ids, grad, table, threads)
            assert_bits(table, expected)


def test_wrong_arrays_are_refused() -> None:
    x, weight = normals(4, 8), normals(8)
    with pytest.raises(ValueError, match=r"y \[4, 7\]: must be \[4, 8\]"):
        kernels.rms_norm(x, weight, EPS, x[:, :7].copy(), 1)
    with pytest.raises(ValueError, match=r"weight \[4\]: must be \[8\]"):
        kernels.rms_norm(x, weight[:4].copy(), EPS, x.copy(), 1)
    with pytest.raises(ValueError, match="wrong dtype"):
        kernels.rms_norm(x.astype(np.float64), weight, EPS, x.copy(), 1)
    with pytest.raises(ValueError, match="elements of a row must be contiguous"):
        kernels.silu_mul(np.asfortranarray(x), x, x.copy(), 1)
    with pytest.raises(ValueError, match="eps = -1"):
        kernels.rms_norm(x, weight, -1.0, x.copy(), 1)
    with pytest.raises(ValueError, match="threads = 0"):
        kernels.rms_norm(x, weight, EPS, x.copy(), 0)
    with pytest.raises(ValueError, match="token 4 at 1 is outside 0 to 3"):
        kernels.embedding(np.array([0, 4]), x, np.empty((2, 8), np.float32), 1)
    with pytest.raises(ValueError, match="token -1 at 0"):
        kernels.embedding_backward(np.array([-1]), x[:1].copy(), x.copy(), 1)
    with pytest.raises(ValueError, match=r"ids \[2\]: wrong dtype"):
        kernels.embedding(np.array([0, 1], np.int32), x, np.empty((2, 8), np.float32), 1)
    frozen = x.copy()
    frozen.flags.writeable = False
    with pytest.raises((TypeError, ValueError, BufferError)):
        kernels.rms_norm(x, weight, EPS, frozen, 1)


def test_bits_helper_sees_a_zero_of_the_other_sign() -> None:
    assert (bits(np.array([0.0], np.float32)) != bits(np.array([-0.0], np.float32))).all()
