"""Law 1 for the attention kernel under the interpreter: places, masks and the order of sums, not a GPU's bits."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.nn import functional

from zerogap.errors import UsageError
from zerogap.ops.triton import AttentionPlan, Chunk, attention
from zerogap.ops.triton.table import attention_tile
from zerogap.ops.triton.targets import INTERPRETER

MODULE = sys.modules["zerogap.ops.triton.attention"]
TILE = attention_tile(INTERPRETER, "float32", 16, 1)
BLOCK, SPLIT = TILE.key_block, TILE.split
BORDERS = sorted({n + d for n in (BLOCK, SPLIT, 2 * SPLIT) for d in (-1, 0, 1)} | {1, 2, SPLIT + BLOCK})


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)


@contextmanager
def splits_in(place: str) -> Iterator[None]:
    """Force splits to be walked by one program (``registers``) or by one each (``memory``)."""
    before = MODULE._PROGRAMS
    MODULE._PROGRAMS = {"registers": 0, "memory": 1 << 30}[place]
    try:
        yield
    finally:
        MODULE._PROGRAMS = before


@dataclass(frozen=True)
class Setting:
    length: int
    others: tuple[int, ...]
    page_size: int
    chunk: int
    heads: tuple[int, int]
    width: int
    fill: float
    dtype: torch.dtype = torch.float32
    place: str = "memory"


Op = Callable[[Tensor, Tensor, Tensor, AttentionPlan, float], Tensor]


def paged(setting: Setting, op: Op) -> tuple[Tensor, Tensor]:
    """Return the first sequence's rows packed whole and alone, and chunked over pages beside other sequences."""
    (heads, groups), length, size = setting.heads, setting.length, setting.page_size
    lengths = [length, *setting.others]
    q, k, v = (
        normal(sum(lengths), n, setting.width, seed=seed).to(setting.dtype)
        for seed, n in enumerate((heads, groups, groups))
    )
    with splits_in("registers"):
        whole = AttentionPlan.build([Chunk(0, length, range(length))], 1)
        expected = op(q[:length], k[:length], v[:length], whole, 0.25)
    pages = [-(-n // size) for n in lengths]
    free = torch.randperm(sum(pages) + 2, generator=torch.Generator().manual_seed(1)).tolist()
    tables = [[free.pop() for _ in range(n)] for n in pages]
    # The engine's layout: [G, slots, D] seen as [slots, G, D].
    keys, values = (
        torch.full((groups, (sum(pages) + 2) * size, setting.width), setting.fill, dtype=setting.dtype).transpose(0, 1)
        for _ in range(2)
    )
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    done, out = [0] * len(lengths), []
    while done[0] < length:
        chunks, rows = [], []
        for i in reversed(range(len(lengths))):
            count = min(setting.chunk if i == 0 else 5, lengths[i] - done[i])
            if not count:
                continue
            for position in range(done[i], done[i] + count):
                slot = tables[i][position // size] * size + position % size
                keys[slot], values[slot] = k[starts[i] + position], v[starts[i] + position]
            chunks.append(Chunk(done[i], count, tables[i]))
            rows += range(starts[i] + done[i], starts[i] + done[i] + count)
            done[i] += count
        with splits_in(setting.place):
            got = op(q[rows], keys, values, AttentionPlan.build(chunks, size), 0.25)
        out.append(got[-chunks[-1].count :])
    return torch.cat(out), expected


@st.composite
def drawn(draw: st.DrawFn) -> Setting:
    return Setting(
        length=draw(st.sampled_from(BORDERS)),
        others=tuple(draw(st.lists(st.integers(1, SPLIT + 2), max_size=2))),
        page_size=draw(st.sampled_from([1, 3, 16, 64])),
        chunk=draw(st.sampled_from([5, BLOCK, SPLIT + 1])),
        heads=draw(st.sampled_from([(2, 1), (3, 1), (2, 2), (7, 1)])),
        width=draw(st.sampled_from([16, 48])),
        fill=draw(st.sampled_from([0.0, torch.nan, 1e30])),
        place=draw(st.sampled_from(["memory", "registers"])),
    )


@settings(max_examples=8, deadline=None, derandomize=True)
@given(setting=drawn())
def test_row_law(setting: Setting) -> None:
    got, expected = paged(setting, attention)
    assert torch.equal(bits(got), bits(expected))


@pytest.mark.parametrize("place", ["memory", "registers"])
def test_token_by_token(place: str) -> None:
    setting = Setting(SPLIT + 2, (3,), 16, 1, (4, 2), 16, torch.nan, place=place)
    got, expected = paged(setting, attention)
    assert torch.equal(bits(got), bits(expected))


def test_half_precision() -> None:
    got, expected = paged(Setting(SPLIT + 2, (3,), 16, 7, (2, 1), 16, torch.nan, torch.float16), attention)
    assert torch.equal(bits(got), bits(expected))


def test_control_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys split into a fixed number of parts, so the longest of the batch decides; all else is the kernel's."""
    lookup = MODULE.attention_tile
    setting = Setting(2 * SPLIT, (3 * SPLIT,), 16, 7, (2, 1), 16, 0.0)

    def fixed_number(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        size = -(-plan.longest // (2 * BLOCK)) * BLOCK
        monkeypatch.setattr(MODULE, "attention_tile", lambda *key: replace(lookup(*key), split=size))
        return attention(q, k, v, plan, scale)

    def fixed_size(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        monkeypatch.setattr(MODULE, "attention_tile", lambda *key: replace(lookup(*key), split=BLOCK))
        return attention(q, k, v, plan, scale)

    got, expected = paged(setting, fixed_size)
    assert torch.equal(bits(got), bits(expected)), "the control differs from a sound one by its split alone"
    got, expected = paged(setting, fixed_number)
    assert not torch.equal(bits(got), bits(expected))


def reference(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], scale: float) -> Tensor:
    share, parts, start = q.shape[1] // k.shape[1], [], 0
    for n in lengths:
        one_q, one_k, one_v = (t[start : start + n].transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        part = functional.scaled_dot_product_attention(
            one_q, one_k.repeat_interleave(share, 1), one_v.repeat_interleave(share, 1), is_causal=True, scale=scale
        )
        parts.append(part[0].transpose(0, 1))
        start += n
    return torch.cat(parts)


def packed(lengths: tuple[int, ...]) -> AttentionPlan:
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return AttentionPlan.build([Chunk(0, n, range(s, s + n)) for s, n in zip(starts, lengths, strict=True)], 1)


@pytest.mark.parametrize(("heads", "groups", "width"), [(4, 2, 16), (3, 1, 48)])
def test_values_and_gradients(heads: int, groups: int, width: int) -> None:
    lengths = (1, BLOCK + 1, SPLIT + 6)
    total = sum(lengths)
    q, k, v = normal(total, heads, width), normal(total, groups, width, seed=1), normal(total, groups, width, seed=2)
    ours = [t.clone().requires_grad_() for t in (q, k, v)]
    theirs = [t.double().requires_grad_() for t in (q, k, v)]
    out, exact = attention(*ours, packed(lengths), 0.2), reference(*theirs, lengths, 0.2)
    assert (out.double() - exact).abs().max() < 2e-6
    weight = normal(total, heads, width, seed=3)
    (out * weight).sum().backward()
    (exact * weight.double()).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        assert (a.grad.double() - b.grad).abs().max() < 2e-5 * b.grad.abs().max()


def test_a_bad_sequence_stays_alone() -> None:
    lengths = (BLOCK + 3, 9, SPLIT + 1)
    q, k, v = (normal(sum(lengths), 2, 16, seed=i) for i in range(3))
    clean = attention(q, k, v, packed(lengths), 0.2)
    own = slice(BLOCK + 3, BLOCK + 12)
    for bad in (torch.nan, torch.inf):
        dirty = [t.clone() for t in (q, k, v)]
        for t in dirty:
            t[own] = bad
        spoiled = attention(*dirty, packed(lengths), 0.2)
        others = torch.ones(sum(lengths), dtype=torch.bool)
        others[own] = False
        assert torch.equal(bits(spoiled[others]), bits(clean[others]))


def test_tiles_lie_in_one_key_block() -> None:
    chunks = [Chunk(3, 5, [4, 0, 2]), Chunk(0, 1, [1]), Chunk(20, 2, [7, 8, 9, 10, 11, 12, 13, 14])]
    plan = AttentionPlan.build(chunks, 3)
    assert plan.positions_R.tolist() == [3, 4, 5, 6, 7, 0, 20, 21]
    assert plan.tiles(4).tolist() == [[6, 20, 2, 2], [1, 4, 4, 0], [0, 3, 1, 0], [5, 0, 1, 1]]


def test_no_kernel_for_such_heads() -> None:
    q = normal(2, 1, 320)
    with pytest.raises(UsageError, match="heads of 320"):
        attention(q, q, q, packed((2,)), 0.2)
