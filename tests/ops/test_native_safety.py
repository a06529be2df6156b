"""The native backend in hard company: engines at once, forks, interrupts, odd tensors, a package that does not load."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support import random_decoder, same_bits
from zerogap import ops
from zerogap.engine import Completion, Engine, EngineConfig, Request, SamplingParams
from zerogap.errors import UsageError
from zerogap.models.hub import resolve_model
from zerogap.models.tokenizer import load_tokenizer
from zerogap.ops import backend

kernels = pytest.importorskip("zerogap_kernels")


@pytest.fixture(autouse=True)
def native() -> object:
    before = torch.get_num_threads()
    with backend.using("native"):
        yield
    torch.set_num_threads(before)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def engine_of(decoder: object) -> Engine:
    tokenizer = load_tokenizer(resolve_model("builtin:tiny-qwen3"))
    return Engine(decoder, tokenizer, EngineConfig(num_pages=64, page_size=8, max_rows_per_step=24))  # type: ignore[arg-type]


def requests(seed: int) -> list[Request]:
    params = SamplingParams(max_tokens=24, top_p=0.9, seed=seed)
    return [Request((seed, n, 0), tuple(range(1, 5 + 3 * n)), params) for n in range(5)]


def words(completions: list[Completion]) -> list[tuple[object, ...]]:
    """Tokens and the bits of their log-probs."""
    return [(c.tokens, torch.tensor(c.logprobs).view(torch.int32).tolist()) for c in completions]


@pytest.mark.parametrize("shared", [False, True], ids=["decoders of their own", "one decoder"])
def test_two_engines_at_once_give_the_bits_of_each_alone(shared: bool) -> None:
    decoder = random_decoder("qwen3", vocab_size=64).eval().requires_grad_(False)
    other = decoder if shared else copy.deepcopy(decoder)
    alone = [words(engine_of(decoder).generate(requests(seed))) for seed in (1, 2)]
    assert alone[0] != alone[1]
    for _ in range(3):
        found: dict[int, list[tuple[object, ...]]] = {}
        engines = {1: engine_of(decoder), 2: engine_of(other)}

        def work(seed: int, found: dict = found, engines: dict = engines) -> None:
            found[seed] = words(engines[seed].generate(requests(seed)))

        members = [threading.Thread(target=work, args=(seed,)) for seed in engines]
        for member in members:
            member.start()
        for member in members:
            member.join()
        assert [found[1], found[2]] == alone


def test_backwards_of_two_threads_do_not_meet() -> None:
    def gradients(seed: int) -> list[Tensor]:
        x, weight = normal(40, 96, seed=seed).requires_grad_(), normal(64, 96, seed=seed + 9).requires_grad_()
        return list(torch.autograd.grad(ops.linear(x, weight), (x, weight), normal(40, 64, seed=seed + 5)))

    alone = [gradients(seed) for seed in (1, 2)]
    wrong: list[int] = []

    def work(seed: int) -> None:
        for _ in range(30):
            if not all(same_bits(a, b) for a, b in zip(gradients(seed), alone[seed - 1], strict=True)):
                wrong.append(seed)

    torch.set_num_threads(1)
    alone = [gradients(seed) for seed in (1, 2)]
    members = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    for member in members:
        member.start()
    for member in members:
        member.join()
    assert not wrong


def test_a_forked_child_generates_the_same_bits() -> None:
    torch.set_num_threads(3)  # a pool of 3 idles when the child is forked
    decoder = random_decoder("qwen3", vocab_size=64).eval().requires_grad_(False)
    engine = engine_of(decoder)
    expected = words(engine.generate(requests(1)))
    child = os.fork()
    if child == 0:
        signal.alarm(100)  # a child that hangs dies of it
        # The engine alone: torch's own threads do not survive a fork, ours do.
        os._exit(0 if words(engine_of(decoder).generate(requests(1))) == expected else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert words(engine_of(decoder).generate(requests(1))) == expected


INTERRUPTED = """
import os, signal, sys, threading
import torch
from tests.ops.test_native_safety import engine_of, requests, words
from tests.support import random_decoder

decoder = random_decoder("qwen3", vocab_size=64).eval().requires_grad_(False)
expected = words(engine_of(decoder).generate(requests(1)))
interrupted = 0
for wait in (0.002, 0.005, 0.01, 0.02, 0.03):
    engine = engine_of(decoder)
    timer = threading.Timer(wait, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        while True:
            engine.generate(requests(2))
    except KeyboardInterrupt:
        interrupted += 1
    timer.join()
    assert words(engine_of(decoder).generate(requests(1))) == expected
print("interrupted", interrupted)
"""


def test_an_interrupt_leaves_the_decoder_usable() -> None:
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        env={**os.environ, "PYTHONPATH": path, "ZEROGAP_BACKEND": "native"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.stdout.split() == ["interrupted", "5"], done.stderr


def test_a_copied_or_stored_decoder_records_its_own_program() -> None:
    decoder = random_decoder("qwen3", vocab_size=64).eval().requires_grad_(False)
    expected = words(engine_of(decoder).generate(requests(1)))  # now it holds a program and packed weights
    for other in (copy.deepcopy(decoder), pickle.loads(pickle.dumps(decoder))):
        assert words(engine_of(other).generate(requests(1))) == expected
        with torch.no_grad():
            other.lm_head_weight.mul_(-1)
            for weight in other.parameters():
                weight.mul_(1.5)
        assert words(engine_of(other).generate(requests(1))) != expected
        assert words(engine_of(decoder).generate(requests(1))) == expected


# Odd tensors.

WEIGHT, PLAN = normal(24, 48, seed=1), ops.AttentionPlan.build([ops.Chunk(0, 9, range(9))], 1)
ANGLES = normal(9, 8, seed=2).cos(), normal(9, 8, seed=2).sin()
UNARY: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "linear": (lambda x: ops.linear(x, WEIGHT), (9, 48)),
    "linear, weight": (lambda w: ops.linear(normal(5, 48), w), (9, 48)),
    "linear, bias": (lambda b: ops.linear(normal(5, 48), WEIGHT, b), (24,)),
    "rms_norm": (lambda x: ops.rms_norm(x, WEIGHT[0], 1e-5), (9, 48)),
    "rms_norm, heads": (lambda x: ops.rms_norm(x, WEIGHT[0, :16], 1e-5), (9, 4, 16)),
    "rms_norm, weight": (lambda w: ops.rms_norm(normal(9, 48), w, 1e-5), (48,)),
    "rotary": (lambda x: ops.rotary(x, *ANGLES), (9, 4, 16)),
    "rotary, cos": (lambda c: ops.rotary(normal(9, 4, 16), c, ANGLES[1]), (9, 8)),
    "silu_mul": (lambda x: ops.silu_mul(x, normal(9, 48)), (9, 48)),
    "silu_mul, up": (lambda x: ops.silu_mul(normal(9, 48), x), (9, 48)),
    "embedding": (lambda w: ops.embedding(torch.arange(9), w), (9, 48)),
    "attention, q": (lambda q: ops.attention(q, normal(9, 2, 16), normal(9, 2, 16), PLAN, 0.25), (9, 4, 16)),
    "attention, k": (lambda k: ops.attention(normal(9, 4, 16), k, normal(9, 2, 16), PLAN, 0.25), (9, 2, 16)),
    "attention, v": (lambda v: ops.attention(normal(9, 4, 16), normal(9, 2, 16), v, PLAN, 0.25), (9, 2, 16)),
    "token_logprobs": (lambda x: score(x, WEIGHT), (9, 48)),
    "token_logprobs, head": (lambda w: score(normal(9, 48), w), (33, 48)),
}


def score(x: Tensor, head: Tensor) -> Tensor:
    settings = ops.SamplerRows.uniform_settings(len(x), 0.8, 5)
    return ops.token_logprobs(x, head, torch.arange(len(x)) % 4, settings).logprob_R


def laid_out(x: Tensor) -> dict[str, Tensor]:
    """The same values in every layout that a tensor can have."""
    wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan)
    wide[..., ::2] = x
    part = x.new_full((*x.shape[:-1], x.shape[-1] + 3), torch.nan)
    part[..., 1:-2] = x
    rows = x.new_full((2 * len(x), *x.shape[1:]), torch.nan)
    rows[1::2] = x
    shifted = x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
    return {
        "every second element": wide[..., ::2],
        "part of a row": part[..., 1:-2],
        "every second row": rows[1::2],
        "transposed": x.transpose(0, -1).contiguous().transpose(0, -1),
        "aligned to elements only": shifted,
        "with a gradient": x.clone().requires_grad_(),
        "a parameter": torch.nn.Parameter(x.clone()),
    }


@pytest.mark.parametrize("name", UNARY)
def test_layouts_do_not_change_bits(name: str) -> None:
    run, shape = UNARY[name]
    x = normal(*shape, seed=4)
    expected = run(x)
    for layout, same in laid_out(x).items():
        assert same_bits(run(same).detach(), expected), layout


@pytest.mark.parametrize("name", UNARY)
def test_wrong_tensors_are_refused_with_their_shape(name: str) -> None:
    run, shape = UNARY[name]
    x = normal(*shape, seed=4)
    numbers = ", ".join(map(str, shape if name != "rms_norm, heads" else (36, 16)))
    for dtype in (torch.int64, torch.bool, torch.complex64):
        with pytest.raises(ValueError, match=rf"\[{numbers}\]: (wrong dtype|must)"):
            run(x.to(dtype))
    with pytest.raises(ValueError, match=r"\[.*\] is on meta: the native kernels take tensors of the CPU"):
        run(x.to("meta"))
    room = bytearray(2) + bytearray(x.numpy().tobytes())
    off = torch.frombuffer(room, dtype=torch.float32, offset=2).view(shape)
    with pytest.raises(ValueError, match=rf"\[{numbers}\]: its memory is not aligned"):
        run(off)


@pytest.mark.parametrize("rows", [0, 1])
def test_no_rows_and_one(rows: int) -> None:
    x = normal(rows, 48).requires_grad_()
    plan = ops.AttentionPlan.build([ops.Chunk(0, rows, range(rows))] if rows else [], 1)
    results = [
        ops.linear(x, WEIGHT),
        ops.rms_norm(x, WEIGHT[0], 1e-5),
        ops.silu_mul(x, x),
        ops.rotary(x.unflatten(1, (3, 16)), ANGLES[0][:rows], ANGLES[1][:rows]),
        ops.attention(x.unflatten(1, (3, 16)), x.unflatten(1, (3, 16)), x.unflatten(1, (3, 16)), plan, 0.25),
        score(x, WEIGHT),
    ]
    for result in results:
        assert len(result) == rows
        (grad,) = torch.autograd.grad(result.sum(), x)
        assert grad.shape == x.shape
        assert bool(grad.isfinite().all())
    assert ops.embedding(torch.zeros(rows, dtype=torch.int64), WEIGHT).shape == (rows, 48)
    settings = ops.SamplerRows.uniform_settings(rows, 0.8)
    drawn = ops.sample(x, WEIGHT, settings, torch.full((rows,), 0.5, dtype=torch.float64))
    assert drawn.token_R.shape == (rows,)


@pytest.mark.parametrize("vocab", [1, 2, 15, 17, 1023, 1025, 4099])
def test_odd_vocabularies(vocab: int) -> None:
    x, head = normal(7, 24).requires_grad_(), normal(vocab, 24, seed=1).requires_grad_()
    settings = ops.SamplerRows.uniform_settings(7, 0.9, 40, 0.9)
    drawn = ops.sample(x, head, settings, torch.arange(7, dtype=torch.float64) / 7)
    assert int(drawn.token_R.max()) < vocab
    scored = ops.token_logprobs(x, head, drawn.token_R, settings)
    assert same_bits(scored.logprob_R.detach(), drawn.logprob_R)
    for grad in torch.autograd.grad(scored.logprob_R.sum(), (x, head)):
        assert bool(grad.isfinite().all())


@pytest.mark.parametrize("size", [32, 40, 64, 80, 96, 112, 128, 192, 256])
def test_head_sizes(size: int) -> None:
    q, k, v = normal(21, 4, size), normal(21, 2, size, seed=1), normal(21, 2, size, seed=2)
    plan = ops.AttentionPlan.build([ops.Chunk(0, 21, range(21))], 1)
    ours = ops.attention(q, k, v, plan, size**-0.5)
    theirs = ops.attention(q.double(), k.double(), v.double(), plan, size**-0.5)
    assert float((ours.double() - theirs).abs().max()) < 1e-5
    memory = ops.backend.of(q).KVMemory(1, 5, 5, 2, size, torch.float32)
    paged = ops.AttentionPlan.build([ops.Chunk(0, 21, [3, 0, 4, 1, 2])], 5)
    keys, values = memory.store(0, paged.slots_R, k, v)
    assert same_bits(ops.attention(q, keys, values, paged, size**-0.5), ours)


# A package that is broken says so.


def test_a_package_that_does_not_load_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "zerogap_kernels"
    folder.mkdir()
    fault = "libstdc++.so.6: version `GLIBCXX_9' not found"
    (folder / "__init__.py").write_text(f"raise ImportError({fault!r})\n")
    code = (
        "from zerogap.ops import backend\n"
        "print(backend.describe())\n"
        "try:\n    backend.choose('native', 'model.backend')\n"
        "except Exception as error:\n    print(type(error).__name__, error)\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    env = {name: value for name, value in os.environ.items() if name != "ZEROGAP_BACKEND"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**env, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120
    )
    first, second = done.stdout.splitlines()
    assert first == f"portable (zerogap-kernels does not load: {fault})"
    assert second.startswith("UsageError model.backend: native: zerogap-kernels does not load: libstdc++.so.6")


def test_a_path_that_does_not_run_here_is_named() -> None:
    code = "from zerogap.ops import backend\nprint(backend.describe())"
    env = {name: value for name, value in os.environ.items() if name != "ZEROGAP_BACKEND"}
    env |= {"PYTHONPATH": os.pathsep.join(sys.path), "ZEROGAP_CPU_PATH": "avx9"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert "CPU path 'avx9' is none of avx512, avx2, generic" in done.stdout + done.stderr
    assert "ZEROGAP_CPU_PATH=avx9" in done.stdout


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(UsageError, match="did you mean 'portable'"):
        backend.choose("portble", "--backend")


def test_no_python_code_of_a_tensor_runs_while_it_is_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The binding drops whatever ``__dlpack__`` raises and asks in another way: Ctrl-C in there would be lost."""
    asked: list[str] = []

    def interrupted(*arguments: object, **named: object) -> object:
        asked.append("__dlpack__")
        raise KeyboardInterrupt

    monkeypatch.setattr(Tensor, "__dlpack__", interrupted)
    kernels.pack(WEIGHT, 1, 1)
    assert asked  # given the tensor itself, the binding asks it, and the interrupt is gone
    asked.clear()
    decoder = random_decoder("qwen3", vocab_size=64).eval().requires_grad_(False)
    engine_of(decoder).generate(requests(1))
    for name, (op, shape) in UNARY.items():
        x = normal(*shape).requires_grad_()
        op(x).sum().backward()
        assert asked == [], name
