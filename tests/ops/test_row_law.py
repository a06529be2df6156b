"""Law 1 op by op: a row's bits are those it has alone, whatever stands beside it, and a control that must fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from tests.support import same_bits
from zerogap.errors import NotHeldError
from zerogap.ops import portable as ops
from zerogap.ops.portable import selftest
from zerogap.ops.portable.attention import Tiles
from zerogap.ops.portable.elementwise import blocked_sum, exp, log, sigmoid, tree_sum
from zerogap.ops.portable.linear import tiled_product

THREADS = (1, 2, 3, 5, 8)
WIDTH = 96


@pytest.fixture(autouse=True)
def keep_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


WEIGHT = normal(70, WIDTH, seed=1)
SQUARE = normal(WIDTH, WIDTH, seed=2)
ANGLES = normal(400, 4, seed=3)
SETTINGS = ops.SamplerRows.uniform_settings(400, 0.7, top_k=9, top_p=0.8, min_p=0.02)

ROW_OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: ops.linear(x, WEIGHT),
    "linear in segments": lambda x: ops.linear(x, SQUARE, segments=2),
    "rms_norm": lambda x: ops.rms_norm(x, SQUARE[0], 1e-6),
    "rms_norm of heads": lambda x: ops.rms_norm(x.unflatten(1, (12, 8)), SQUARE[0, :8], 1e-6).flatten(1),
    "silu_mul": lambda x: ops.silu_mul(x, x.flip(1)),
    "exp": lambda x: exp(x * 30),
    "log": lambda x: log(x.abs()),
    "sigmoid": lambda x: sigmoid(x * 20),
    "tree_sum": lambda x: tree_sum(x).unsqueeze(1),
    "blocked_sum": lambda x: blocked_sum(x, block=32).unsqueeze(1),
    "log_distribution": lambda x: ops.log_distribution(x * 3, ops.SamplerRows.uniform_settings(len(x))).logprob_RV,
    "log_distribution of kept sets": lambda x: ops.log_distribution(x * 3, SETTINGS[: len(x)]).logprob_RV,
    "entropy": lambda x: ops.log_distribution(x, SETTINGS[: len(x)]).entropy_R.unsqueeze(1),
    "token_logprobs": lambda x: ops.token_logprobs(
        x, WEIGHT, torch.full((len(x),), 3), ops.SamplerRows.uniform_settings(len(x), 0.9)
    ).logprob_R.unsqueeze(1),
}
CONTROLS: dict[str, Callable[[Tensor], Tensor]] = {
    "K split by row count": lambda x: sum(x[:, part] @ WEIGHT[:, part].T for part in _parts(1 + len(x) % 3)),
    "tail path by position": lambda x: torch.cat((x[:-1] @ WEIGHT.T, _reversed_sum(x[-1:]))),
    "mean over the batch": lambda x: x - x.mean(0) * 1e-7,
}


def _parts(count: int) -> list[slice]:
    step = WIDTH // count
    return [slice(start, start + step) for start in range(0, WIDTH, step)]


def _reversed_sum(x: Tensor) -> Tensor:
    return (x.flip(1).unsqueeze(1) * WEIGHT.flip(1)).cumsum(2)[:, :, -1]


def broken(op: Callable[[Tensor], Tensor], rows: int, threads: int, order: Tensor, neighbours: Tensor) -> bool:
    """Whether some row of ``op`` differs from the row alone, with other rows before, between and behind."""
    x = normal(rows, WIDTH, seed=rows)
    torch.set_num_threads(1)
    alone = torch.cat([op(x[row : row + 1]) for row in range(rows)])
    torch.set_num_threads(threads)
    mixed = torch.cat((x, neighbours))[order]
    together = op(mixed)
    own = order < rows
    return not same_bits(together[own], alone[order[own]])


@st.composite
def company(draw: st.DrawFn) -> tuple[int, int, Tensor, Tensor]:
    rows = draw(st.integers(1, 40))
    extra = draw(st.integers(0, 40))
    scale = draw(st.sampled_from([0.0, 1.0, 1e-30, 1e30]))
    neighbours = normal(extra, WIDTH, seed=99) * scale
    order = torch.tensor(draw(st.permutations(range(rows + extra))), dtype=torch.int64)
    return rows, draw(st.sampled_from(THREADS)), order, neighbours


@pytest.mark.parametrize("name", ROW_OPS)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(drawn=company())
def test_row_op(name: str, drawn: tuple[int, int, Tensor, Tensor]) -> None:
    assert not broken(ROW_OPS[name], *drawn)


SAMPLERS = {
    "off": (1.0, 0, 1.0, 0.0), "top-k": (1.0, 20, 1.0, 0.0), "wide top-k": (0.8, 300, 1.0, 0.0),
    "top-p": (1.0, 0, 0.9, 0.0), "both": (0.7, 50, 0.95, 0.0), "min-p": (1.0, 0, 1.0, 0.02),
    "greedy": (0.0, 5, 0.5, 0.1),
}  # fmt: skip


def sampler_rows(names: list[str]) -> ops.SamplerRows:
    columns = zip(*(SAMPLERS[name] for name in names), strict=True)
    temperature, top_k, top_p, min_p = (torch.tensor(column) for column in columns)
    return ops.SamplerRows(temperature.double(), top_k, top_p.double(), min_p.double())


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    names=st.lists(st.sampled_from(sorted(SAMPLERS)), min_size=2, max_size=6),
    scale=st.sampled_from([1.0, 6.0, 30.0]),
    vocabulary=st.sampled_from([40, 2000]),
    seed=st.integers(0, 1000),
)
def test_a_row_is_blind_to_the_sampler_settings_of_others(
    names: list[str], scale: float, vocabulary: int, seed: int
) -> None:
    """Sharp rows matter: a total rounded to float32 may lie below the sum of the first tokens."""
    logits = normal(len(names), vocabulary, seed=seed) * scale
    together = ops.log_distribution(logits.clone(), sampler_rows(names)).logprob_RV
    for row, name in enumerate(names):
        alone = ops.log_distribution(logits[row : row + 1].clone(), sampler_rows([name])).logprob_RV
        assert same_bits(together[row : row + 1], alone), name


@pytest.mark.parametrize("name", CONTROLS)
def test_control_fails(name: str) -> None:
    rows = 37
    assert broken(CONTROLS[name], rows, 2, torch.randperm(rows + 5), normal(5, WIDTH))


@pytest.mark.parametrize("name", [name for name in ROW_OPS if name != "tree_sum"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_row_stays_alone(name: str, bad: float) -> None:
    x = normal(33, WIDTH)
    clean = ROW_OPS[name](x)
    x[7] = bad
    spoiled = ROW_OPS[name](x)
    others = torch.arange(33) != 7
    assert same_bits(spoiled[others], clean[others])


@pytest.mark.parametrize("rows", [1, 16, 17, 64])
@pytest.mark.parametrize("layout", ["strided", "transposed", "misaligned"])
def test_layout_does_not_matter(rows: int, layout: str) -> None:
    x = normal(rows, WIDTH)
    other = {
        "strided": torch.repeat_interleave(x, 2, dim=1)[:, ::2],
        "transposed": x.T.contiguous().T,
        "misaligned": torch.cat((torch.zeros(1), x.flatten()))[1:].view(rows, WIDTH),
    }[layout]
    for name, op in ROW_OPS.items():
        assert same_bits(op(other), op(x)), name


@st.composite
def paging(draw: st.DrawFn) -> dict[str, object]:
    return {
        "length": draw(st.integers(1, 90)),
        "page_size": draw(st.sampled_from([1, 3, 16, 64])),
        "chunk": draw(st.sampled_from([1, 7, 32, 64])),
        "threads": draw(st.sampled_from(THREADS)),
        "others": draw(st.lists(st.integers(1, 70), max_size=3)),
        "heads": draw(st.sampled_from([(4, 2), (3, 3), (9, 3), (4, 1)])),
        "fill": draw(st.sampled_from([0.0, torch.nan, 1e30])),
    }


Attention = Callable[[Tensor, Tensor, Tensor, ops.AttentionPlan, float], Tensor]


def attention_broken(drawn: dict, attention: Attention) -> bool:
    """Whether chunked and paged, beside other sequences and over garbage in free pages, differs from packed whole."""
    heads, groups = drawn["heads"]
    length, size = drawn["length"], drawn["page_size"]
    lengths = [length, *drawn["others"]]
    q, k, v = (normal(sum(lengths), n, 16, seed=n) for n in (heads, groups, groups + 50))
    v = v[:, :groups]
    torch.set_num_threads(1)
    whole = ops.AttentionPlan.build([ops.Chunk(0, length, range(length))], 1)
    expected = attention(q[:length], k[:length], v[:length], whole, 0.25)
    torch.set_num_threads(drawn["threads"])
    per_sequence = [-(-n // size) for n in lengths]
    free = torch.randperm(sum(per_sequence) + 3, generator=torch.Generator().manual_seed(1)).tolist()
    tables = [[free.pop() for _ in range(n)] for n in per_sequence]
    keys, values = (torch.full(((sum(per_sequence) + 3) * size, groups, 16), drawn["fill"]) for _ in range(2))
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    done, out = [0] * len(lengths), []
    while done[0] < length:
        chunks, rows = [], []
        for i in reversed(range(len(lengths))):
            count = min(drawn["chunk"] if i == 0 else 5, lengths[i] - done[i])
            if count == 0:
                continue
            for position in range(done[i], done[i] + count):
                slot = tables[i][position // size] * size + position % size
                keys[slot], values[slot] = k[starts[i] + position], v[starts[i] + position]
            chunks.append(ops.Chunk(done[i], count, tables[i]))
            rows += range(starts[i] + done[i], starts[i] + done[i] + count)
            done[i] += count
        got = attention(q[rows], keys, values, ops.AttentionPlan.build(chunks, size), 0.25)
        out.append(got[-chunks[-1].count :])
    return not same_bits(torch.cat(out), expected)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(drawn=paging())
def test_attention(drawn: dict) -> None:
    assert not attention_broken(drawn, ops.attention)


def plain_attention(
    q: Tensor, keys: Tensor, values: Tensor, plan: ops.AttentionPlan, scale: float, parts: Callable[[int, int], int]
) -> Tensor:
    """Attention row by row in equal parts of ``parts(keys of the row, longest of the batch)`` keys, added in order."""
    share = q.shape[1] // keys.shape[1]
    tiles = Tiles.build(plan.chunks, plan.page_size)
    rows, positions = tiles.rows_TQ.flatten()[tiles.place_R], tiles.positions_TQ.flatten()[tiles.place_R].tolist()
    sequences = tiles.sequence_T.repeat_interleave(tiles.rows_TQ.shape[1])[tiles.place_R].tolist()
    assert rows.tolist() == list(range(len(q)))
    out = []
    for row, (sequence, position) in enumerate(zip(sequences, positions, strict=True)):
        slots = tiles.slots_SL[sequence, : position + 1]
        k, v = (x[slots].repeat_interleave(share, 1) for x in (keys, values))
        scores = (q[row] * scale * k).cumsum(2)[..., -1]
        weights = exp(scores - scores.amax(0))
        step = parts(len(slots), max(positions) + 1)
        ranges = [slice(start, start + step) for start in range(0, len(slots), step)]
        total, summed = torch.zeros_like(weights[0]), torch.zeros_like(v[0])
        for part in ranges:
            total += weights[part].cumsum(0)[-1]
            summed += (weights[part].unsqueeze(2) * v[part]).cumsum(0)[-1]
        out.append(summed / total.unsqueeze(1))
    return torch.stack(out)


LONG = {"length": 90, "page_size": 16, "chunk": 7, "threads": 1, "others": [70], "heads": (4, 2), "fill": 0.0}


def test_attention_control_fails() -> None:
    """Keys split into a fixed number of parts, not into parts of a fixed size: the longest sequence decides."""

    def fixed_size(*arguments: object) -> Tensor:
        return plain_attention(*arguments, lambda own, longest: 32)

    def fixed_number(*arguments: object) -> Tensor:
        return plain_attention(*arguments, lambda own, longest: -(-longest // 4))

    assert not attention_broken(LONG, fixed_size), "the control differs from a sound one by its split alone"
    assert attention_broken(LONG, fixed_number)


def test_start_up_proof_finds_a_library_that_cheats() -> None:
    shape = selftest.linear_shape("q_proj", 128, 64)

    def by_count(a: Tensor, b: Tensor) -> Tensor:
        half = 64 if a.shape[0] > 1 else 128
        return torch.bmm(a[..., :half], b[:, :half]) + (torch.bmm(a[..., half:], b[:, half:]) if half < 128 else 0)

    def by_position(a: Tensor, b: Tensor) -> Tensor:
        y = torch.bmm(a, b)
        y[:, 12:] = torch.bmm(a[:, 12:].flip(2), b.flip(1))
        return y

    assert list(selftest.broken_laws(shape, torch.float32)) == []
    assert any("tiles at once" in what for what in selftest.broken_laws(shape, torch.float32, by_count))
    assert any("rows moved" in what for what in selftest.broken_laws(shape, torch.float32, by_position))


def test_start_up_proof_lays_factors_out_as_the_ops_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library may choose its path by stride, so a proof on other strides proves nothing about the op."""
    seen: set[tuple[object, ...]] = set()

    def spy(a: Tensor, b: Tensor) -> Tensor:
        seen.add((*a.shape[1:], *b.shape[1:], a.stride()[1:], b.stride()[1:]))
        return bmm(a, b)

    bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", spy)
    ops.linear(normal(40, 512), normal(70, 512), segments=ops.segment_count(512))
    ops.linear(normal(3, 80), normal(128, 80))
    q, k, v = normal(40, 4, 16), normal(40, 2, 16), normal(40, 2, 16)
    ops.attention(q, k, v, ops.AttentionPlan.build([ops.Chunk(0, 40, range(40))], 1), 0.25)
    used, seen = seen, set()
    for shape in (
        selftest.linear_shape("down_proj", 512, 70, ops.segment_count(512)),
        selftest.linear_shape("up_proj", 80, 128),
        *selftest.attention_shapes(4, 2, 16),
    ):
        assert list(selftest.broken_laws(shape, torch.float32, spy)) == []
    assert len(used) == 4
    assert used <= seen


def test_start_up_proof_of_scans_finds_a_sum_that_depends_on_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    cumsum = Tensor.cumsum
    selftest.prove_scans(500)
    monkeypatch.setattr(Tensor, "cumsum", lambda x, dim: cumsum(x, dim) * (1 + 2**-52 * (x.shape[1] < 500)))
    with pytest.raises(NotHeldError, match="cumsum over 500 tokens"):
        selftest.prove_scans(500)


def test_start_up_proof_refuses_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "broken_laws", lambda shape, dtype: iter(["rows moved down by 3"]))
    with pytest.raises(NotHeldError, match=r"down_proj: .*breaks the row law \(rows moved down by 3\)"):
        selftest.prove_products({selftest.linear_shape("down_proj", 64, 64)}, torch.float32)


@pytest.mark.parametrize("rows", [1, 7, 17, 300])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_that_hold_whole_segments_give_the_same_bits(rows: int, ranks: int) -> None:
    """Law 6: each rank sums its own segments, the ranks' sums meet in the same balanced tree."""
    x, weight = normal(rows, 512), normal(64, 512, seed=5)
    assert ops.segment_count(512) == 8
    width = 512 // ranks
    parts = [
        tiled_product(x[:, start : start + width], weight[:, start : start + width], segments=8 // ranks)
        for start in range(0, 512, width)
    ]
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    assert same_bits(parts[0], tiled_product(x, weight, segments=8))
    assert not same_bits(parts[0], tiled_product(x, weight, segments=1)), "the control: another tree, other bits"


@pytest.mark.parametrize(
    ("in_features", "unit", "expected"), [(512, 64, 8), (576, 64, 1), (1536, 64, 8), (384, 64, 2), (1024, 256, 4)]
)
def test_segment_count(in_features: int, unit: int, expected: int) -> None:
    assert ops.segment_count(in_features, unit) == expected
