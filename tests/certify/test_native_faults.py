"""Faults planted inside the native backend: certify finds each and names it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import config_values, random_decoder
from zerogap import ops
from zerogap.certify.attention import check_attention
from zerogap.certify.paths import check_paths
from zerogap.certify.rows import check_rows
from zerogap.certify.subjects import our_subjects
from zerogap.certify.whole import check_end_to_end, check_gradients
from zerogap.models.config import ModelConfig
from zerogap.models.hub import resolve_model
from zerogap.models.tokenizer import load_tokenizer
from zerogap.ops import backend

kernels = pytest.importorskip("zerogap_kernels")
calls = importlib.import_module("zerogap.ops.native.calls")

CONFIG = ModelConfig.from_dict(config_values())
Wrapper = Callable[..., Any]


@pytest.fixture(autouse=True)
def native() -> object:
    before = torch.get_num_threads()
    with backend.using("native"):
        ops.silu_mul(torch.zeros(1, 1), torch.zeros(1, 1))  # the backend's modules are loaded
        yield
    torch.set_num_threads(before)


def split_by_row_count(honest: Wrapper) -> Wrapper:
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, segments: int = 1) -> Tensor:
        return honest(x, weight, bias, 2 if len(x) > 6 and segments == 1 else segments)

    return linear


def unordered_sum(honest: Wrapper) -> Wrapper:
    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        order = torch.randperm(x.shape[-1], generator=torch.Generator().manual_seed(x.numel()))
        return honest(x[..., order], weight[order], eps)[..., order.argsort()]

    return rms_norm


def neighbour_dependent_tile(honest: Wrapper) -> Wrapper:
    def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
        out = honest(gate, up)
        for tile in out.split(4):
            tile[:1] += 1e-6 * tile[1:].sum(0, keepdim=True)
        return out

    return silu_mul


def position_dependent_tail(honest: Wrapper) -> Wrapper:
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, segments: int = 1) -> Tensor:
        out, tail = honest(x, weight, bias, segments), len(x) // 8 * 8
        if 0 < tail < len(x):
            out[tail:] = honest(x[tail:].flip(1).contiguous(), weight.flip(1).contiguous(), bias, segments)
        return out

    return linear


def dtype_by_row_count(honest: Wrapper) -> Wrapper:
    def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return honest(x if len(x) == 1 else x.bfloat16().float(), cos, sin)

    return rotary


def thread_dependent_tail(honest: Wrapper) -> Wrapper:
    def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
        out, tail = honest(gate, up), len(gate) // torch.get_num_threads() * torch.get_num_threads()
        out[tail:] *= 1 + 1e-6
        return out

    return silu_mul


# Each: the op it sits in, which test must name it first, what the reproducer says.
FAULTS = {
    split_by_row_count: ("linear", "q_proj", "others: row 0 of 7 at 1 threads"),
    unordered_sum: ("rms_norm", "rms_norm", "others: row 6 of 7 at 1 threads"),
    neighbour_dependent_tile: ("silu_mul", "silu_mul", "others: row 0 of 2 at 1 threads"),
    position_dependent_tail: ("linear", "q_proj", "others: row 8 of 9 at 1 threads"),
    dtype_by_row_count: ("rotary", "rotary", "others: row 0 of 2 at 1 threads"),
    thread_dependent_tail: ("silu_mul", "silu_mul", "at 3 threads"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_named(
    fault: Callable[[Wrapper], Wrapper], monkeypatch: pytest.MonkeyPatch
) -> None:
    op, named, reproducer = FAULTS[fault]
    module = sys.modules["zerogap.ops.native"]
    monkeypatch.setattr(module, op, fault(getattr(module, op)))
    verdicts = (check_rows(subject, full=False) for subject in our_subjects(CONFIG))
    first = next(verdict for verdict in verdicts if verdict.broken is not None)
    assert first.name == named
    assert reproducer in str(first.broken)


def test_one_sided_dtype_is_found_between_engine_and_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the trainer rounds: each side keeps the row law by itself."""
    module = sys.modules["zerogap.ops.native"]
    honest = module.token_logprobs

    def rounded(hidden: Tensor, *arguments: Any) -> Any:
        return honest(hidden.bfloat16().float(), *arguments)

    monkeypatch.setattr(module, "token_logprobs", rounded)
    assert all(check_rows(subject, full=False).broken is None for subject in our_subjects(CONFIG))
    tokenizer = load_tokenizer(resolve_model("builtin:tiny-qwen3"))
    verdicts = check_end_to_end(random_decoder("qwen3", vocab_size=64), tokenizer, full=False)
    assert verdicts[0].name == "engine against trainer: plain sampling"
    assert not verdicts[0].holds
    assert "tokens differ" in verdicts[0].detail


def test_an_attention_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_attention(CONFIG, full=False).broken is None
    module = sys.modules["zerogap.ops.native"]
    honest = module.attention

    def by_chunk(q: Tensor, *arguments: Any) -> Tensor:
        return honest(q, *arguments) * (1 + 1e-6 * (len(q) == 8))

    monkeypatch.setattr(module, "attention", by_chunk)
    assert "chunks of 7" in str(check_attention(CONFIG, full=False).broken)


def test_a_path_of_other_bits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_paths(CONFIG, full=False).holds
    if len(kernels.paths_here()) < 2:
        pytest.skip("this machine runs one path")
    module = sys.modules["zerogap.ops.native"]
    honest = module.silu_mul
    monkeypatch.setattr(module, "silu_mul", lambda g, u: honest(g, u) * (1 + 1e-6 * (kernels.path() == "generic")))
    verdict = check_paths(CONFIG, full=False)
    assert not verdict.holds
    assert verdict.detail.startswith("silu_mul: ")
    assert "of generic differ from" in verdict.detail


def test_a_wrong_gradient_of_a_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(verdict.holds for verdict in check_gradients(CONFIG))
    honest = calls.silu_mul_backward

    def wrong(gate: Tensor, up: Tensor, grad: Tensor, *rest: Any) -> None:
        honest(gate, up, grad * 1.001, *rest)

    monkeypatch.setattr(calls, "silu_mul_backward", wrong)
    assert [verdict.name for verdict in check_gradients(CONFIG) if not verdict.holds] == ["gradient of silu_mul"]
