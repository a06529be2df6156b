"""exp and log: accuracy over the whole range, special values, and the same bits on every path."""

from __future__ import annotations

import numpy as np
import pytest

from laws import assert_bits, every_path
from zerogap_kernels import exp, log

STEP = 1021  # every 1021st float32, an odd prime: all exponents, changing mantissas


def all_floats() -> np.ndarray:
    x = np.arange(0, 2**32, STEP, dtype=np.uint64).astype(np.uint32).view(np.float32)
    return x[np.isfinite(x)]


def ulps(value: np.ndarray, exact: np.ndarray) -> np.ndarray:
    unit = np.exp2(np.floor(np.log2(np.maximum(np.abs(exact), 2.0**-126))) - 23)
    return np.abs(value.astype(np.float64) - exact) / unit


def apply(function, x: np.ndarray, threads: int = 2) -> np.ndarray:
    y = np.empty_like(x)
    function(x, y, threads)
    return y


def test_exp_is_within_one_ulp() -> None:
    x = all_floats()
    x = np.concatenate([x[np.abs(x) <= 87], np.linspace(-87, 87, 1_000_000, dtype=np.float32)])
    assert ulps(apply(exp, x), np.exp(x.astype(np.float64))).max() < 1.0


def test_log_is_within_one_ulp() -> None:
    x = all_floats()
    x = np.concatenate([x[x > 0], np.linspace(0.5, 2, 1_000_000, dtype=np.float32)])
    exact = np.log(x.astype(np.float64))
    assert ulps(apply(log, x), exact)[exact != 0].max() < 1.0
    assert (apply(log, x)[exact == 0] == 0).all()


@pytest.mark.parametrize("function", [exp, log])
def test_paths_agree(function) -> None:
    x = all_floats()
    results = [apply(function, x) for _ in every_path()]
    for result in results[1:]:
        same = (result.view(np.int32) == results[0].view(np.int32)) | (np.isnan(result) & np.isnan(results[0]))
        assert same.all()


def test_specials() -> None:
    tiny = np.float32(1e-45)
    for _ in every_path():
        x = np.array([0.0, -0.0, tiny, -tiny, -87.01, -np.inf], np.float32)
        assert_bits(apply(exp, x), np.array([1, 1, 1, 1, 0, 0], np.float32))
        x = np.array([87.0, 88.0, 3e38, np.inf], np.float32)
        assert (apply(exp, x) == apply(exp, x)[0]).all()
        x = np.array([0.0, -0.0, 1.0, np.inf], np.float32)
        assert_bits(apply(log, x), np.array([-np.inf, -np.inf, 0, np.inf], np.float32))
        assert np.isnan(apply(log, np.array([-1.0, -tiny, -np.inf, np.nan], np.float32))).all()
        assert np.isnan(apply(exp, np.array([np.nan], np.float32))).all()
        assert apply(log, np.array([tiny], np.float32))[0] == np.float32(np.log(np.float64(tiny)))


@pytest.mark.parametrize("function", [exp, log])
def test_an_element_does_not_depend_on_its_place(function) -> None:
    x = np.random.default_rng(0).uniform(0.001, 80, 40).astype(np.float32)
    whole = apply(function, x)
    for start in range(18):
        for count in (1, 5, 16, 17):
            assert_bits(apply(function, x[start : start + count].copy()), whole[start : start + count])


def test_wrong_arrays_are_refused() -> None:
    x = np.zeros(4, np.float32)
    with pytest.raises(ValueError, match=r"y \[3\]: must be \[4\]"):
        exp(x, np.zeros(3, np.float32), 1)
    with pytest.raises(ValueError, match=r"x \[4\]: wrong dtype"):
        exp(x.astype(np.float64), x, 1)
    with pytest.raises(ValueError, match=r"x \[2\]: must be contiguous"):
        exp(x[::2], x[:2].copy(), 1)
