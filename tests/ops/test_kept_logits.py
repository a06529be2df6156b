"""Logits that the forward keeps for the backward: the same bits as logits computed again, within a stated memory."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import same_bits
from zerogap import ops
from zerogap.ops import backend
from zerogap.ops.rounding import round_weight

zerogap_kernels = pytest.importorskip("zerogap_kernels")
calls = importlib.import_module("zerogap.ops.native.calls")
logprob = importlib.import_module("zerogap.ops.native.logprob")

ROWS, DEPTH, VOCABULARY = (
    600,
    24,
    1100,
)  # three parts of the backward; two blocks of the vocabulary, the second not whole
TARGET = torch.arange(ROWS) * 7 % VOCABULARY
SETTINGS: dict[str, ops.SamplerRows] = {
    "plain": ops.SamplerRows.uniform_settings(ROWS),
    "temperature": ops.SamplerRows.uniform_settings(ROWS, 0.7),
    "greedy": ops.SamplerRows.uniform_settings(ROWS, 0.0),
    "filtered": ops.SamplerRows.uniform_settings(ROWS, 0.9, 200, 0.9, 0.001),
}


@pytest.fixture(autouse=True)
def native() -> object:
    with backend.using("native"):
        yield


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of the backward kernel found kept logits, in order."""
    seen: list[bool] = []
    run: Callable[..., None] = calls.token_logprobs_backward

    def listen(*arguments: Any, in_place: bool, **others: Any) -> None:
        seen.append(in_place)
        run(*arguments, in_place=in_place, **others)

    monkeypatch.setattr(calls, "token_logprobs_backward", listen)
    return seen


def leaves(rounded: bool = False) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    hidden = torch.randn(ROWS, DEPTH, generator=random).requires_grad_()
    head = torch.randn(VOCABULARY, DEPTH, generator=random).requires_grad_()
    round_weight(head, rounded)
    return hidden, head


def results(settings: ops.SamplerRows, rounded: bool = False) -> list[Tensor]:
    """Log-probs, entropies and both gradients."""
    hidden, head = leaves(rounded)
    scored = ops.token_logprobs(hidden, head, TARGET, settings)
    upstream = torch.randn(ROWS, generator=torch.Generator().manual_seed(4))
    return [
        scored.logprob_R.detach(),
        scored.entropy_R,
        *torch.autograd.grad(scored.logprob_R, [hidden, head], upstream),
    ]


def room_for(rows: int) -> int:
    return rows * 4 * logprob._table_width(VOCABULARY)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_kept_and_computed_again_have_the_same_bits(
    name: str, rounded: bool, modes: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for rows, expected in (
        (ROWS, [True] * 3),
        (ROWS - 1, [True, True, False]),
        (300, [True, False, False]),
        (255, [False] * 3),
    ):
        monkeypatch.setattr(logprob, "KEPT_LOGITS_BYTES", room_for(rows))
        found.append(results(SETTINGS[name], rounded))
        assert modes == expected
        modes.clear()
    for other in found[1:]:
        assert all(same_bits(a, b) for a, b in zip(found[0], other, strict=True))


def test_the_comparison_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: one kept logit, of a likely token, is off by the last place of its float."""
    expected = results(SETTINGS["plain"])
    run = calls.token_logprobs

    def spoil(*arguments: Any, logits: Tensor | None = None, **others: Any) -> None:
        run(*arguments, logits=logits, **others)
        assert logits is not None
        likely = logits[5, :VOCABULARY].argmax()
        logits[5, likely] = torch.nextafter(logits[5, likely], torch.tensor(99.0))

    monkeypatch.setattr(calls, "token_logprobs", spoil)
    spoiled = results(SETTINGS["plain"])
    assert [same_bits(a, b) for a, b in zip(expected, spoiled, strict=True)] == [True, True, False, False]


def test_a_second_backward_computes_again(modes: list[bool]) -> None:
    hidden, head = leaves()
    scored = ops.token_logprobs(hidden, head, TARGET, SETTINGS["temperature"]).logprob_R
    first, second = (torch.autograd.grad(scored.sum(), [hidden, head], retain_graph=True) for _ in range(2))
    assert modes == [True] * 3 + [False] * 3
    assert all(same_bits(a, b) for a, b in zip(first, second, strict=True))


def test_two_forwards_before_their_backwards_do_not_share_memory() -> None:
    once = [results(SETTINGS[name]) for name in ("plain", "temperature")]
    pairs = [leaves() for _ in range(2)]
    scored = [
        ops.token_logprobs(*pair, TARGET, SETTINGS[name]).logprob_R
        for pair, name in zip(pairs, ("plain", "temperature"), strict=True)
    ]
    upstream = torch.randn(ROWS, generator=torch.Generator().manual_seed(4))
    for one, pair, expected in zip(scored, pairs, once, strict=True):
        got = torch.autograd.grad(one, pair, upstream)
        assert all(same_bits(a, b) for a, b in zip(got, expected[2:], strict=True))


def test_nothing_is_kept_without_a_backward() -> None:
    hidden, head = leaves()
    before = zerogap_kernels.pool_bytes()
    with torch.no_grad():
        ops.token_logprobs(hidden, head, TARGET, SETTINGS["plain"])
    ops.token_logprobs(hidden.detach(), head.detach(), TARGET, SETTINGS["plain"])
    assert zerogap_kernels.pool_bytes() == before
    assert logprob._rows_to_keep(2729, 49152) == 2729
    assert logprob._rows_to_keep(2730, 49152) == 2560
    assert logprob._rows_to_keep(5000, 151936) == 768
    assert logprob._rows_to_keep(100, 1 << 20) == 100
    assert logprob._rows_to_keep(200, 1 << 20) == 0


def test_memory_serves_again(modes: list[bool]) -> None:
    used, _ = zerogap_kernels.pool_bytes()
    first = results(SETTINGS["plain"])
    kept = sum(zerogap_kernels.pool_bytes())
    for _ in range(3):
        again = results(SETTINGS["plain"])
        assert all(same_bits(a, b) for a, b in zip(first, again, strict=True))
        del again
    assert modes == [True] * 12
    assert sum(zerogap_kernels.pool_bytes()) <= 1.1 * kept
    del first
    assert zerogap_kernels.pool_bytes()[0] == used
