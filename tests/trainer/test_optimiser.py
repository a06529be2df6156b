import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from tests.support import same_bits
from zerogap.errors import UsageError, ZerogapError
from zerogap.ops import backend
from zerogap.trainer.optimiser import Optimiser, OptimiserSettings, learning_rate, sum_of_squares


def parameters(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"layer.weight": (7, 5), "layer.bias": (7,), "norm.weight": (5,)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def set_gradients(named, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in named.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def plain_adamw(named, gradients, settings):
    """Algorithm 2 of AdamW (arXiv 1711.05101) in float64, with clipping by the global norm."""
    values = {name: p.detach().double().numpy().copy() for name, p in named.items()}
    first = {name: np.zeros_like(v) for name, v in values.items()}
    second = {name: np.zeros_like(v) for name, v in values.items()}
    for update, grads in enumerate(gradients):
        norm = math.sqrt(sum(float((g**2).sum()) for g in grads.values()))
        scale = min(1.0, settings.max_grad_norm / norm) if settings.max_grad_norm else 1.0
        rate = learning_rate(settings, update)
        for name, value in values.items():
            g = grads[name] * scale
            if value.ndim >= 2:
                value *= 1 - rate * settings.weight_decay
            first[name] = settings.beta1 * first[name] + (1 - settings.beta1) * g
            second[name] = settings.beta2 * second[name] + (1 - settings.beta2) * g**2
            m = first[name] / (1 - settings.beta1 ** (update + 1))
            v = second[name] / (1 - settings.beta2 ** (update + 1))
            value -= rate * m / (np.sqrt(v) + settings.epsilon)
    return values


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
def test_against_the_algorithm(max_grad_norm):
    settings = OptimiserSettings(
        0.05, 0.8, 0.9, weight_decay=0.3, schedule="linear", warmup_updates=2, total_updates=6,
        max_grad_norm=max_grad_norm,
    )  # fmt: skip
    named = {name: nn.Parameter(p.detach().double()) for name, p in parameters().items()}
    start = {name: nn.Parameter(p.detach().clone()) for name, p in named.items()}
    optimiser, gradients = Optimiser(named.items(), settings), []
    for update in range(5):
        set_gradients(named, seed=update)
        gradients.append({name: p.grad.double().numpy().copy() for name, p in named.items()})
        stats = optimiser.apply()
        assert stats.grad_norm == pytest.approx(math.sqrt(sum((g**2).sum() for g in gradients[-1].values())))
        assert stats.clipped == (max_grad_norm > 0)
        assert all(p.grad is None for p in named.values())
    for name, expected in plain_adamw(start, gradients, settings).items():
        np.testing.assert_allclose(named[name].detach().numpy(), expected, rtol=1e-12, atol=1e-12)


def test_torchs_compiler_is_not_imported():
    """torch.optim's classes import it: 60 MiB and a second or two of every start."""
    code = (
        "import sys, torch\n"
        "from zerogap.trainer.optimiser import Optimiser, OptimiserSettings\n"
        "weight = torch.nn.Parameter(torch.ones(3, 3, dtype=torch.float64))\n"
        "optimiser = Optimiser([('weight', weight)], OptimiserSettings())\n"
        "weight.sum().backward()\n"
        "optimiser.apply()\n"
        "assert float(weight.max()) < 1\n"
        "sys.exit('torch._dynamo' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


native = pytest.mark.skipif(bool(backend.native_missing()), reason="no zerogap-kernels")


@pytest.fixture(params=[pytest.param("native", marks=native), "portable"])
def each_backend(request):
    with backend.using(request.param):
        yield


def large(seed=0):
    """Parameters of several of the kernels' tasks and blocks, and of odd sizes."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"wide.weight": (301, 433), "norm.weight": (4097,), "one.bias": (1,)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
def test_float32_follows_the_algorithm(each_backend, max_grad_norm):
    settings = OptimiserSettings(0.05, 0.8, 0.9, weight_decay=0.3, max_grad_norm=max_grad_norm)
    named, gradients = large(), []
    start = {name: nn.Parameter(p.detach().clone()) for name, p in named.items()}
    optimiser = Optimiser(named.items(), settings)
    for update in range(4):
        set_gradients(named, seed=update)
        gradients.append({name: p.grad.double().numpy().copy() for name, p in named.items()})
        counts = {name: p._version for name, p in named.items()}
        assert optimiser.apply().clipped == (max_grad_norm > 0)
        assert all(p._version > counts[name] for name, p in named.items()), "torch must know of the change"
    for name, expected in plain_adamw(start, gradients, settings).items():
        np.testing.assert_allclose(named[name].detach().numpy(), expected, rtol=2e-5, atol=2e-6)
    shapes = {name: (t.dtype, tuple(t.shape)) for name, t in optimiser.state_tensors().items()}
    assert shapes["step.wide.weight"] == (torch.float32, ())
    assert shapes["exp_avg.wide.weight"] == shapes["exp_avg_sq.wide.weight"] == (torch.float32, (301, 433))
    assert optimiser.state_tensors()["step.one.bias"] == 4


def test_an_update_has_the_same_bits_at_every_thread_count(each_backend):
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 1, 2, 3, 5):
            torch.set_num_threads(count)
            named = large()
            optimiser = Optimiser(named.items(), OptimiserSettings(0.05, weight_decay=0.1, max_grad_norm=0.7))
            for update in range(3):
                set_gradients(named, update)
                optimiser.apply()
            found.append([*(p.detach() for p in named.values()), *optimiser.state_tensors().values()])
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(same_bits(a, b) for a, b in zip(found[0], other, strict=True))


def test_a_state_goes_over_to_the_other_backend():
    """Names, shapes and meaning of the state are the same: a step by the other one is nearly the same step."""
    if backend.native_missing():
        pytest.skip("no zerogap-kernels")
    ends = []
    for second in ("native", "portable"):
        named = large()
        with backend.using("native"):
            one = Optimiser(named.items(), OptimiserSettings(0.05))
            set_gradients(named, 0)
            one.apply()
        two = Optimiser(named.items(), OptimiserSettings(0.05))
        two.restore(1, [(name, t.clone()) for name, t in one.state_tensors().items()])
        with backend.using(second):
            set_gradients(named, 1)
            two.apply()
        ends.append(named)
    for name in ends[0]:
        assert torch.allclose(ends[0][name], ends[1][name], rtol=1e-5, atol=1e-6)


def test_schedules_by_hand():
    def rates(**changes):
        settings = OptimiserSettings(learning_rate=8.0, **changes)
        return [learning_rate(settings, update) for update in range(6)]

    assert rates() == [8.0] * 6
    assert rates(warmup_updates=2) == [4.0, 8.0, 8.0, 8.0, 8.0, 8.0]
    assert rates(schedule="linear", total_updates=4) == [8.0, 6.0, 4.0, 2.0, 0.0, 0.0]
    assert rates(schedule="linear", warmup_updates=1, total_updates=3, final_share=0.5) == [
        8.0,
        8.0,
        6.0,
        4.0,
        4.0,
        4.0,
    ]
    assert rates(schedule="cosine", total_updates=4) == pytest.approx(
        [8.0, 4 + 4 * math.sqrt(0.5), 4.0, 4 - 4 * math.sqrt(0.5), 0.0, 0.0]
    )


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, (1 << 20) + 4097])
def test_sum_of_squares_has_the_same_bits_at_every_thread_count(each_backend, size):
    values = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 3
    threads = torch.get_num_threads()
    try:
        found = set()
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            found.add(sum_of_squares(values))
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1
    assert found.pop() == pytest.approx(float((values.double() ** 2).sum()), rel=1e-13)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_named(each_backend, bad):
    named = parameters()
    optimiser = Optimiser(named.items(), OptimiserSettings())
    set_gradients(named, 0)
    optimiser.apply()
    before = {name: p.detach().clone() for name, p in named.items()}
    moments = {name: t.clone() for name, t in optimiser.state_tensors().items()}
    set_gradients(named, 1)
    named["layer.bias"].grad[3] = bad
    with pytest.raises(ZerogapError, match=r"update 1: the gradient of layer\.bias \(and 0 more\) is not finite"):
        optimiser.apply()
    assert all(torch.equal(before[name], p) for name, p in named.items())
    assert all(torch.equal(moments[name], t) for name, t in optimiser.state_tensors().items())
    assert optimiser.updates == 1


def test_an_update_without_gradients_moves_nothing_and_counts():
    named = parameters()
    optimiser = Optimiser(named.items(), OptimiserSettings(0.1, weight_decay=0.5))
    before = {name: p.detach().clone() for name, p in named.items()}
    stats = optimiser.apply()
    assert stats.grad_norm == 0
    assert optimiser.updates == 1
    assert all(torch.equal(before[name], p) for name, p in named.items())


def test_restore_goes_on_bit_for_bit(each_backend):
    settings = OptimiserSettings(0.05, weight_decay=0.1, schedule="cosine", total_updates=9)
    straight = parameters()
    one = Optimiser(straight.items(), settings)
    for update in range(3):
        set_gradients(straight, update)
        one.apply()
    resumed = {name: nn.Parameter(p.detach().clone()) for name, p in straight.items()}
    two = Optimiser(resumed.items(), settings)
    two.restore(one.updates, [(name, t.clone()) for name, t in one.state_tensors().items()])
    for update in range(3, 6):
        for named, optimiser in ((straight, one), (resumed, two)):
            set_gradients(named, update)
            optimiser.apply()
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    assert all(torch.equal(t, two.state_tensors()[name]) for name, t in one.state_tensors().items())
    assert two.updates == 6


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"exp_avg.other": torch.zeros(1)}, r"exp_avg\.other \[1\] fits no parameter"),
        ({"exp_avg.layer.bias": torch.zeros(8)}, r"exp_avg\.layer\.bias \[8\] fits no parameter"),
        ({"momentum.layer.bias": torch.zeros(7)}, "fits no parameter"),
        ({"exp_avg.layer.bias": torch.zeros(7)}, "lacks exp_avg_sq, step"),
    ],
)
def test_a_state_of_another_model_is_refused(tensors, said):
    with pytest.raises(UsageError, match=said):
        Optimiser(parameters().items(), OptimiserSettings()).restore(1, tensors.items())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"learning_rate": 0.0}, "learning_rate = 0.0"),
        ({"beta2": 1.0}, "beta2"),
        ({"max_grad_norm": -1.0}, "max_grad_norm"),
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
        ({"schedule": "linear", "warmup_updates": 5, "total_updates": 5}, "total_updates above warmup_updates"),
    ],
)
def test_settings_out_of_range_are_refused(settings, said):
    with pytest.raises(UsageError, match=said):
        OptimiserSettings(**settings)
