"""Engine and trainer over the Triton kernels: chunks, pages, a shared prompt and packing, equal in every bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.ops.triton.interpreted.laws import DEVICE, INTERPRETED, bits
from zerogap.certify.whole import random_decoder
from zerogap.engine import Completion, Engine, EngineConfig, Request, SamplingParams
from zerogap.models.config import ModelConfig
from zerogap.models.tokenizer import load_tokenizer
from zerogap.ops import ambient, backend
from zerogap.trainer import SequenceSampler, TrainSequence, score

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_token_differs(dtype: torch.dtype) -> None:
    decoder = random_decoder(replace(ModelConfig.from_folder(FOLDER), num_layers=1))
    decoder.dtype = dtype
    decoder.to(DEVICE, dtype)
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
