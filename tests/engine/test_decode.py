"""Captured decode steps: replayed, they give the tokens and log-probs of the eager ones, bit for bit.

``taped`` stands for CUDA graphs: it re-does recorded ops and refuses to read values on the host. The portable sampler
does read some, so there the sampler is left out of the tape (``logprobs``); with ``rerun`` it is part of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.engine.build import LetterTokenizer, make_engine, request
from tests.engine.tape import HostReadError, taped
from tests.support import random_decoder
from zerogap.engine import Completion, Engine, EngineConfig, Request
from zerogap.engine import decode as decode_module
from zerogap.engine.capture import Capture, Field, Staging, block_bytes, rerun, views
from zerogap.engine.decode import row_ladder, width_ladder
from zerogap.ops import backend

SAMPLERS = [
    {},
    {"temperature": 0.7, "top_k": 9},
    {"temperature": 1.3, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 0.0},
    {"min_tokens": 5},
]


@pytest.fixture(autouse=True)
def _portable() -> Iterator[None]:
    with backend.using("portable"):
        yield


def crowd(count: int = 13, **params: object) -> list[Request]:
    """Requests of unlike lengths and samplers; every third shares its beginning with others."""
    generator = np.random.default_rng(5)
    requests = []
    for number in range(count):
        own = generator.integers(1, 50, 1 + number % 7).tolist()
        prompt = [7, 8, 9, 10, 11, 12, 13, 14, 15, *own] if number % 3 == 0 else own
        wanted = {"max_tokens": 5 + number % 7, "seed": number, **SAMPLERS[number % len(SAMPLERS)], **params}
        requests.append(request(number, prompt, **wanted))
    return requests


def captured_engine(capture: Capture | None, decoder: torch.nn.Module | None = None, **config: object) -> Engine:
    sizes = EngineConfig(**{"num_pages": 200, "page_size": 4, **config})  # type: ignore[arg-type]
    return Engine(decoder or random_decoder(), LetterTokenizer(), sizes, capture=capture)  # type: ignore[arg-type]


def bits(completions: list[Completion]) -> list[object]:
    return [(one.key, one.tokens, np.float32(one.logprobs).view(np.int32).tolist()) for one in completions]


CAPTURES = [pytest.param(rerun, {}, id="rerun"), pytest.param(taped, {"logprobs": 2}, id="taped")]


@pytest.mark.parametrize(("capture", "params"), CAPTURES)
@pytest.mark.parametrize(
    "config",
    [
        {"max_sequences": 16},
        {"max_sequences": 6, "num_pages": 14},  # preemption
        {"max_sequences": 3, "page_size": 3, "prefix_cache": False},
    ],
    ids=str,
)
def test_replayed_is_eager_bit_for_bit(capture: Capture, params: dict[str, object], config: dict[str, object]) -> None:
    eager, replayed = captured_engine(None, **config), captured_engine(capture, **config)
    expected, found = eager.generate(crowd(**params)), replayed.generate(crowd(**params))
    assert bits(found) == bits(expected)
    assert [one.top_logprobs for one in found] == [one.top_logprobs for one in expected]
    assert replayed.statistics.replayed_steps > replayed.statistics.steps // 2
    assert eager.statistics.replayed_steps == 0
    if "num_pages" in config:
        assert replayed.statistics.preemptions > 0
    decode = replayed._forward.decode
    assert decode is not None
    assert 1 < decode.captured < replayed.statistics.replayed_steps, "steps of several sizes, and each used again"


@pytest.mark.parametrize(("capture", "params"), CAPTURES)
def test_sequences_that_join_and_leave(capture: Capture, params: dict[str, object]) -> None:
    """Batch sizes go up and down, so that a larger step's inputs lie in the buffers of a smaller one."""
    requests = crowd(**params)
    done: dict[object, Completion] = {}
    engine = captured_engine(capture, max_sequences=16)
    for number, one in enumerate(requests):
        engine.add(one)
        for _ in range(number % 4):
            done.update({event.key: event.completion for event in engine.step() if event.completion})
    while engine.has_work():
        done.update({event.key: event.completion for event in engine.step() if event.completion})
    alone = captured_engine(None)
    for one in requests:
        assert bits([done[one.key]]) == bits(alone.generate([one]))


def test_a_long_context_changes_the_width() -> None:
    prompt = [number % 49 + 1 for number in range(30)]
    asked = [request(0, prompt, max_tokens=8, ignore_eos=True), request(1, (3,), max_tokens=4, ignore_eos=True)]
    engine = captured_engine(rerun, page_size=2, num_pages=50, max_sequences=2)
    assert bits(engine.generate(asked)) == bits(captured_engine(None, page_size=2).generate(asked))
    decode = engine._forward.decode
    assert decode is not None
    assert {size.width for size in decode._replays} == {16, 32}


def test_weights_changed_in_place_keep_what_is_captured() -> None:
    asked = crowd(8, logprobs=1)
    owner, other = random_decoder(), random_decoder()
    engine = Engine(
        owner.twin(), LetterTokenizer(), EngineConfig(num_pages=99, page_size=4), shared=True, capture=taped
    )
    first = bits(engine.generate(asked))
    decode = engine._forward.decode
    assert decode is not None
    replays = dict(decode._replays)
    for decoder in (owner, other):
        with torch.no_grad():
            for weight in decoder.parameters():
                weight.mul_(1.0625)
    engine.weights_changed(1)
    second = bits(engine.generate(asked))
    assert second != first
    assert second == bits(captured_engine(None, other).generate(asked))
    assert all(decode._replays[size] is replay for size, replay in replays.items())
    # A weight that lies elsewhere: what was captured would read the old one.
    with torch.no_grad():
        owner.model.norm.weight.data = owner.model.norm.weight.data * 1.5
        other.model.norm.weight.mul_(1.5)
    engine.weights_changed(2)
    assert not decode._replays
    assert bits(engine.generate(asked)) == bits(captured_engine(None, other).generate(asked))


def test_loaded_weights() -> None:
    asked, other = crowd(6, logprobs=1), random_decoder(seed=3)
    engine = captured_engine(taped)
    engine.generate(asked)
    engine.load_weights(other.state_dict(), 1)
    assert bits(engine.generate(asked)) == bits(captured_engine(None, random_decoder(seed=3)).generate(asked))


def test_hooks_are_heard_so_such_steps_are_eager() -> None:
    engine = captured_engine(rerun)
    heard: list[str] = []

    def hook(layer: int, op: str, x: torch.Tensor) -> torch.Tensor:
        heard.append(op)
        return x

    engine.hooks = (hook,)
    engine.generate(crowd(3))
    assert heard.count("final_norm") == engine.statistics.steps
    assert engine.statistics.replayed_steps == 0


def test_the_recorded_schedule_replays() -> None:
    """`zerogap.engine.replay` runs eagerly what was captured; it gives the same hidden rows."""
    from zerogap.engine import replay

    engine = captured_engine(rerun, max_sequences=5)
    completions = engine.generate(crowd(5, logprobs=0))
    steps = list(replay(engine.trace, engine.decoder, engine.new_cache))
    assert len(steps) == engine.statistics.steps
    assert len(completions) == 5


# What must be caught.


def padding_on_a_live_page(host: dict[str, np.ndarray], sequences: list[object], page_size: int, page: int) -> None:
    """Let padding rows write to the first page of the first sequence."""
    FILL(host, sequences, page_size, sequences[0].block_table[0])  # type: ignore[arg-type, attr-defined]


def stale_lengths(host: dict[str, np.ndarray], sequences: list[object], page_size: int, page: int) -> None:
    """Forget to write how many keys a row has."""
    before = host["length_R"].copy()
    FILL(host, sequences, page_size, page)  # type: ignore[arg-type]
    host["length_R"][:] = np.maximum(before, 1)


def stale_keys(host: dict[str, np.ndarray], sequences: list[object], page_size: int, page: int) -> None:
    """Forget to write a row's place in the random numbers."""
    before = host["key_R5"].copy()
    FILL(host, sequences, page_size, page)  # type: ignore[arg-type]
    host["key_R5"][:] = before


FILL = decode_module.fill_rows


@pytest.mark.parametrize("wrong", [padding_on_a_live_page, stale_lengths, stale_keys])
def test_wrong_inputs_are_caught(wrong: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = crowd(5, max_tokens=12, min_tokens=0, ignore_eos=True)  # five rows: three of padding
    expected = bits(captured_engine(None).generate(asked))
    assert bits(captured_engine(rerun).generate(asked)) == expected
    monkeypatch.setattr(decode_module, "fill_rows", wrong)
    assert bits(captured_engine(rerun).generate(asked)) != expected


def test_stale_tables_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows keep their block table from step to step only where the sequence and its pages are the same."""
    asked = crowd(16)
    expected = bits(captured_engine(None, max_sequences=6).generate(asked))
    original = decode_module.DecodeSteps._write

    def believing(self: decode_module.DecodeSteps, sequences: list[object], size: decode_module.Size) -> None:
        """Take any row with as many pages as the row had before for the same sequence."""
        tables = [one.block_table for one in sequences]  # type: ignore[attr-defined]
        self._tables = [
            (table if count == len(table) else pages, count)
            for table, (pages, count) in zip(tables, self._tables, strict=False)
        ]
        original(self, sequences, size)  # type: ignore[arg-type]

    monkeypatch.setattr(decode_module.DecodeSteps, "_write", believing)
    engine = captured_engine(rerun, max_sequences=6)
    assert bits(engine.generate(asked)) != expected


def test_reading_on_the_host_is_caught() -> None:
    x = torch.ones(3)
    for read in (lambda: bool(x.any()), lambda: x.sum().item(), lambda: x[x > 0], lambda: x.nonzero()):
        with pytest.raises(HostReadError):
            taped(lambda read=read: read() and None)


def test_a_value_that_python_computed_is_part_of_what_was_captured() -> None:
    """The tape tells a captured constant from an input, as a graph does: else the tests above prove nothing."""
    source, goal, factor = torch.ones(2), torch.zeros(2), [2.0]
    replay = taped(lambda: goal.copy_(source * factor[0]))
    factor[0] = 5.0
    source.fill_(3.0)
    replay()
    assert goal.tolist() == [6.0, 6.0]


# Sizes and transfers.


def test_one_transfer_each_way_per_replayed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    ways: list[str] = []
    for way in ("upload", "download"):
        original = getattr(Staging, way)
        monkeypatch.setattr(
            Staging, way, lambda self, size, way=way, original=original: (ways.append(way), original(self, size))
        )
    engine = captured_engine(rerun)
    engine.generate(crowd(9, min_tokens=0))
    replayed = engine.statistics.replayed_steps
    assert replayed > 5
    assert ways == ["upload", "download"] * replayed


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 9, 16, 17, 100, 256])
def test_ladders(most: int) -> None:
    for ladder in (row_ladder(most), width_ladder(most)):
        assert ladder[-1] >= most
        assert list(ladder) == sorted(set(ladder))
    assert row_ladder(most)[-1] < most + 16
    assert width_ladder(most)[-1] == most
    assert len(width_ladder(100_000)) < 20


def test_fields_lie_apart_and_aligned() -> None:
    fields = (Field("a", (3,), torch.int32), Field("b", (2, 5), torch.float64), Field("c", (1,), torch.int64))
    block = torch.zeros(block_bytes(fields), dtype=torch.uint8)
    found = views(block, fields)
    for number, tensor in enumerate(found.values(), 1):
        assert (tensor.data_ptr() - block.data_ptr()) % 16 == 0
        tensor.fill_(number)
    assert [tensor.unique().tolist() for tensor in found.values()] == [[1], [2], [3]]
    assert block_bytes(fields) == 16 + 80 + 16


def test_eager_engines_have_no_captured_steps() -> None:
    engine = make_engine()
    assert engine._forward.decode is None
    assert replace(engine.config, cuda_graphs=False).cuda_graphs is False
