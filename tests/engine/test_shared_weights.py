"""An engine over weights that somebody else changes: it follows, and never generates with a mixture."""

from __future__ import annotations

import pytest
import torch

from tests.engine.build import LetterTokenizer, make_engine, request
from tests.support import random_decoder
from zerogap.engine import Engine, EngineConfig
from zerogap.errors import NotHeldError, UsageError, ZerogapError
from zerogap.models.decoder import Decoder
from zerogap.models.weights import weights_digest
from zerogap.ops import backend

BACKENDS = [
    pytest.param("native", marks=pytest.mark.skipif(bool(backend.native_missing()), reason="no zerogap-kernels")),
    "portable",
]
NAME = "model.layers.1.mlp.up_proj.weight"
PROMPT = (5, 9, 2, 7, 30, 11, 3, 3, 8, 20, 41, 6, 17, 25, 2, 9, 14)


def shared(owner: Decoder) -> Engine:
    return Engine(owner.twin(), LetterTokenizer(), EngineConfig(num_pages=50), shared=True)


def update(owner: Decoder) -> None:
    with torch.no_grad():
        for weight in owner.parameters():
            weight.mul_(1.125)


@pytest.mark.parametrize("name", BACKENDS)
def test_it_follows_every_announced_change(name: str) -> None:
    with backend.using(name):
        owner, asked = random_decoder(), [request(0, PROMPT, max_tokens=12)]
        engine = shared(owner)
        first = engine.generate(asked)[0]
        assert first == make_engine(random_decoder()).generate(asked)[0]
        update(owner)
        engine.weights_changed(4)
        assert (engine.version, engine.trace.version, engine.trace.steps) == (4, 4, [])
        assert engine.digest == weights_digest(owner.state_dict())
        second, fresh = engine.generate(asked)[0], random_decoder()
        update(fresh)
        expected = make_engine(fresh).generate(asked)[0]
        assert second.cached_tokens == 0, "no page of the old weights is used"
        assert (second.tokens, second.logprobs) == (expected.tokens, expected.logprobs)
        assert second.logprobs != first.logprobs


def test_the_tensors_are_the_owner_s_and_stay_trainable() -> None:
    owner = random_decoder()
    engine = shared(owner)
    pairs = list(zip(owner.parameters(), engine.decoder.parameters(), strict=True))
    assert all(ours is theirs and ours.requires_grad for ours, theirs in pairs)
    assert engine.decoder is not owner
    with pytest.raises(UsageError, match="call weights_changed"):
        engine.load_weights(owner.state_dict(), 1)
    with pytest.raises(UsageError, match="call load_weights"):
        make_engine().weights_changed(1)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_change_that_was_not_announced_is_refused(name: str) -> None:
    with backend.using(name):
        owner = random_decoder()
        engine = shared(owner)
        engine.add(request(0, PROMPT))
        engine.step()
        with torch.no_grad():
            owner.get_parameter(NAME)[3, 3] += 1
        with pytest.raises(ZerogapError, match=f"engine: {NAME} has changed since the engine took version 0") as error:
            engine.step()
        assert "\n" not in str(error.value)
        with pytest.raises(UsageError, match="weights_changed: 1 requests still wait or run"):
            engine.weights_changed(1)
        engine.abort((0, 0, 0))
        engine.weights_changed(1)
        assert engine.generate([request(0, PROMPT)])


@pytest.mark.skipif(bool(backend.native_missing()), reason="no zerogap-kernels")
def test_a_stale_packed_copy_is_named() -> None:
    """A write that torch does not count: the copy that both sides would compute with keeps the old value."""
    with backend.using("native"):
        owner = random_decoder()
        engine = shared(owner)
        engine.generate([request(0, PROMPT)])
        engine.weights_changed(1)
        owner.get_parameter(NAME).data[3, 3] += 1
        with pytest.raises(NotHeldError, match=rf"packed copy of {NAME} \(and 0 more\) does not hold the weight"):
            engine.weights_changed(2)


def test_a_decoder_that_has_run_can_be_twinned() -> None:
    engine = make_engine()
    engine.generate([request(0, PROMPT)])
    twin = engine.decoder.twin()
    ours, theirs = (some.generate([request(0, PROMPT)])[0] for some in (engine, make_engine(twin)))
    assert (ours.tokens, ours.logprobs) == (theirs.tokens, theirs.logprobs)
