"""Engine and trainer over the Triton kernels: chunks, pages, a shared prompt and packing, equal in every bit."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.ops.triton.interpreted.laws import DEVICE, INTERPRETED, bits
from zerogap.certify.whole import random_decoder
from zerogap.engine import Completion, Engine, EngineConfig, Request, SamplingParams
from zerogap.models.config import ModelConfig
from zerogap.models.decoder import Decoder
from zerogap.models.rows import PackedCache, Rows
from zerogap.models.tokenizer import load_tokenizer
from zerogap.ops import ambient, backend
from zerogap.trainer import (
    Optimiser,
    OptimiserSettings,
    SequenceSampler,
    StepSettings,
    TrainSequence,
    accumulate,
    score,
)

FOLDER = Path(__file__).parents[4] / "src" / "zerogap" / "data" / "tiny-qwen3"


@pytest.fixture(autouse=True)
def _triton() -> Iterator[None]:
    with backend.using("triton" if INTERPRETED else backend.cpu_backend()):
        yield


def _sequence(completion: Completion) -> TrainSequence:
    params = completion.params
    return TrainSequence(
        key=completion.key,
        tokens=[*completion.prompt, *completion.tokens],
        prompt_length=len(completion.prompt),
        logprobs_engine=torch.tensor(completion.logprobs, dtype=torch.float32),
        loss_mask=torch.ones(len(completion.tokens), dtype=torch.bool),
        advantage=1.0,
        weights_version=0,
        sampler=SequenceSampler(params.temperature, params.top_k, params.top_p, params.min_p, ()),
    )


def _decoder(dtype: torch.dtype, layers: int = 1) -> Decoder:
    decoder = random_decoder(replace(ModelConfig.from_folder(FOLDER), num_layers=layers))
    decoder.dtype = dtype
    return decoder.to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_token_differs(dtype: torch.dtype) -> None:
    decoder = _decoder(dtype)
    sizes = EngineConfig(num_pages=40, page_size=4, max_rows_per_step=7)
    engine = Engine(copy.deepcopy(decoder), load_tokenizer(FOLDER), sizes)
    assert backend.of(decoder.lm_head_weight).__name__ == "zerogap.ops.triton"
    params = SamplingParams(max_tokens=3, temperature=0.8, top_p=0.9)
    prompts = (tuple(range(3, 8)), tuple(range(3, 11)))
    completions = engine.generate([Request((0, i, 0), prompt, params) for i, prompt in enumerate(prompts)])
    with ambient.guard():
        scores = score(decoder, [_sequence(completion) for completion in completions], micro_batch_rows=50)
    for completion, scored in zip(completions, scores, strict=True):
        recorded = torch.tensor(completion.logprobs, dtype=torch.float32)
        assert bits(scored.logprob_T).tolist() == bits(recorded).tolist()
        assert bool((recorded > -20).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_ops_have_the_bits_of_the_ops_that_hooks_hear(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, rows, calls = _decoder(dtype, layers=2), Rows.packed([[3, 5, 8], [4]]), []
    for name, kernel in (("norm", "norm_forward"), ("rotary", "rotate")):
        module = sys.modules[f"zerogap.ops.triton.{name}"]
        honest = getattr(module, kernel)

        def counted(x, other, *rest, _name=kernel, _honest=honest):  # type: ignore[no-untyped-def]
            calls.append(_name if other is not None else "alone")
            return _honest(x, other, *rest)

        monkeypatch.setattr(module, kernel, counted)
    fused = decoder.hidden(rows, PackedCache())
    assert calls.count("norm_forward") == 4, "each residual but the embedding is added by a norm"
    assert calls.count("rotate") == 4
    calls.clear()
    heard: list[tuple[int, str]] = []
    alone = decoder.hidden(rows, PackedCache(), (lambda layer, op, x: heard.append((layer, op)) or x,))
    assert set(calls) == {"alone"}
    assert {(0, "attn_residual"), (0, "mlp_residual"), (1, "mlp_residual"), (1, "q_norm")} <= set(heard)
    assert torch.equal(bits(fused), bits(alone))
    monkeypatch.setattr(decoder, "gradient_checkpointing", True)
    assert torch.equal(bits(decoder.hidden(rows, PackedCache())), bits(alone))


def test_a_step_in_bfloat16_shares_prompts_and_repeats() -> None:
    found = []
    for _ in range(2):
        decoder = _decoder(torch.bfloat16)
        optimiser = Optimiser(decoder.named_parameters(), OptimiserSettings(1e-3))
        sequences = [
            TrainSequence((0, 0, i), [3, 5, 8, 4 + i, 6], 3, torch.full((2,), -5.0), torch.ones(2, dtype=torch.bool),
                          advantage, 0, SequenceSampler(1.0, 0))
            for i, advantage in enumerate((1.0, -0.5))
        ]  # fmt: skip
        result = accumulate(decoder, optimiser, sequences, StepSettings())
        assert result.rows == 3 + 2 * 1, "the prompt's rows come once"
        gradients = {name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None}
        assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
        before = {name: master.detach().clone() for name, master in optimiser.masters.items()}
        optimiser.apply()
        assert all(not torch.equal(master, before[name]) for name, master in optimiser.masters.items())
        assert all(torch.equal(bits(p), bits(optimiser.masters[n].to(p.dtype))) for n, p in decoder.named_parameters())
        found.append([*gradients.values(), *optimiser.masters.values()])
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(*found, strict=True))
