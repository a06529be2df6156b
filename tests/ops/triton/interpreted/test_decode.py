"""Captured decode steps over the Triton kernels: the whole step, sampler included, as a graph would hold it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.tape import taped
from tests.ops.triton.interpreted.laws import DEVICE, INTERPRETED
from zerogap import ops
from zerogap.certify.whole import random_decoder
from zerogap.engine import Completion, Engine, EngineConfig, Request, SamplingParams
from zerogap.models.config import ModelConfig
from zerogap.models.rows import PackedCache, Rows
from zerogap.models.tokenizer import load_tokenizer
from zerogap.ops import backend
from zerogap.ops.portable import sampling as portable
from zerogap.ops.triton.philox import uniform_rows

FOLDER = Path(__file__).parents[4] / "src" / "zerogap" / "data" / "tiny-qwen3"
SAMPLERS = ({}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 0.0}, {"top_k": 5, "min_p": 0.01})


@pytest.fixture(autouse=True)
def _triton() -> Iterator[None]:
    with backend.using("triton" if INTERPRETED else backend.cpu_backend()):
        yield


def _bits(completions: list[Completion]) -> list[object]:
    return [(one.key, one.tokens, np.float32(one.logprobs).view(np.int32).tolist()) for one in completions]


def _requests(count: int, filters: bool) -> list[Request]:
    return [
        Request(
            (0, number, 0),
            tuple(range(3, 5 + number)),
            SamplingParams(max_tokens=3 + number, seed=7, **(SAMPLERS[number % len(SAMPLERS)] if filters else {})),
        )
        for number in range(count)
    ]


@pytest.mark.parametrize(("dtype", "filters"), [(torch.bfloat16, True), (torch.float32, False)])
def test_replayed_is_eager_bit_for_bit(dtype: torch.dtype, filters: bool) -> None:
    """On a GPU the steps are CUDA graphs; under the interpreter a tape of ops and launches stands for them."""
    decoder = random_decoder(replace(ModelConfig.from_folder(FOLDER), num_layers=1))
    decoder.dtype = dtype
    decoder.to(DEVICE, dtype)
    tokenizer = load_tokenizer(FOLDER)
    sizes = EngineConfig(num_pages=12, page_size=4, max_sequences=4, max_rows_per_step=64)
    requests = _requests(3, filters)
    eager = Engine(copy.deepcopy(decoder), tokenizer, replace(sizes, cuda_graphs=False))
    replayed = Engine(copy.deepcopy(decoder), tokenizer, sizes, capture=taped if INTERPRETED else None)
    assert _bits(replayed.generate(requests)) == _bits(eager.generate(requests))
    decode = replayed._forward.decode
    assert decode is not None
    assert {size.sampler for size in decode._replays} >= {"filtered" if filters else "plain"}
    assert replayed.statistics.replayed_steps > len(decode._replays) > 1
    assert eager.statistics.replayed_steps == 0


def test_weights_changed_in_place_are_seen_by_what_is_captured() -> None:
    decoder = random_decoder(replace(ModelConfig.from_folder(FOLDER), num_layers=1))
    decoder.dtype = torch.bfloat16
    decoder.to(DEVICE, torch.bfloat16)
    tokenizer, requests = load_tokenizer(FOLDER), _requests(1, filters=False)
    sizes = EngineConfig(num_pages=12, page_size=4, max_sequences=4)
    engine = Engine(decoder.twin(), tokenizer, sizes, shared=True, capture=taped if INTERPRETED else None)
    first = _bits(engine.generate(requests))
    with torch.no_grad():
        for weight in decoder.parameters():
            weight.mul_(1.25)
    engine.weights_changed(1)
    second = _bits(engine.generate(requests))
    eager = Engine(copy.deepcopy(decoder), tokenizer, replace(sizes, cuda_graphs=False))
    assert second == _bits(eager.generate(requests))
    assert second != first
    decode = engine._forward.decode
    assert decode is not None
    assert decode.captured == 1 < engine.statistics.replayed_steps


@pytest.mark.skipif(not INTERPRETED, reason="reads launches from the interpreter")
def test_every_kernel_that_runs_was_foreseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `needed_kernels` finds without running anything covers a rollout and an update."""
    from triton.runtime.interpreter import GridExecutor

    from zerogap.engine.kernels import needed_kernels
    from zerogap.ops.triton.targets import INTERPRETER

    launched: set[tuple[object, ...]] = set()
    original = GridExecutor.__call__

    def call(self: GridExecutor, *args: object, **kwargs: object) -> None:
        launched.add((self.fn.__name__, *sorted(kwargs.items())))
        original(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", call)
    config = replace(ModelConfig.from_folder(FOLDER), num_layers=1)
    decoder = random_decoder(config)
    decoder.dtype = torch.bfloat16
    decoder.to(DEVICE, torch.bfloat16)
    sizes = EngineConfig(num_pages=12, page_size=4, max_sequences=4, max_rows_per_step=64)
    engine = Engine(copy.deepcopy(decoder), load_tokenizer(FOLDER), sizes, capture=taped)
    (done,) = engine.generate(_requests(1, filters=True))
    hidden_RK = decoder.hidden(Rows.packed([[*done.prompt, *done.tokens]]), PackedCache())
    settings = ops.SamplerRows.uniform_settings(len(hidden_RK), 1.0)
    target_R = torch.ones(len(hidden_RK), dtype=torch.int64)
    ops.token_logprobs(hidden_RK, decoder.lm_head_weight, target_R, settings).logprob_R.sum().backward()
    assert len(launched) > 20
    foreseen = {
        (
            launch.kernel.__name__,
            *sorted((name, value) for name, value in launch.options.items() if name not in ("num_warps", "num_stages")),
        )
        for launch in needed_kernels(config, torch.bfloat16, 4, INTERPRETER)
    }
    assert launched <= foreseen


def test_random_numbers_are_those_of_the_eager_step() -> None:
    keys = [(2**40 + 3, 2**31 + 4, 17, number, 1000 - number) for number in range(150)]
    found = uniform_rows(torch.tensor(keys, dtype=torch.int64, device=DEVICE)).cpu()
    expected = [portable.uniform(seed, [tuple(key)]).item() for seed, *key in keys]
    assert found.tolist() == expected
    assert portable.uniform_rows(torch.tensor(keys)).tolist() == expected
