"""AdamW step and sum of squares: torch's values, and the same bits at every thread count and on every path."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import zerogap_kernels as kernels
from laws import THREADS, assert_bits, every_path

BETAS, EPSILON = (0.9, 0.999), 1e-8


def normals(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def run(count: int, threads: int, steps: int = 5, decay: float = 0.1, scale: float = 0.5) -> list[np.ndarray]:
    param, mean, square = normals(count), np.zeros(count, np.float32), np.zeros(count, np.float32)
    for step in range(1, steps + 1):
        kernels.adamw_step(
            param, normals(count, step), mean, square, step, 1e-2, *BETAS, EPSILON, decay, scale, threads
        )
    return [param, mean, square]


@pytest.mark.parametrize("count", [0, 1, 15, 17, 1000, 200_003])
def test_steps_are_torch_s(count: int) -> None:
    theirs = torch.nn.Parameter(torch.from_numpy(normals(count)).double())
    optimiser = torch.optim.AdamW([theirs], lr=1e-2, betas=BETAS, eps=EPSILON, weight_decay=0.1)
    for step in range(1, 6):
        theirs.grad = torch.from_numpy(normals(count, step)).double() * 0.5
        optimiser.step()
    param, mean, square = run(count, 1)
    np.testing.assert_allclose(param, theirs.detach().numpy(), rtol=1e-5, atol=1e-6)
    state = optimiser.state[theirs]
    np.testing.assert_allclose(mean, state["exp_avg"].numpy(), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(square, state["exp_avg_sq"].numpy(), rtol=1e-5, atol=1e-9)
    for _ in every_path():
        for threads in THREADS:
            for ours, first in zip(run(count, threads), (param, mean, square), strict=True):
                assert_bits(ours, first)


@pytest.mark.parametrize("count", [0, 1, 17, 4095, 4096, 4097, 300_001])
def test_sum_of_squares(count: int) -> None:
    x = normals(count) * np.float32(1e-3)
    exact = math.fsum(float(v) ** 2 for v in x)
    results = {kernels.sum_of_squares(x, threads) for _ in every_path() for threads in THREADS}
    assert len(results) == 1
    np.testing.assert_allclose(results.pop(), exact, rtol=1e-14)


def test_what_is_not_finite_shows_in_the_sum() -> None:
    x = normals(10_000)
    for bad in (np.nan, np.inf, -np.inf):
        x[7777] = bad
        assert not math.isfinite(kernels.sum_of_squares(x, 2))


def test_wrong_arguments_are_refused() -> None:
    x = normals(8)
    with pytest.raises(ValueError, match=r"grad \[7\]: must have the elements of param \[8\]"):
        kernels.adamw_step(x, x[:7].copy(), x.copy(), x.copy(), 1, 1e-3, *BETAS, EPSILON, 0.0, 1.0, 1)
    with pytest.raises(ValueError, match="step = 0"):
        kernels.adamw_step(x, x.copy(), x.copy(), x.copy(), 0, 1e-3, *BETAS, EPSILON, 0.0, 1.0, 1)
    with pytest.raises(ValueError, match=r"mean \[2, 4\]: must be contiguous"):
        kernels.adamw_step(x, x.copy(), normals(16).reshape(4, 4)[::2], x.copy(), 1, 1e-3, *BETAS, EPSILON, 0.0, 1.0, 1)
    with pytest.raises(ValueError, match="wrong dtype"):
        kernels.sum_of_squares(x.astype(np.float64), 1)
