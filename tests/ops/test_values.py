"""Values and gradients of each op against plain float64 mathematics."""

from __future__ import annotations

import math
import sys

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.nn import functional

from zerogap.ops import portable as ops
from zerogap.ops.portable.elementwise import blocked_sum, exp, log, tree_sum
from zerogap.ops.portable.norm import embedding, rms_norm, rotary, silu_mul

F64 = torch.float64


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    value = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64) * scale
    return value.requires_grad_()


def check(ours: Tensor, theirs: Tensor, inputs: tuple[Tensor, ...], tolerance: float = 1e-11) -> None:
    """Values and gradients for a random upstream gradient."""
    assert (ours - theirs).abs().max() < tolerance
    upstream = torch.randn(ours.shape, generator=torch.Generator().manual_seed(9), dtype=F64)
    for a, b in zip(
        torch.autograd.grad(ours, inputs, upstream), torch.autograd.grad(theirs, inputs, upstream), strict=True
    ):
        assert (a - b).abs().max() < tolerance


@pytest.mark.parametrize("segments", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 15, 16, 40])
def test_linear(rows: int, segments: int) -> None:
    x, weight, bias = normal(rows, 256), normal(70, 256, seed=1), normal(70, seed=2)
    check(ops.linear(x, weight, bias, segments), functional.linear(x, weight, bias), (x, weight, bias))


def test_rms_norm() -> None:
    x, weight = normal(6, 5, 24), normal(24, seed=1)
    theirs = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    check(rms_norm(x, weight, 1e-5), theirs, (x, weight))


def test_silu_mul() -> None:
    gate, up = normal(9, 40, scale=6), normal(9, 40, seed=1)
    check(silu_mul(gate, up), functional.silu(gate) * up, (gate, up))


def test_rotary() -> None:
    x = normal(7, 3, 16)
    angle = normal(7, 8, seed=1).detach()
    cos, sin = angle.cos() * 1.2, angle.sin() * 1.2
    turned = torch.complex(x[..., :8], x[..., 8:]) * torch.complex(cos, sin).unsqueeze(1)
    check(rotary(x, cos, sin), torch.cat((turned.real, turned.imag), -1), (x,))


def test_embedding() -> None:
    weight, ids = normal(11, 6), torch.tensor([3, 3, 0, 10, 3])
    check(embedding(ids, weight), functional.embedding(ids, weight), (weight,))


@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (3, 3), (6, 1)])
def test_attention(heads: int, groups: int) -> None:
    lengths = (1, 33, 70)
    total = sum(lengths)
    q, k, v = normal(total, heads, 8), normal(total, groups, 8, seed=1), normal(total, groups, 8, seed=2)
    starts = [sum(lengths[:i]) for i in range(3)]
    chunks = [ops.Chunk(0, n, range(start, start + n)) for start, n in zip(starts, lengths, strict=True)]
    ours = ops.attention(q, k, v, ops.AttentionPlan.build(chunks, 1), 0.3)
    parts = []
    for start, n in zip(starts, lengths, strict=True):
        one_q, one_k, one_v = (t[start : start + n].transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        share = heads // groups
        part = functional.scaled_dot_product_attention(
            one_q, one_k.repeat_interleave(share, 1), one_v.repeat_interleave(share, 1), is_causal=True, scale=0.3
        )
        parts.append(part[0].transpose(0, 1))
    check(ours, torch.cat(parts), (q, k, v))


def test_attention_groups_of_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cutting the work to fit in memory changes no bit, forward or backward."""
    q, k, v = normal(150, 2, 8), normal(150, 1, 8, seed=1), normal(150, 1, 8, seed=2)
    plan = ops.AttentionPlan.build([ops.Chunk(0, 100, range(100)), ops.Chunk(0, 50, range(100, 150))], 1)
    whole = ops.attention(q, k, v, plan, 0.3)
    gradients = torch.autograd.grad(whole.sum(), (q, k, v))
    monkeypatch.setattr(sys.modules["zerogap.ops.portable.attention"], "_SCORES_AT_ONCE", 600)
    parts = ops.attention(q, k, v, plan, 0.3)
    assert torch.equal(whole, parts)
    for a, b in zip(gradients, torch.autograd.grad(parts.sum(), (q, k, v)), strict=True):
        assert (a - b).abs().max() < 1e-12


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_token_logprobs(temperature: float) -> None:
    hidden, head = normal(130, 12), normal(70, 12, seed=1)
    target = torch.randint(70, (130,), generator=torch.Generator().manual_seed(3))
    ours = ops.token_logprobs(hidden, head, target, ops.SamplerRows.uniform_settings(130, temperature))
    table = torch.log_softmax(hidden @ head.T / temperature, -1)
    check(ours.logprob_R, table.gather(1, target.unsqueeze(1)).squeeze(1), (hidden, head))
    assert (ours.entropy_R + (table.exp() * table).sum(1)).abs().max() < 1e-11


def test_the_lm_head_is_padded_once_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary that is no multiple of 64 costs one copy of the table, not one per chunk of rows."""
    copies: list[int] = []
    module = sys.modules["zerogap.ops.portable.linear"]  # the package has the function under this name
    pad = module.pad

    def counted(x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        copies.append(len(x))
        return pad(x, sizes)

    monkeypatch.setattr(module, "pad", counted)
    hidden, head = torch.randn(300, 32).requires_grad_(), torch.randn(70, 32).requires_grad_()
    settings = ops.SamplerRows.uniform_settings(300)
    ops.token_logprobs(hidden, head, torch.zeros(300, dtype=torch.int64), settings).logprob_R.sum().backward()
    assert copies.count(70) == 2, "forward and backward"


def test_token_logprobs_of_kept_sets() -> None:
    hidden, head = normal(90, 12), normal(70, 12, seed=1)
    settings_R = ops.SamplerRows.uniform_settings(90, 0.8, top_k=20, top_p=0.9, min_p=0.01)
    logits = hidden @ head.T / 0.8
    kept = ops.log_distribution((hidden @ head.T).detach(), settings_R).kept_RV
    target = torch.where(kept, torch.rand(90, 70, generator=torch.Generator().manual_seed(2)), -1.0).argmax(1)
    theirs = torch.log_softmax(logits.masked_fill(~kept, -torch.inf), -1).gather(1, target.unsqueeze(1)).squeeze(1)
    ours = ops.token_logprobs(hidden, head, target, settings_R, want_kept=True)
    check(ours.logprob_R, theirs, (hidden, head))
    replay = ops.token_logprobs(hidden, head, target, settings_R.replaying(ours.kept))
    assert torch.equal(replay.logprob_R, ours.logprob_R)


def test_replayed_set_far_below_the_rest_stays_finite() -> None:
    """Later weights may put every kept token far below one that was not kept."""
    kept = (torch.tensor([1, 3]),)
    settings_R = ops.SamplerRows.uniform_settings(1, top_p=0.5).replaying(kept)
    distribution = ops.log_distribution(torch.tensor([[500.0, 1.0, 499.0, 2.0]]), settings_R)
    expected = torch.log_softmax(torch.tensor([1.0, 2.0]), 0)
    assert (distribution.logprobs_of(torch.tensor([3])) - expected[1]).abs() < 1e-6
    assert distribution.logprobs_of(torch.tensor([0])).item() == -torch.inf
    assert bool(distribution.entropy_R.isfinite())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exp_and_log(dtype: torch.dtype) -> None:
    ulp = torch.finfo(dtype).eps
    x = torch.linspace(-86.9, 86.9, 200001, dtype=dtype)
    exact = torch.exp(x.to(F64)) if dtype == torch.float32 else torch.exp(x)
    assert ((exp(x).to(F64) - exact) / exact).abs().max() < 2 * ulp
    y = torch.cat((torch.linspace(1e-3, 4, 200001, dtype=dtype), torch.logspace(-37, 37, 4001, dtype=dtype)))
    exact = torch.log(y.to(F64))
    assert ((log(y).to(F64) - exact).abs() / exact.abs().clamp(min=1)).max() < 2 * ulp
    special = torch.tensor([-torch.inf, -1000, 0, torch.nan], dtype=dtype)
    assert exp(special)[:3].tolist() == [0.0, 0.0, 1.0]
    assert exp(special)[3].isnan()
    assert log(torch.tensor([1.0, 0.0, torch.inf], dtype=dtype)).tolist() == [0.0, -torch.inf, torch.inf]


@given(st.integers(1, 3000), st.integers(1, 300))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_sums(length: int, block: int) -> None:
    x = torch.randn(3, length, generator=torch.Generator().manual_seed(length), dtype=F64)
    exact = torch.tensor([math.fsum(row) for row in x.tolist()], dtype=F64)
    for total in (tree_sum(x), blocked_sum(x, block)):
        assert (total - exact).abs().max() < 1e-11


def reference_kept(row: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The definition in plain Python, on exact fractions of float64 weights."""
    scaled = torch.tensor(row) / torch.tensor(temperature)
    shifted = (scaled - scaled.max()).tolist()
    weights = exp(scaled - scaled.max()).tolist()
    ranked = sorted(range(len(row)), key=lambda i: (-shifted[i], i))[: top_k or len(row)]
    total, before, kept = math.fsum(weights[i] for i in ranked), 0.0, set()
    for place, i in enumerate(ranked):
        if top_p >= 1 or place == 0 or before < top_p * total * (1 - 1e-6):
            kept.add(i)
        elif before < top_p * total * (1 + 1e-6):
            return set()  # too near the border for a reference that sums in another order
        before += weights[i]
    return {i for i in kept if weights[i] >= torch.tensor(min_p).item()}


@settings(max_examples=80, deadline=None, derandomize=True)
@given(data=st.data())
def test_kept_sets(data: st.DataObject) -> None:
    vocabulary = data.draw(st.sampled_from([2, 7, 50, 700]))
    ties = data.draw(st.booleans())
    seed = data.draw(st.integers(0, 10**6))
    logits = torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2
    if ties:
        logits = logits.round()
    values = {
        "temperature": data.draw(st.sampled_from([0.25, 1.0, 2.0])),
        "top_k": data.draw(st.sampled_from([0, 1, 5, vocabulary, vocabulary + 3])),
        "top_p": data.draw(st.sampled_from([0.05, 0.5, 0.95, 1.0])),
        "min_p": data.draw(st.sampled_from([0.0, 0.1])),
    }
    distribution = ops.log_distribution(logits, ops.SamplerRows.uniform_settings(4, **values))
    kept = distribution.kept_RV if distribution.kept_RV is not None else torch.ones(4, vocabulary, dtype=torch.bool)
    for row in range(4):
        expected = reference_kept(logits[row].tolist(), **values)
        if expected:
            assert set(kept[row].nonzero().squeeze(1).tolist()) == expected
    assert (distribution.logprob_RV.exp().sum(1) - 1).abs().max() < 1e-5


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -torch.inf, 0.5]])
    distribution = ops.log_distribution(logits.expand(20000, -1), ops.SamplerRows.uniform_settings(20000))
    tokens = ops.draw(distribution, ops.uniform(1, [(0, i, 0, 0) for i in range(20000)]))
    share = tokens.bincount(minlength=5) / 20000
    assert (share - torch.softmax(logits[0], 0)).abs().max() < 0.015
    assert share[3] == 0


def test_draw_edges() -> None:
    distribution = ops.log_distribution(torch.tensor([[1.0, 5.0, 5.0, 0.0]] * 3), ops.SamplerRows.uniform_settings(3))
    assert ops.draw(distribution, torch.tensor([0.0, 1 - 2**-53, 0.5], dtype=F64)).tolist()[:2] == [0, 3]
    greedy = ops.log_distribution(torch.tensor([[1.0, 5.0, 5.0, 0.0]]), ops.SamplerRows.uniform_settings(1, 0.0))
    assert ops.draw(greedy, torch.zeros(1, dtype=F64)).tolist() == [1], "the lower id wins a tie"


def test_random_numbers_depend_on_their_key_only() -> None:
    keys = [
        (step, prompt, sample, position)
        for step in (0, 7)
        for prompt in (0, 1)
        for sample in (0, 3)
        for position in (5, 6)
    ]
    together = ops.uniform(3, keys)
    assert together.tolist() == [ops.uniform(3, [key]).item() for key in keys]
    assert len(set(together.tolist())) == len(keys)
    assert not torch.equal(together, ops.uniform(4, keys))
    assert bool(((together >= 0) & (together < 1)).all())
