"""Gradients of attention against float64 autograd; repeatable, whatever the threads and paths."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from test_attention import SCALE, THREADS, Part, heads, packed, plan_of, reference, same
from zerogap_kernels import _kernels as kernels


def gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
    parts: Sequence[Part] | None = None,
    threads: int = 1,
) -> list[torch.Tensor]:
    out, stats = packed(q, k, v, parts, threads)
    plan = plan_of(parts or [Part(0, len(q), range(len(q)))], 1)
    grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    kernels.attention_backward(q, k, v, out, stats, grad, plan, SCALE, *grads, threads)
    return grads


def exact_gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, parts: Sequence[Part]
) -> list[torch.Tensor]:
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    outs, row = [], 0
    for part in parts:
        slots = list(part.pages)[: part.start + part.count]
        outs.append(reference(leaves[0][row : row + part.count], leaves[1][slots], leaves[2][slots]))
        row += part.count
    torch.cat(outs).backward(grad.double())
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("length", [1, 2, 16, 17, 63, 64, 65, 150])
@pytest.mark.parametrize(("heads_", "kv_heads", "dim"), [(3, 1, 32), (4, 2, 80), (2, 2, 9), (8, 1, 64)])
def test_against_autograd(length: int, heads_: int, kv_heads: int, dim: int, path: str) -> None:
    q, k, v = (heads(length, n, dim, seed=i) for i, n in enumerate((heads_, kv_heads, kv_heads)))
    grad = heads(length, heads_, dim, seed=5)
    exact = exact_gradients(q, k, v, grad, [Part(0, length, range(length))])
    for ours, theirs in zip(gradients(q, k, v, grad), exact, strict=True):
        assert (ours.double() - theirs).abs().max() < 2e-5 * theirs.abs().max() + 1e-6


def test_long_sequence_against_autograd(path: str) -> None:
    q, k, v = heads(1100, 2, 32), heads(1100, 1, 32, seed=1), heads(1100, 1, 32, seed=2)
    grad = heads(1100, 2, 32, seed=3)
    exact = exact_gradients(q, k, v, grad, [Part(0, 1100, range(1100))])
    for ours, theirs in zip(gradients(q, k, v, grad, threads=2), exact, strict=True):
        assert (ours.double() - theirs).abs().max() < 2e-5 * theirs.abs().max() + 1e-6


def shared() -> list[Part]:
    """Two prompts with three and one responses, interleaved, and a sequence of its own."""
    first, second = range(40), range(40, 73)
    parts = [Part(0, 40, first), Part(0, 33, second)]
    row = 73
    for prompt, count in ((first, 30), (second, 20), (first, 1), (first, 70)):
        parts.append(Part(len(prompt), count, [*prompt, *range(row, row + count)]))
        row += count
    return [*parts, Part(0, 25, range(row, row + 25))]


def test_shared_prompts(path: str) -> None:
    parts = shared()
    rows = sum(part.count for part in parts)
    q, k, v = heads(rows, 6, 64), heads(rows, 2, 64, seed=1), heads(rows, 2, 64, seed=2)
    grad = heads(rows, 6, 64, seed=3)
    exact = exact_gradients(q, k, v, grad, parts)
    once = gradients(q, k, v, grad, parts)
    for ours, theirs in zip(once, exact, strict=True):
        assert (ours.double() - theirs).abs().max() < 2e-5 * theirs.abs().max()
    for threads in THREADS:
        assert all(same(a, b) for a, b in zip(gradients(q, k, v, grad, parts, threads), once, strict=True))
    # The forward of a response is that of prompt and response in one piece.
    out, _ = packed(q, k, v, parts)
    slots = list(parts[5].pages)
    whole, _ = packed(torch.cat((q[:40], q[slots[40:]])), k[slots], v[slots])
    assert same(out[slots[40:]], whole[40:])


def test_all_paths_give_the_same_bits() -> None:
    parts = shared()
    rows = sum(part.count for part in parts)
    inputs = heads(rows, 6, 80), heads(rows, 2, 80, seed=1), heads(rows, 2, 80, seed=2), heads(rows, 6, 80, seed=3)
    before, results = kernels.path(), []
    for name in kernels.paths_here():
        kernels.choose_path(name)
        results.append(gradients(*inputs, parts))
    kernels.choose_path(before)
    assert all(same(a, b) for result in results for a, b in zip(result, results[0], strict=True))


def test_a_slot_without_rows_has_no_gradient(path: str) -> None:
    q, k, v = heads(9, 2, 16), heads(20, 1, 16), heads(20, 1, 16)
    _, grad_k, grad_v = gradients(q, k, v, heads(9, 2, 16, seed=1), [Part(0, 9, range(3, 12))])
    for grad in (grad_k, grad_v):
        assert not any(part.any() for part in (grad[:3], grad[12:]))
        assert bool(grad_v[3:12].any())


def test_nan_stays_in_its_sequence(path: str) -> None:
    q, k, v = heads(60, 2, 32), heads(60, 1, 32, seed=1), heads(60, 1, 32, seed=2)
    grad = heads(60, 2, 32, seed=3)
    parts = [Part(0, 30, range(30)), Part(0, 30, range(30, 60))]
    clean = gradients(q, k, v, grad, parts)
    for x in (q, k, v, grad):
        x[:30] = torch.nan
    assert all(same(a[30:], b[30:]) for a, b in zip(gradients(q, k, v, grad, parts), clean, strict=True))


def test_no_rows(path: str) -> None:
    empty = torch.empty(0, 2, 16)
    assert all(x.shape == (0, 2, 16) for x in gradients(empty, empty, empty, empty, [Part(0, 0, [])]))
