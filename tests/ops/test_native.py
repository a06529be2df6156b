"""The native backend behind `zerogap.ops`: gradients, weights that change, whole forwards, the choice of backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support import random_decoder, same_bits
from zerogap import ops
from zerogap.errors import UsageError
from zerogap.models.rows import PackedCache, PagedCache, Rows, SequenceRows
from zerogap.ops import backend, portable
from zerogap.ops.rounding import round_weight

kernels = pytest.importorskip("zerogap_kernels")


@pytest.fixture(autouse=True)
def native() -> object:
    with backend.using("native"):
        yield


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plan(*chunks: ops.Chunk) -> ops.AttentionPlan:
    return ops.AttentionPlan.build(chunks, 1)


PLAN = plan(ops.Chunk(0, 40, range(40)), ops.Chunk(0, 25, range(40, 65)))
SHARED = plan(  # a prompt of 30 rows and two answers that continue it
    ops.Chunk(0, 30, range(30)),
    ops.Chunk(30, 20, [*range(30), *range(30, 50)]),
    ops.Chunk(30, 15, [*range(30), *range(50, 65)]),
)
COS, SIN = normal(65, 8, seed=8).cos(), normal(65, 8, seed=8).sin()
IDS = torch.arange(65) % 11
FILTERED = ops.SamplerRows.uniform_settings(65, 0.7, 9, 0.9, 0.01)

# Each: function of leaves, and the leaves' shapes.
CASES: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "linear": (lambda x, w, b: ops.linear(x, w, b, 2), [(65, 128), (33, 128), (33,)]),
    "rms_norm": (lambda x, w: ops.rms_norm(x, w, 1e-5), [(65, 48), (48,)]),
    "rms_norm of heads": (lambda x, w: ops.rms_norm(x, w, 1e-5), [(65, 3, 16), (16,)]),
    "rotary": (lambda x: ops.rotary(x, COS.to(x.dtype), SIN.to(x.dtype)), [(65, 3, 16)]),
    "silu_mul": (lambda gate, up: ops.silu_mul(gate, up), [(65, 31), (65, 31)]),
    "embedding": (lambda w: ops.embedding(IDS, w), [(11, 24)]),
    "attention": (lambda q, k, v: ops.attention(q, k, v, PLAN, 0.25), [(65, 4, 16), (65, 2, 16), (65, 2, 16)]),
    "attention, shared": (
        lambda q, k, v: ops.attention(q, k, v, SHARED, 0.25),
        [(65, 4, 16), (65, 2, 16), (65, 2, 16)],
    ),
    "token_logprobs": (
        lambda x, w: ops.token_logprobs(x, w, IDS, ops.SamplerRows.uniform_settings(65, 0.8)).logprob_R,
        [(65, 24), (101, 24)],
    ),
    "token_logprobs, filtered": (
        lambda x, w: ops.token_logprobs(x, w, (x @ w.T).argmax(1), FILTERED).logprob_R,
        [(65, 24), (101, 24)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str) -> None:
    run, shapes = CASES[name]
    leaves = [normal(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    ours, theirs = run(*leaves), run(*doubles)  # float64 goes to the portable ops: the oracle
    assert ours.dtype == torch.float32
    assert torch.allclose(ours.double(), theirs, rtol=1e-5, atol=2e-5)
    upstream = normal(*ours.shape, seed=9)
    ours_grads = torch.autograd.grad(ours, leaves, upstream)
    for mine, exact in zip(ours_grads, torch.autograd.grad(theirs, doubles, upstream.double()), strict=True):
        assert float((mine - exact).abs().max()) <= 1e-5 * max(1.0, float(exact.abs().max()))


@pytest.mark.parametrize("name", CASES)
def test_backward_repeats_at_any_thread_count(name: str) -> None:
    run, shapes = CASES[name]
    results = []
    for threads in (1, 1, 2, 5):
        torch.set_num_threads(threads)
        leaves = [normal(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
        ours = run(*leaves)
        results.append([ours.detach(), *torch.autograd.grad(ours, leaves, normal(*ours.shape, seed=9))])
    assert all(same_bits(a, b) for a, b in zip(results[0], results[1], strict=True))
    for other in results[2:]:
        assert same_bits(results[0][0], other[0])


def test_strided_rows_have_the_bits_of_plain_ones() -> None:
    wide, weight = normal(9, 96), normal(20, 48, seed=1)
    for x in (wide[:, :48], wide[:, ::2], wide[::2, :48], wide[:1, :48].expand(9, 48)):
        assert same_bits(ops.linear(x, weight), ops.linear(x.contiguous(), weight))


def test_a_changed_weight_is_packed_again() -> None:
    x, weight = normal(5, 32), torch.nn.Parameter(normal(7, 32, seed=1))
    before = ops.linear(x, weight)
    with torch.no_grad():
        weight.mul_(2)
    assert same_bits(ops.linear(x, weight), 2 * before)
    weight.data = normal(7, 32, seed=2)  # another memory, which no count tells
    assert same_bits(ops.linear(x, weight), ops.linear(x, weight.detach().clone()))
    assert not same_bits(ops.linear(x, weight), 2 * before)


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_a_whole_forward_has_the_bits_of_its_ops(family: str) -> None:
    """The recorded program against the decoder op by op (as a listener gets it), and against packed training."""
    decoder = random_decoder(family).eval().requires_grad_(False)
    vocab = decoder.config.vocab_size
    sequences = [[(7 * i + 3 * n) % vocab for i in range(40 + n)] for n in range(3)]
    tables = [[3 * n + i for i in range(3)] for n in range(3)]
    caches = [PagedCache(decoder.config, 9, 16) for _ in range(2)]
    heard: set[str] = set()

    def listen(layer: int, op: str, x: Tensor) -> Tensor:
        heard.add(op)
        return x

    parts: list[list[Tensor]] = [[] for _ in sequences]
    with torch.no_grad():
        for start, stop in ((0, 1), (1, 18), (18, 19), (19, 40)):
            laid = [SequenceRows(s[start:stop], start, t) for s, t in zip(sequences, tables, strict=True)]
            rows = Rows.build(laid, 16)
            whole, op_by_op = decoder.hidden(rows, caches[0]), decoder.hidden(rows, caches[1], (listen,))
            assert same_bits(whole, op_by_op)
            for part, x in zip(parts, whole.split(stop - start), strict=True):
                part.append(x)
        packed = decoder.hidden(Rows.packed([s[:40] for s in sequences]), PackedCache())
    assert "attention" in heard
    assert same_bits(torch.cat([torch.cat(part) for part in parts]), packed)


def test_a_program_follows_its_weights() -> None:
    decoder = random_decoder("qwen3").eval().requires_grad_(False)
    rows = Rows.build([SequenceRows([1, 2, 3], 0, [0])], 16)

    def both() -> bool:
        caches = [PagedCache(decoder.config, 1, 16) for _ in range(2)]
        with torch.no_grad():
            return same_bits(
                decoder.hidden(rows, caches[0]), decoder.hidden(rows, caches[1], (lambda layer, op, x: x,))
            )

    assert both()
    with torch.no_grad():
        for weight in decoder.parameters():
            weight.mul_(1.01)
    assert both()
    for weight in decoder.parameters():
        weight.data = weight.data * 0.99
    assert both()


def test_the_paths_give_the_same_bits() -> None:
    decoder = random_decoder("qwen3").requires_grad_(False)
    rows = Rows.packed([list(range(30)), list(range(5))])
    found = []
    here = kernels.path()
    try:
        for path in kernels.paths_here():
            kernels.choose_path(path)
            with torch.no_grad():
                found.append(decoder.hidden(rows, PackedCache()))
    finally:
        kernels.choose_path(here)
    assert all(same_bits(found[0], other) for other in found[1:])


def test_kept_sets_are_those_of_the_portable_ops() -> None:
    x, head, target = normal(30, 24), 3 * normal(301, 24, seed=1), torch.arange(30)
    settings = ops.SamplerRows.uniform_settings(30, 0.9, 40, 0.8, 0.02)
    settings = dataclasses.replace(settings, suppressed=((3, (5, 6)), (29, (0,))))
    ours = ops.token_logprobs(x, head, target, settings, want_kept=True)
    theirs = portable.token_logprobs(x, head, target, settings, want_kept=True)
    assert ours.kept is not None
    assert theirs.kept is not None
    for mine, other in zip(ours.kept, theirs.kept, strict=True):
        assert mine is not None
        assert torch.equal(portable.kept.kept_mask(mine, 301), portable.kept.kept_mask(other, 301))
    replayed = ops.token_logprobs(x, head, target, settings.replaying(ours.kept))
    assert same_bits(replayed.logprob_R, ours.logprob_R)


def test_most_probable_tokens_are_listed() -> None:
    x, head = normal(4, 24), normal(50, 24, seed=1)
    settings = ops.SamplerRows.uniform_settings(4, 1.0, 3)
    sampled = ops.sample(x, head, settings, torch.full((4,), 0.3, dtype=torch.float64), [5, 0, 2, 1])
    assert sampled.top is not None
    assert [None if top is None else len(top) for top in sampled.top] == [3, None, 2, 1]
    scored = ops.token_logprobs(x, head, torch.tensor([top[0][0] if top else 0 for top in sampled.top]), settings)
    for row in (0, 2, 3):
        assert sampled.top[row][0][1] == scored.logprob_R[row].item()


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(UsageError, match="did you mean 'native'"):
        backend.choose("natve", "model.backend")


def test_kept_mass_is_that_of_the_portable_ops() -> None:
    x, head, target = normal(20, 24), 2 * normal(3001, 24, seed=1), torch.arange(20)
    for settings in (
        ops.SamplerRows.uniform_settings(20, 0.9, 40, 0.8, 0.02),
        ops.SamplerRows.uniform_settings(20, 1.3, 0, 0.5),
        ops.SamplerRows.uniform_settings(20, 0.9),
    ):
        ours = ops.token_logprobs(x, head, target, settings).kept_mass_R
        theirs = portable.token_logprobs(x, head, target, settings).kept_mass_R
        assert ours is not None
        assert theirs is not None
        assert torch.allclose(ours, theirs, rtol=1e-5)


@pytest.mark.parametrize("rounded", [False, True])
def test_copies_that_do_not_hold_their_weight_are_named(rounded: bool) -> None:
    """Packed matrices and the rounded table of an embedding, after writes that torch does not count."""
    weights = {name: torch.nn.Parameter(normal(20, 32, seed=i)) for i, name in enumerate(("table", "first", "second"))}
    for weight in weights.values():
        round_weight(weight, rounded)

    def run() -> None:
        x = ops.embedding(torch.tensor([3, 7]), weights["table"])
        for name in ("first", "second"):
            ops.linear(x, weights[name])

    run()
    assert ops.stale_copies(weights) == []
    with torch.no_grad():
        weights["first"].mul_(2)
    assert ops.stale_copies(weights) == [], "a counted change is followed"
    weights["second"].data[19, 31] += 1
    weights["table"].data[3, 3] += 1
    assert ops.stale_copies(weights) == (["table", "second"] if rounded else ["second"])
    with torch.no_grad():
        for weight in weights.values():
            weight.add_(0)
    assert ops.stale_copies(weights) == []


@pytest.mark.parametrize("through", ["rms_norm", "silu_mul"])
def test_what_is_computed_again_gives_the_gradient_of_what_was_kept(through: str) -> None:
    """Through a cheap op and a linear layer: the same bits as if the layer had kept its input, and it did not."""

    def run(hide: bool) -> tuple[list[Tensor], list[int]]:
        leaves = [normal(9, 64), normal(9, 64, seed=1), normal(20, 64, seed=2), normal(64, seed=3)]
        x, gate, weight, scale = (leaf.requires_grad_() for leaf in leaves)
        held: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t.data_ptr()) or t, lambda t: t):
            y = ops.rms_norm(x, scale, 1e-6) if through == "rms_norm" else ops.silu_mul(gate, x)
            z = ops.linear(y.view_as(y) if hide else y, weight)
        used = [leaf for leaf in (x, gate, weight, scale) if through == "silu_mul" or leaf is not gate]
        used = [leaf for leaf in used if through == "rms_norm" or leaf is not scale]
        kept = [1] if y.data_ptr() in held else []
        return [z.detach(), *torch.autograd.grad(z, used, normal(9, 20, seed=4))], kept

    (ours, kept), (plainly, kept_plainly) = run(hide=False), run(hide=True)
    assert all(same_bits(a, b) for a, b in zip(ours, plainly, strict=True))
    assert (kept, kept_plainly) == ([], [1])
