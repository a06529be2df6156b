"""Gradients of attention under the interpreter: right and repeatable, where sequences share a prompt too."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from zerogap.ops.triton import AttentionPlan, Chunk, attention
from zerogap.ops.triton.table import attention_tile
from zerogap.ops.triton.targets import INTERPRETER

BLOCK = attention_tile(INTERPRETER, "float32", 16, 1, "backward").key_block
Op = Callable[[Tensor, Tensor, Tensor, AttentionPlan, float], Tensor]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def words(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def groups_of(prompts: tuple[int, ...], responses: tuple[int, ...]) -> list[Chunk]:
    """As the trainer lays them out: a prompt's rows, then each response behind them; a page is a row."""
    chunks, count = [], 0
    for prompt in prompts:
        before = range(count, count + prompt)
        chunks.append(Chunk(0, prompt, before))
        count += prompt
        for response in responses:
            chunks.append(Chunk(prompt, response, [*before, *range(count, count + response)]))
            count += response
    return chunks


def exact(q: Tensor, k: Tensor, v: Tensor, chunks: list[Chunk], page_size: int, scale: float) -> Tensor:
    """The plain mathematics over each chunk's own keys, differentiable."""
    share, first, out = q.shape[1] // k.shape[1], 0, []
    for chunk in chunks:
        stop = chunk.start + chunk.count
        slots = [chunk.block_table[p // page_size] * page_size + p % page_size for p in range(stop)]
        keys, values = (x[slots].repeat_interleave(share, 1) for x in (k, v))
        scores = torch.einsum("rhd,phd->hrp", q[first : first + chunk.count], keys) * scale
        later = torch.arange(stop) > torch.arange(chunk.start, stop).unsqueeze(1)
        out.append(torch.einsum("hrp,phd->rhd", scores.masked_fill(later, -torch.inf).softmax(-1), values))
        first += chunk.count
    return torch.cat(out)


def inputs(chunks: list[Chunk], slots: int, heads: int = 2, groups: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    rows = sum(chunk.count for chunk in chunks)
    return normal(rows, heads, 16), normal(slots, groups, 16, seed=1), normal(slots, groups, 16, seed=2)


def gradients(chunks: list[Chunk], page_size: int, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    if q.dtype == torch.float64:
        out = exact(*leaves, chunks, page_size, 0.3)
    else:
        out = attention(*leaves, AttentionPlan.build(chunks, page_size), 0.3)
    upstream = normal(*out.shape, seed=3).to(out.dtype)
    return list(torch.autograd.grad(out, leaves, upstream))


def errors(chunks: list[Chunk], page_size: int, slots: int, heads: int = 2, groups: int = 1) -> list[float]:
    given = inputs(chunks, slots, heads, groups)
    ours, true = gradients(chunks, page_size, *given), gradients(chunks, page_size, *(x.double() for x in given))
    return [float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(ours, true, strict=True)]


@pytest.mark.parametrize("prompt", [1, BLOCK - 1, BLOCK, BLOCK + 3])
def test_a_shared_prompt_gets_the_gradients_of_all_its_responses(prompt: int) -> None:
    chunks = groups_of((prompt, 5), (3, BLOCK + 2, 1))
    assert max(errors(chunks, 1, sum(chunk.count for chunk in chunks), heads=4, groups=2)) < 2e-5


def test_a_shared_page_that_one_sequence_fills_further() -> None:
    """Two sequences of a prefix cache: a page of theirs is shared, and the last page of one reaches further."""
    chunks = [Chunk(2, 4, [0, 1, 3]), Chunk(2, 1, [0, 2]), Chunk(0, 4, [0, 1])]
    assert max(errors(chunks, 2, 8)) < 2e-5


def test_without_owners_the_gradients_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: each sequence writes the gradients of its own rows, and the last one stays."""

    def unshared(plan: AttentionPlan) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray]]:
        every = np.arange(len(plan.start_S))
        return every, np.zeros_like(every), plan.start_S + plan.count_S, [every[i : i + 1] for i in every]

    chunks = groups_of((BLOCK + 3,), (3, 5))
    rows = sum(chunk.count for chunk in chunks)
    monkeypatch.setattr(AttentionPlan, "_runs", unshared)
    query, *keys = errors(chunks, 1, rows)
    assert query < 2e-5
    assert min(keys) > 1e-2


def test_gradients_repeat_in_the_order_of_the_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = groups_of((BLOCK + 3, 7), (3, BLOCK, 5))
    given = inputs(chunks, sum(chunk.count for chunk in chunks))
    first, second = (gradients(chunks, 1, *given) for _ in range(2))
    assert all(torch.equal(words(a), words(b)) for a, b in zip(first, second, strict=True))
    honest = AttentionPlan._runs

    def reversed_members(plan: AttentionPlan) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray]]:
        *columns, members = honest(plan)
        return *columns, [some[::-1] for some in members]

    monkeypatch.setattr(AttentionPlan, "_runs", reversed_members)
    other = gradients(chunks, 1, *given)
    assert not all(torch.equal(words(a), words(b)) for a, b in zip(first, other, strict=True)), "the order matters"


def test_a_page_at_two_positions_is_refused() -> None:
    chunks = [Chunk(0, 2, [0, 1]), Chunk(0, 2, [1, 0])]
    q, k, v = (x.requires_grad_() for x in inputs(chunks, 2))
    out = attention(q, k, v, AttentionPlan.build(chunks, 1), 0.3)
    with pytest.raises(ValueError, match="a page stands at two positions"):
        out.sum().backward()


def tiles(chunks: list[Chunk], page_size: int, key_block: int = 16) -> tuple[list[list[int]], list[list[int]]]:
    found, members = AttentionPlan.build(chunks, page_size).key_tiles(key_block)
    return found.tolist(), members.tolist()


def test_key_tiles_by_hand() -> None:
    chunks = [Chunk(3, 5, [4, 0, 2]), Chunk(0, 1, [1]), Chunk(20, 2, [7, 8, 9, 10, 11, 12, 13, 14])]
    found, members = tiles(chunks, 3)
    assert found == [[0, 0, 0, 8, 0, 1], [1, 0, 0, 1, 1, 1], [2, 0, 0, 16, 2, 1], [2, 16, 16, 22, 2, 1]]
    assert members == [[0, 3, 8], [5, 0, 1], [6, 20, 22]]
    found, members = tiles([Chunk(2, 2, [0, 1]), Chunk(2, 1, [0, 2])], 2)
    assert found == [[0, 0, 0, 2, 0, 2], [0, 0, 2, 4, 2, 1], [1, 0, 2, 3, 3, 1]]
    assert members == [[0, 2, 4], [2, 2, 3], [0, 2, 4], [2, 2, 3]]


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[Chunk], int]:
    """Sequences that share beginnings of any length, rows from anywhere on."""
    page_size = draw(st.sampled_from([1, 2, 5]))
    chunks: list[Chunk] = []
    free = iter(range(10_000))
    for _ in range(draw(st.integers(1, 5))):
        parent = draw(st.sampled_from([None, *chunks]))
        kept = 0 if parent is None else draw(st.integers(0, len(parent.block_table)))
        table = [*(parent.block_table[:kept] if parent else []), *(next(free) for _ in range(draw(st.integers(1, 4))))]
        stop = draw(st.integers((len(table) - 1) * page_size + 1, len(table) * page_size))
        start = draw(st.integers(0, stop - 1))
        chunks.append(Chunk(start, stop - start, table))
    return chunks, page_size


@settings(max_examples=150, deadline=None, derandomize=True)
@given(tree=trees(), key_block=st.sampled_from([4, 16]))
def test_each_key_has_one_tile_with_all_that_see_it(tree: tuple[list[Chunk], int], key_block: int) -> None:
    chunks, size = tree
    first_rows = np.cumsum([0, *(chunk.count for chunk in chunks)])
    expected: dict[int, list[list[int]]] = {}
    for row, chunk in zip(first_rows, chunks, strict=False):
        stop = chunk.start + chunk.count
        for position in range(stop):
            slot = chunk.block_table[position // size] * size + position % size
            expected.setdefault(slot, []).append([int(row), chunk.start, stop])
    found, members = tiles(chunks, size, key_block)
    seen = set()
    for sequence, key0, low, high, first, count in found:
        assert key0 % key_block == 0
        assert key0 <= low < high <= key0 + key_block
        for position in range(low, high):
            slot = chunks[sequence].block_table[position // size] * size + position % size
            assert slot not in seen
            seen.add(slot)
            some = members[first : first + count]
            # A member may end within the shared page: its rows see nothing of the rest, and lose nothing by it.
            assert [member for member in some if member[2] > position] == expected[slot]
    assert seen == expected.keys()
