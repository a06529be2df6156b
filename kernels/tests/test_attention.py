"""Attention: the row law bit for bit, through pages and packed; values and gradients against float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from zerogap_kernels import _kernels as kernels

THREADS = (1, 2, 3, 5, 8)
SCALE = 0.125


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def heads(*shape: int, seed: int = 0, size: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * size


@dataclass
class Part:
    """Rows of one sequence: ``count`` from position ``start``, over these pages."""

    start: int
    count: int
    pages: Sequence[int]


def plan_of(parts: Sequence[Part], page_size: int) -> kernels.Plan:
    counts = np.array([p.count for p in parts], dtype=np.int64)
    sizes = np.array([len(p.pages) for p in parts], dtype=np.int64)
    return kernels.Plan(
        np.array([p.start for p in parts], dtype=np.int64),
        counts,
        np.cumsum(counts) - counts,
        np.cumsum(sizes) - sizes,
        np.array([page for p in parts for page in p.pages], dtype=np.int32),
        page_size,
    )


def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, parts: Sequence[Part] | None = None, threads: int = 1):
    """Return out and stats of packed sequences; one sequence if no parts are given."""
    plan = plan_of(parts or [Part(0, len(q), range(len(q)))], 1)
    out, stats = torch.full_like(q, torch.nan), torch.full((*q.shape[:2], 2), torch.nan)
    kernels.attention_packed(q, k, v, plan, SCALE, out, stats, threads)
    return out, stats


def paged(q, cache, parts: Sequence[Part], threads: int = 1) -> torch.Tensor:
    out = torch.full_like(q, torch.nan)
    kernels.attention(q, cache, 0, plan_of(parts, cache.page_size), SCALE, out, None, threads)
    return out


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of one sequence whose last row is the last of q, in the type of its inputs."""
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = torch.einsum("rhd,khd->hrk", q * SCALE, k)
    hidden = torch.arange(len(k)) > torch.arange(len(k) - len(q), len(k))[:, None]
    return torch.einsum("hrk,khd->rhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("dim", [1, 8, 32, 64, 80, 96, 128, 250, 256])
@pytest.mark.parametrize(("heads_", "kv_heads"), [(3, 1), (4, 2), (2, 2), (16, 1)])
def test_values_against_float64(dim: int, heads_: int, kv_heads: int, path: str) -> None:
    q, k, v = heads(70, heads_, dim), heads(70, kv_heads, dim, seed=1), heads(70, kv_heads, dim, seed=2)
    out, stats = packed(q, k, v)
    exact = reference(q.double(), k.double(), v.double())
    assert (out.double() - exact).abs().max() < 2e-6 * max(1, dim / 16)
    assert bool(stats.isfinite().all())


class Engine:
    """A cache whose sequence lies on scattered pages; all else, the rest of its last page too, is garbage."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, page_size: int, garbage: float = torch.nan):
        self.kv_heads, self.dim = k.shape[1:]
        pages = -(-len(k) // page_size)
        self.cache = kernels.Cache(1, 2 * pages + 3, page_size, self.kv_heads, self.dim)
        every = torch.arange(self.cache.pages * page_size)
        noise = torch.full((len(every), self.kv_heads, self.dim), garbage)
        self.cache.store(0, every, noise, noise)
        order = np.random.default_rng(len(k) + page_size).permutation(self.cache.pages)
        self.pages = [int(page) for page in order[:pages]]
        self.write(self.pages, k, v)

    def write(self, pages: Sequence[int], k: torch.Tensor, v: torch.Tensor) -> None:
        position = torch.arange(len(k))
        size = self.cache.page_size
        self.cache.store(0, torch.tensor(list(pages))[position // size] * size + position % size, k, v)


def sequence(length: int, heads_: int = 3, kv_heads: int = 1, dim: int = 32, size: float = 1.0):
    return (
        heads(length, heads_, dim, seed=length, size=size),
        heads(length, kv_heads, dim, seed=length + 1, size=size),
        heads(length, kv_heads, dim, seed=length + 2),
    )


@pytest.mark.parametrize("page_size", [1, 3, 8, 16, 24, 48, 256])
@pytest.mark.parametrize(("heads_", "kv_heads", "dim"), [(3, 1, 64), (4, 2, 80), (2, 2, 8)])
def test_chunks_pages_and_packed_agree(page_size: int, heads_: int, kv_heads: int, dim: int, path: str) -> None:
    q, k, v = sequence(150, heads_, kv_heads, dim, size=3.0)
    whole, _ = packed(q, k, v)
    engine = Engine(k, v, page_size)
    for chunks in ([150], [1] * 150, [17, 1, 47, 2, 64, 19], [64, 64, 22], [16] * 9 + [6]):
        start = 0
        for count in chunks:
            rows = q[start : start + count]
            assert same(paged(rows, engine.cache, [Part(start, count, engine.pages)]), whole[start : start + count])
            start += count


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 127, 129])
def test_short_lengths_agree(length: int, path: str) -> None:
    q, k, v = sequence(length)
    whole, _ = packed(q, k, v)
    engine = Engine(k, v, 16)
    rows = [paged(q[p : p + 1], engine.cache, [Part(p, 1, engine.pages)]) for p in range(length)]
    assert same(torch.cat(rows), whole)


@pytest.mark.parametrize("page_size", [16, 100])
def test_long_sequence_across_splits(page_size: int, path: str) -> None:
    q, k, v = sequence(2100, 2, 1, 32, size=2.0)
    whole, _ = packed(q, k, v, threads=2)
    exact = reference(q.double(), k.double(), v.double())
    assert (whole.double() - exact).abs().max() < 1e-5
    engine = Engine(k, v, page_size)
    for position in (0, 63, 64, 1022, 1023, 1024, 1025, 1087, 1088, 2046, 2047, 2048, 2049, 2099):
        for threads in (1, 3):
            row = paged(q[position : position + 1], engine.cache, [Part(position, 1, engine.pages)], threads)
            assert same(row, whole[position : position + 1]), position
    # Few rows over a split's border go apart and are joined; many go one split after the other.
    for start, count in ((1017, 16), (1017, 40), (2040, 9), (2040, 60), (1020, 8)):
        rows = paged(q[start : start + count], engine.cache, [Part(start, count, engine.pages)], 2)
        assert same(rows, whole[start : start + count]), (start, count)


@pytest.mark.parametrize("threads", THREADS)
def test_neighbours_and_threads_change_nothing(threads: int, path: str) -> None:
    lengths = (1, 40, 65, 130, 150)
    sequences = [sequence(length, 6, 2, 48) for length in lengths]
    alone = [packed(*s)[0] for s in sequences]
    for extreme in (torch.nan, torch.inf, 3e38, -3e38):
        bad = [torch.full_like(x, extreme) for x in sequences[2]]
        mixed = [*sequences[:2], (bad[0], bad[1], bad[2]), *sequences[3:]]
        for order in ((0, 1, 2, 3, 4), (4, 2, 0, 3, 1)):
            q, k, v = (torch.cat([mixed[i][x] for i in order]) for x in range(3))
            parts, first = [], 0
            for i in order:
                parts.append(Part(0, lengths[i], range(first, first + lengths[i])))
                first += lengths[i]
            out, _ = packed(q, k, v, parts, threads)
            for i, part in zip(order, parts, strict=True):
                if i != 2:
                    assert same(out[part.pages.start : part.pages.stop], alone[i]), (extreme, i)
            # The last rows of all sequences at once: a decode step.
            last = [part.pages.stop - 1 for part in parts]
            steps = [Part(lengths[i] - 1, 1, part.pages) for i, part in zip(order, parts, strict=True)]
            out, _ = packed(q[last], k, v, steps, threads)
            for row, i in enumerate(order):
                if i != 2:
                    assert same(out[row : row + 1], alone[i][-1:]), (extreme, i)


def test_later_rows_of_the_sequence_change_nothing(path: str) -> None:
    q, k, v = sequence(90, 3, 1, 64)
    whole, _ = packed(q, k, v)
    for first in (1, 16, 21, 63, 64, 89):
        for extreme in (torch.nan, torch.inf, -3e38):
            later = [x.clone() for x in (q, k, v)]
            for x in later:
                x[first:] = extreme
            assert same(packed(*later)[0][:first], whole[:first])


def test_all_paths_give_the_same_bits() -> None:
    before = kernels.path()
    q, k, v = sequence(1100, 6, 2, 80, size=4.0)
    results = []
    for name in kernels.paths_here():
        kernels.choose_path(name)
        results.append(packed(q, k, v, threads=2))
    kernels.choose_path(before)
    assert all(same(out, results[0][0]) and same(stats, results[0][1]) for out, stats in results)


def test_negative_control_splits_by_row_count_are_seen() -> None:
    # Constructed to break the law: one row alone cuts its keys in halves, several rows do not.
    q, k, v = sequence(64, 2, 1, 32)

    def attend(rows: torch.Tensor, position: int) -> torch.Tensor:
        if len(rows) > 1:
            return packed(q, k, v)[0][position : position + len(rows)]
        cut = (position + 1) // 2
        halves = [
            packed(rows, k, v, [Part(len(slots) - 1, 1, slots)]) for slots in (range(cut), range(cut, position + 1))
        ]
        greatest = torch.maximum(halves[0][1][..., 0], halves[1][1][..., 0])
        shares = [stats[..., 1] * (stats[..., 0] - greatest).exp() for _, stats in halves]
        total = shares[0] + shares[1]
        return sum(out * (share / total).unsqueeze(-1) for (out, _), share in zip(halves, shares, strict=True))

    alone, together = attend(q[63:], 63), attend(q[60:], 60)[3:]
    assert torch.allclose(alone, together, atol=1e-6)
    assert not same(alone, together)


def test_negative_control_another_order_is_seen() -> None:
    # The same keys in another order are the same sum: only the order of operations differs.
    q, k, v = sequence(64)
    last = len(q) - 1
    plan = [Part(last, 1, range(64))]
    out, _ = packed(q[last:], k, v, plan)
    other, _ = packed(q[last:], k.flip(0), v.flip(0), plan)
    assert torch.allclose(out, other, atol=1e-6)
    assert not same(out, other)


def test_weights_underflow_and_large_scores(path: str) -> None:
    q, k, v = sequence(200, 2, 1, 32, size=30.0)
    out, _ = packed(q, k, v)
    exact = reference(q.double(), k.double(), v.double())
    assert (out.double() - exact).abs().max() < 2e-3  # scores of some thousand: float32 cannot tell them better
    q, k, v = torch.zeros(40, 1, 16), torch.zeros(40, 1, 16), torch.full((40, 1, 16), -1e-42)
    out, _ = packed(q, k, v)
    assert bool((out < 0).all())  # subnormal numbers are kept


@pytest.mark.parametrize("page_size", [1, 5, 16, 40])
def test_cache_pages(page_size: int) -> None:
    cache = kernels.Cache(3, 7, page_size, 2, 24)
    slots = torch.randperm(7 * page_size, generator=torch.Generator().manual_seed(1))
    written = [(heads(len(slots), 2, 24, seed=i), heads(len(slots), 2, 24, seed=9 + i)) for i in range(3)]
    back = torch.empty_like(written[0][0]), torch.empty_like(written[0][0])
    cache.load(2, slots, *back)
    assert not any(side.any() for side in back)  # zero at the start
    for layer, (k, v) in enumerate(written):
        cache.store(layer, slots, k, v)
    cache.copy_page(6, 2)
    cache.clear_pages([0, 4])
    page, place = slots // page_size, slots % page_size
    row_of = torch.empty_like(slots)
    row_of[slots] = torch.arange(len(slots))
    for layer, sides in enumerate(written):
        cache.load(layer, slots, *back)
        for ours, theirs in zip(back, sides, strict=True):
            expected = theirs.clone()
            expected[page == 2] = theirs[row_of[6 * page_size + place[page == 2]]]
            expected[(page == 0) | (page == 4)] = 0
            assert same(ours, expected)


def test_memory_beyond_32_bits() -> None:
    # Only the pages that are written take memory.
    cache = kernels.Cache(2, 40000, 16, 4, 128)
    assert cache.pages * kernels.Cache.page_bytes(1, 16, 4, 128) > 2 << 30
    q, k, v = heads(40, 4, 128), heads(40, 4, 128, seed=1), heads(40, 4, 128, seed=2)
    pages = [39999, 0, 21000]
    slots = torch.cat([torch.arange(16) + page * 16 for page in pages])[:40]
    cache.store(1, slots, k, v)
    out = torch.empty_like(q)
    kernels.attention(q, cache, 1, plan_of([Part(0, 40, pages)], 16), SCALE, out, None, 2)
    assert same(out, packed(q, k, v)[0])


def test_no_rows_and_no_chunks(path: str) -> None:
    q, k, v = heads(5, 2, 16), heads(5, 1, 16), heads(5, 1, 16)
    out, _ = packed(q, k, v, [Part(3, 0, [])])
    assert bool(out.isnan().all())  # rows of no chunk are left alone
    empty = np.empty(0, dtype=np.int64)
    plan = kernels.Plan(empty, empty, empty, empty, np.empty(0, dtype=np.int32), 16)
    kernels.attention_packed(q[:0], k[:0], v[:0], plan, SCALE, q[:0], None, 2)
    assert plan.rows == plan.pages == 0


def test_rows_with_strides(path: str) -> None:
    # Queries, keys and values of a row side by side, as one product gives them.
    fused = heads(50, 4, 32, seed=3)
    q, k, v = fused.split([2, 1, 1], 1)
    out = torch.full((50, 5, 32), torch.nan)
    kernels.attention_packed(q, k, v, plan_of([Part(0, 50, range(50))], 1), SCALE, out[:, 1:3], None, 1)
    assert same(out[:, 1:3], packed(q.contiguous(), k.contiguous(), v.contiguous())[0])
    assert bool(out[:, [0, 3, 4]].isnan().all())


def test_wrong_plans_are_refused() -> None:
    def plan(start=0, count=4, first_row=0, offset=0, tables=(0, 1), page_size=2):
        columns = [np.array(x, dtype=np.int64).reshape(-1) for x in (start, count, first_row, offset)]
        return kernels.Plan(*columns, np.array(tables, dtype=np.int32), page_size)

    assert (plan().rows, plan().pages) == (4, 2)
    with pytest.raises(ValueError, match="needs 3 pages"):
        plan(count=5)
    with pytest.raises(ValueError, match="needs 2 pages from entry 1"):
        plan(offset=1)
    with pytest.raises(ValueError, match="page -1"):
        plan(tables=(0, -1))
    with pytest.raises(ValueError, match="row 3 belongs to another chunk"):
        plan([0, 0], [4, 1], [0, 3], [0, 0])
    with pytest.raises(ValueError, match="must be as many"):
        plan([0, 0])
    with pytest.raises(ValueError, match="page_size = 0"):
        plan(page_size=0)
    for wrong in (-1, 1 << 62):
        with pytest.raises(ValueError, match=r"chunk 0"):
            plan(start=wrong)
    with pytest.raises(ValueError, match="wrong dtype"):
        kernels.Plan(*[np.zeros(1, dtype=np.int32)] * 5, 1)


def test_wrong_arrays_are_refused() -> None:
    q, k, v = heads(6, 4, 32), heads(6, 2, 32), heads(6, 2, 32)
    plan = plan_of([Part(0, 6, range(6))], 1)
    out, stats = torch.empty_like(q), torch.empty(6, 4, 2)
    for wrong in (
        (q.double(), k, v, out, stats),
        (q.half(), k, v, out, stats),
        (q[:5], k, v, out[:5], stats[:5]),
        (q[:, :3], k, v, out[:, :3], stats[:, :3]),
        (q, k[:5], v[:5], out, stats),
        (q, k, v[:, :1], out, stats),
        (q[..., :16], k, v, out, stats),
        (q.transpose(0, 1).contiguous().transpose(0, 1), k, v, out, stats),
        (q, k, v, out[:5], stats),
        (q, k, v, out, stats[..., :1]),
        (q.flatten(1), k, v, out, stats),
    ):
        with pytest.raises(ValueError, match=r"\[\d"):
            kernels.attention_packed(*wrong[:3], plan, SCALE, *wrong[3:], 1)
    cache = kernels.Cache(1, 5, 1, 2, 32)
    with pytest.raises(ValueError, match="page 5, the cache has 5"):
        kernels.attention(q, cache, 0, plan, SCALE, out, None, 1)
    with pytest.raises(ValueError, match="layer = 1"):
        kernels.attention(q, cache, 1, plan, SCALE, out, None, 1)
    with pytest.raises(ValueError, match="threads = 0"):
        kernels.attention_packed(q, k, v, plan, SCALE, out, None, 0)
    with pytest.raises(ValueError, match="slot 5"):
        cache.store(0, torch.tensor([5]), k[:1], v[:1])
    with pytest.raises(ValueError, match="page 9"):
        cache.clear_pages([1, 9])
    with pytest.raises(ValueError, match="more memory"):
        kernels.Cache(1 << 20, 1 << 30, 1 << 20, 8, 128)
    with pytest.raises(ValueError, match="sizes"):
        kernels.Cache(1, 1, 0, 2, 32)
