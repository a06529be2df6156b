"""Gradients that backwards add to ``.grad`` themselves: the sums that autograd would make, and only where asked for."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from zerogap import ops
from zerogap.ops import backend
from zerogap.ops.adding import adding_gradients, sum_so_far

native = pytest.mark.skipif(bool(backend.native_missing()), reason="no zerogap-kernels")

VOCABULARY, WIDTH = 67, 24


@pytest.fixture(params=[pytest.param("native", marks=native), "portable"], autouse=True)
def each_backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with backend.using(request.param):
        yield request.param


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tied_model() -> dict[str, nn.Parameter]:
    """A table that is embedding and head, and a layer with a bias."""
    shapes = {"table": (VOCABULARY, WIDTH), "weight": (WIDTH, WIDTH), "bias": (WIDTH,)}
    return {name: nn.Parameter(normal(*shape, seed=i)) for i, (name, shape) in enumerate(shapes.items())}


def loss(model: dict[str, nn.Parameter], batch: int) -> torch.Tensor:
    ids = torch.randint(VOCABULARY, (11 + batch,), generator=torch.Generator().manual_seed(batch))
    hidden = ops.linear(ops.embedding(ids, model["table"]), model["weight"], model["bias"])
    settings = ops.SamplerRows.uniform_settings(len(ids), 1.0)
    return ops.token_logprobs(hidden, model["table"], ids.roll(1), settings).logprob_R.sum()


def exact_sums(batches: int) -> dict[str, torch.Tensor]:
    model = {name: nn.Parameter(p.detach().double()) for name, p in tied_model().items()}
    for batch in range(batches):
        loss(model, batch).backward()
    return {name: p.grad for name, p in model.items()}


def test_sums_over_micro_batches_are_right_and_stay_in_place() -> None:
    model, places = tied_model(), []
    for batch in range(3):
        with adding_gradients():
            loss(model, batch).backward()
        places.append({name: p.grad.data_ptr() for name, p in model.items()})
    assert places[1] == places[2]
    for name, exact in exact_sums(3).items():
        error = float((model[name].grad - exact).abs().max())
        assert error <= 1e-5 * float(exact.abs().max()), name


@pytest.mark.parametrize("within", [True, False])
def test_only_native_ops_within_the_block_keep_the_gradient_from_autograd(each_backend: str, within: bool) -> None:
    """Hooks of a weight see what autograd gets: nothing, where the op has added it itself."""
    model, seen = tied_model(), []
    loss(model, 0).backward()
    for name in ("table", "weight"):
        model[name].register_hook(lambda grad, name=name: None if grad is None else seen.append(name))
    with adding_gradients() if within else nullcontext():
        loss(model, 1).backward()
    assert set(seen) == (set() if within and each_backend == "native" else {"table", "weight"})


def test_the_same_batches_give_the_same_bits() -> None:
    results = []
    for _ in range(2):
        model = tied_model()
        for batch in range(3):
            with adding_gradients():
                loss(model, batch).backward()
        results.append([p.grad.clone() for p in model.values()])
    assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(*results, strict=True))


def test_outside_of_the_block_gradients_are_returned_and_nothing_is_touched() -> None:
    model = tied_model()
    loss(model, 0).backward()
    before = {name: p.grad.clone() for name, p in model.items()}
    grads = torch.autograd.grad(loss(model, 1), list(model.values()))
    for (name, p), grad in zip(model.items(), grads, strict=True):
        assert torch.equal(p.grad, before[name])
        assert float(grad.abs().max()) > 0


def test_without_rows_nothing_is_added() -> None:
    model = tied_model()
    loss(model, 0).backward()
    before = model["table"].grad.clone()
    none = torch.zeros(0, dtype=torch.int64)
    with adding_gradients():
        hidden = ops.embedding(none, model["table"])
        ops.token_logprobs(
            hidden, model["table"], none, ops.SamplerRows.uniform_settings(0, 1.0)
        ).logprob_R.sum().backward()
    assert torch.equal(model["table"].grad, before)


@pytest.mark.parametrize("reason", ["no block", "no gradient yet", "another format", "strided", "no leaf", "frozen"])
def test_where_nothing_can_be_added_in_place(reason: str) -> None:
    weight = nn.Parameter(normal(4, 6, seed=1))
    weight.grad = torch.zeros(4, 6)
    with adding_gradients():
        assert sum_so_far(weight) is weight.grad
    if reason == "no block":
        assert sum_so_far(weight) is None
        return
    if reason == "no gradient yet":
        weight.grad = None
    elif reason == "another format":
        weight = nn.Parameter(weight.detach().double())
        weight.grad = torch.zeros(4, 6, dtype=torch.float64)
    elif reason == "strided":
        weight.grad = torch.zeros(6, 4).T
    elif reason == "frozen":
        weight.requires_grad_(False)
    with adding_gradients():
        assert sum_so_far(weight * 2 if reason == "no leaf" else weight) is None
