"""A model in bfloat16 or float16 on the CPU: rounded at the named points only, the row law kept, a gap of 0."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from tests.conformance.test_bfloat16_weights import different_tokens
from tests.support import config_values, random_decoder
from zerogap import ops
from zerogap.certify.attention import check_attention
from zerogap.certify.rows import check_rows
from zerogap.certify.subjects import Place, our_subjects
from zerogap.models.config import ModelConfig
from zerogap.models.decoder import Decoder
from zerogap.ops import backend

NARROW = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize(("family", "dtype"), [("qwen3", torch.bfloat16), ("qwen2", torch.float16)])
def test_the_gap_is_0_and_is_not_with_float32_on_one_side(family: str, dtype: torch.dtype) -> None:
    decoder = random_decoder(family, dtype=dtype)
    compared, different = different_tokens(decoder.twin(), decoder, shared=True)
    assert compared > 150
    assert different == 0
    wide = copy.deepcopy(decoder).float()
    wide.dtype = torch.float32
    compared, different = different_tokens(wide, decoder)
    assert different > compared / 2, "the control must differ"


def test_a_program_of_other_rounding_points_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One side rounds once more, where none is named: after each segment of the row-parallel layers."""
    decoder, honest = random_decoder(dtype=torch.bfloat16), ops.linear

    def by_segment(x: Tensor, weight: Tensor, bias: Tensor | None = None, segments: int = 1) -> Tensor:
        parts = zip(x.chunk(segments, 1), weight.chunk(segments, 1), strict=True)
        total = sum(honest(a, b) for a, b in parts)
        return total if bias is None else total + bias

    class Elsewhere(Decoder):
        def hidden(self, *arguments: object) -> Tensor:  # type: ignore[override]
            with monkeypatch.context() as patch:
                patch.setattr(ops, "linear", by_segment)
                return super().hidden(*arguments)  # type: ignore[arg-type]

    other = copy.deepcopy(decoder)
    other.__class__ = Elsewhere
    compared, different = different_tokens(other, decoder)
    assert different > compared / 4


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", NARROW)
def test_each_op_is_float32_and_rounded_where_it_is_said(dtype: torch.dtype) -> None:
    def make(*shape: int, seed: int = 0) -> Tensor:
        return normal(*shape, dtype=dtype, seed=seed)

    def equal(ours: Tensor, by_hand: Tensor) -> bool:
        assert ours.dtype == by_hand.dtype
        return torch.equal(ours.contiguous().view(torch.uint8), by_hand.contiguous().view(torch.uint8))

    with backend.using("portable"):
        x, weight, bias = make(9, 128), make(30, 128, seed=1), make(30, seed=2)
        wide = [t.float() for t in (x, weight, bias)]
        assert equal(ops.linear(x, weight, bias, 2), ops.linear(*wide, 2).to(dtype)), "linear: once, after the bias"
        norm = 1 + make(128, seed=3) / 8
        normed = ops.rms_norm(wide[0], torch.ones(128), 1e-6).to(dtype)
        assert equal(ops.rms_norm(x, norm, 1e-6), (normed.float() * norm.float()).to(dtype)), "norm: before the weight"
        gate, up = make(9, 70, seed=4), make(9, 70, seed=5)
        silu = ops.silu_mul(gate.float(), torch.ones(9, 70)).to(dtype)
        assert equal(ops.silu_mul(gate, up), (silu.float() * up.float()).to(dtype)), "silu, and its product"
        heads, cos, sin = make(9, 4, 32, seed=6), make(9, 16, seed=7), make(9, 16, seed=8)
        first, second = (t.float() for t in heads.chunk(2, 2))
        c, s = cos.float().unsqueeze(1), sin.float().unsqueeze(1)
        products = [(a * b).to(dtype).float() for a, b in ((first, c), (second, s), (second, c), (first, s))]
        turned = torch.cat((products[0] - products[1], products[2] + products[3]), 2).to(dtype)
        assert equal(ops.rotary(heads, cos, sin), turned), "rotary: each product, and their sum"
        plan = ops.AttentionPlan.build([ops.Chunk(0, 9, range(9))], 1)
        k, v = make(9, 2, 32, seed=9), make(9, 2, 32, seed=10)
        out = ops.attention(heads.float(), k.float(), v.float(), plan, 0.2).to(dtype)
        assert equal(ops.attention(heads, k, v, plan, 0.2), out), "attention: once"
        settings, target = ops.SamplerRows.uniform_settings(9, 0.7, 20, 0.9), torch.arange(9)
        scored = [ops.token_logprobs(a, b, target, settings) for a, b in ((x, weight), wide[:2])]
        assert equal(scored[0].logprob_R, scored[1].logprob_R), "log-probs: never"
        assert scored[0].logprob_R.dtype == scored[0].entropy_R.dtype == torch.float32


@pytest.mark.parametrize("dtype", NARROW)
def test_the_row_law_holds_op_by_op(dtype: torch.dtype) -> None:
    config, place = ModelConfig.from_dict(config_values()), Place(torch.device("cpu"), dtype)
    for subject in our_subjects(config, place):
        assert check_rows(subject, full=False, threads=(1, 3)).broken is None, subject.name
    assert check_attention(config, full=False, threads=(1, 3), place=place).broken is None


def test_the_portable_ops_serve_whatever_is_installed() -> None:
    assert backend.name_of(torch.bfloat16) == "portable"
    assert backend.of(torch.zeros(1, dtype=torch.bfloat16)).__name__ == "zerogap.ops.portable"
    if not backend.native_missing():
        with backend.using("native"):
            assert backend.name_of(torch.bfloat16) == "portable"
            assert backend.name_of(torch.float32) == "native"
            assert "bfloat16" in backend.describe(torch.bfloat16)
