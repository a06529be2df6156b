"""Weights rounded to bfloat16 on both sides: the gap is 0, and is not if one side keeps float32."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.engine.build import LetterTokenizer
from tests.support import random_decoder, same_bits
from zerogap import ops
from zerogap.certify.whole import _sequence
from zerogap.engine import Engine, EngineConfig, Request, SamplingParams
from zerogap.errors import UsageError
from zerogap.models.decoder import Decoder
from zerogap.models.rows import PackedCache, PagedCache, Rows, SequenceRows
from zerogap.ops import ambient, backend
from zerogap.ops.rounding import round_weight
from zerogap.trainer import Optimiser, OptimiserSettings, score

pytestmark = pytest.mark.skipif(bool(backend.native_missing()), reason="no zerogap-kernels")
FAMILIES = ("qwen3", "qwen2", "llama")
SAMPLERS = ({}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02})


@pytest.fixture(autouse=True)
def native() -> object:
    with backend.using("native"):
        yield


def rounded_by_hand(decoder: Decoder) -> Decoder:
    """A float32 decoder that holds the rounded values."""
    other = copy.deepcopy(decoder).compute_with("float32")
    with torch.no_grad():
        for weight in other.parameters():
            if weight.dim() == 2:
                weight.copy_(weight.bfloat16().float())
    return other


def different_tokens(engine_side: Decoder, trainer_side: Decoder, shared: bool = False) -> tuple[int, int]:
    """Generate with one and score with the other, at other thread counts and chunks; (tokens, different)."""
    params = [SamplingParams(max_tokens=9, min_tokens=2, **settings) for settings in SAMPLERS]
    requests = [
        Request((number, prompt, sample), tuple(range(1, 6 + 7 * prompt)), params[number])
        for number in range(len(params))
        for prompt in range(3)
        for sample in range(2)
    ]
    before, compared, different = torch.get_num_threads(), 0, 0
    try:
        for threads, pages, rows in ((1, 16, 512), (2, 5, 7)):
            torch.set_num_threads(threads)
            config = EngineConfig(num_pages=400, page_size=pages, max_rows_per_step=rows)
            completions = Engine(engine_side, LetterTokenizer(), config, shared=shared).generate(requests)
            torch.set_num_threads(1)
            sequences = [_sequence(completion) for completion in completions]
            with ambient.guard():
                scores = score(trainer_side, sequences, micro_batch_rows=31)
            for sequence, scored in zip(sequences, scores, strict=True):
                compared += sequence.trained_count
                different += int((sequence.trained_logprobs_engine != scored.logprob_T).sum())
    finally:
        torch.set_num_threads(before)
    return compared, different


@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("qwen2", False), ("llama", True)])
def test_the_gap_is_0_and_is_not_with_float32_on_one_side(family: str, tied: bool) -> None:
    masters = random_decoder(family, tie_word_embeddings=tied).compute_with("bfloat16")
    compared, different = different_tokens(masters.twin(), masters, shared=True)
    assert compared > 150
    assert different == 0
    assert different_tokens(copy.deepcopy(masters), masters) == (compared, 0), "a copy rounds too"
    plain = copy.deepcopy(masters).compute_with("float32")
    compared, different = different_tokens(plain, masters)
    assert different > compared / 2, "the control must differ"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_is_that_of_the_rounded_values(family: str) -> None:
    masters = random_decoder(family).compute_with("bfloat16").eval()
    by_hand, rows = rounded_by_hand(masters), Rows.build([SequenceRows([1, 2, 3, 4, 5], 0, [0])], 16)
    with torch.no_grad():
        program = masters.hidden(rows, PagedCache(masters.config, 1, 16))
        expected = by_hand.hidden(Rows.packed([[1, 2, 3, 4, 5]]), PackedCache())
        assert same_bits(program, expected)
        assert same_bits(masters.hidden(Rows.packed([[1, 2, 3, 4, 5]]), PackedCache()), expected)
        assert same_bits(masters.logits(expected), by_hand.logits(expected))


def gradients(decoder: Decoder) -> dict[str, torch.Tensor]:
    decoder.zero_grad()
    hidden_RK = decoder.hidden(Rows.packed([list(range(1, 30)), [4, 9, 2]]), PackedCache())
    settings = ops.SamplerRows.uniform_settings(len(hidden_RK), 0.9)
    targets = torch.arange(len(hidden_RK)) % decoder.config.vocab_size
    ops.token_logprobs(hidden_RK, decoder.lm_head_weight, targets, settings).logprob_R.mean().backward()
    return {name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_at_the_rounded_values_and_reach_the_masters(family: str) -> None:
    masters = random_decoder(family).compute_with("bfloat16")
    ours, by_hand = gradients(masters), gradients(rounded_by_hand(masters))
    assert ours.keys() == by_hand.keys() == dict(masters.named_parameters()).keys()
    for name, gradient in ours.items():
        scale = float(by_hand[name].abs().max())
        assert torch.allclose(gradient, by_hand[name], rtol=1e-5, atol=1e-6 * scale), name
    float32 = gradients(copy.deepcopy(masters).compute_with("float32"))
    assert any(not torch.allclose(ours[name], float32[name], rtol=1e-5, atol=1e-6) for name in ours)


def test_masters_move_by_less_than_a_bfloat16_step_and_both_sides_follow() -> None:
    masters = random_decoder("qwen3").compute_with("bfloat16")
    engine = Engine(masters.twin(), LetterTokenizer(), EngineConfig(num_pages=50), shared=True)
    optimiser = Optimiser(masters.named_parameters(), OptimiserSettings(1e-6))
    asked = [Request((0, 0, 0), (5, 9, 2), SamplingParams(max_tokens=8))]
    first = engine.generate(asked)[0]
    before = {name: p.detach().clone() for name, p in masters.named_parameters()}
    gradients(masters)
    optimiser.apply()
    engine.weights_changed(1)
    moved = {name for name, p in masters.named_parameters() if not torch.equal(p, before[name])}
    rounded = {n for n, p in masters.named_parameters() if not torch.equal(p.bfloat16(), before[n].bfloat16())}
    assert moved == before.keys()
    assert len(rounded) < len(moved) or first.logprobs != engine.generate(asked)[0].logprobs
    assert different_tokens(masters.twin(), masters, shared=True)[1] == 0


def test_it_is_refused_without_the_native_backend() -> None:
    masters = random_decoder().compute_with("bfloat16")
    with backend.using("portable"):
        with pytest.raises(UsageError, match="weights in bfloat16 need the native backend"):
            masters.hidden(Rows.packed([[1, 2]]), PackedCache())
        with pytest.raises(UsageError, match="need the native backend"):
            random_decoder().compute_with("bfloat16")
    with pytest.raises(UsageError, match="arithmetic in float32"):
        random_decoder(dtype=torch.float64).compute_with("bfloat16")


def test_half_the_bytes_are_packed() -> None:
    packed = pytest.importorskip("zerogap.ops.native.packed").packed
    weight = torch.nn.Parameter(torch.randn(64, 32))
    whole = packed(weight).bytes
    round_weight(weight, True)
    assert packed(weight).bytes == whole // 2
    round_weight(weight, False)
    assert packed(weight).bytes == whole
