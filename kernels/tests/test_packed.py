"""A packed weight against the weight it came from: equal to the bit, or said to differ."""

from __future__ import annotations

import pytest
import torch

import zerogap_kernels as kernels


@pytest.mark.parametrize("shape", [(1, 1), (16, 8), (17, 64), (130, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_other_bit_is_found_wherever_it_is(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed = kernels.pack(weight, 1, 2)
    words = weight.view(torch.int32 if dtype == torch.float32 else torch.int16)
    last = (shape[0] - 1, shape[1] - 1)
    for threads in (1, 2, 5):
        assert packed.matches(weight, threads)
        for at in {(0, 0), last, (shape[0] // 2, shape[1] // 3)}:
            words[at] ^= 1
            assert not packed.matches(weight, threads)
            words[at] ^= 1
    weight[last] = 0.0
    packed.repack(weight, 1)
    weight[last] = -0.0
    assert not packed.matches(weight, 1), "the sign of a zero is a bit too"


def test_any_strides_and_not_a_number() -> None:
    weight = torch.randn(40, 24)
    weight[3, 5] = torch.nan
    packed = kernels.pack(weight.T, 2, 1)
    assert packed.matches(weight.T, 2)
    assert packed.matches(weight.T.contiguous(), 2)


def test_another_shape_or_type_is_refused() -> None:
    packed = kernels.pack(torch.zeros(4, 8), 1, 1)
    with pytest.raises(ValueError, match=r"weight \[5, 8\]: the packed one is \[4, 8\]"):
        packed.matches(torch.zeros(5, 8), 1)
    with pytest.raises(ValueError, match="bfloat16"):
        packed.matches(torch.zeros(4, 8, dtype=torch.bfloat16), 1)
