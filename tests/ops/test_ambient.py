"""Law 9: what the process has switched on changes no bit, and banned calls stay out of the forward."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import zerogap
import zerogap.models
import zerogap.ops.portable
from tests.support import random_decoder, same_bits
from zerogap.models.rows import PackedCache, Rows
from zerogap.ops import ambient

SEQUENCES = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1]]

# Library calls whose bits may depend on shape, stride, place or thread count (docs/numerics.md).
BANNED = {
    "baddbmm", "conv1d", "einsum", "gelu", "layer_norm", "log_softmax", "logsumexp", "matmul", "mean", "mm", "norm",
    "prod", "rms_norm", "scaled_dot_product_attention", "sigmoid", "silu", "softmax", "std", "sum", "tanh", "var",
}  # fmt: skip
# Exact whatever the order: sums of whole numbers.
EXACT = {"_ranked": {"sum"}, "build": {"sum"}}


@contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def product_precision(name: str) -> Iterator[None]:
    """The newer, per-operation setting; beside the older one the older getter raises."""
    products = torch.backends.mkldnn.matmul
    before, products.fp32_precision = products.fp32_precision, name
    try:
        yield
    finally:
        products.fp32_precision = before


@contextmanager
def flushing() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormal numbers")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


STATES = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "medium precision": lambda: matmul_precision("medium"),
    "bfloat16 products": lambda: product_precision("bf16"),
    "flush to zero": flushing,
    "inference mode": lambda: torch.inference_mode(),
}


def hidden() -> torch.Tensor:
    decoder = random_decoder()
    with torch.no_grad(), ambient.guard():
        return decoder.hidden(Rows.packed(SEQUENCES), PackedCache())


@pytest.mark.parametrize("state", STATES)
def test_ambient_state_changes_no_bit(state: str) -> None:
    clean = hidden()
    with STATES[state]():
        assert same_bits(hidden(), clean)


def test_control_autocast_without_the_guard_changes_bits() -> None:
    weight = torch.randn(64, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not same_bits((weight @ weight).float(), hidden()[:1])
        reduced = weight @ weight
    assert reduced.dtype == torch.bfloat16


def test_guard_gives_the_precision_back() -> None:
    products = torch.backends.mkldnn.matmul
    with matmul_precision("medium"):
        before = products.fp32_precision
        with ambient.guard():
            assert products.fp32_precision == "ieee" != before
        assert products.fp32_precision == before
        assert torch.get_float32_matmul_precision() == "medium"


WORKERS_THAT_FLUSH = """
import torch

from zerogap.errors import UsageError
from zerogap.ops import ambient

torch.set_num_threads(3)
torch.set_flush_denormal(True)
if {early}:
    torch.ones(1 << 20).mul(2)  # the worker threads begin, and inherit the mode
try:
    with ambient.guard():
        zeros = (torch.full((1 << 20,), 1.5e-38) * 0.5).view(torch.int32).eq(0).sum().item()
        print("ran", zeros)
except UsageError as error:
    print("refused", error)
"""


@pytest.mark.parametrize(("early", "said"), [(True, "refused"), (False, "ran 0")])
def test_worker_threads_that_flush_are_refused(early: bool, said: str) -> None:
    """The mode belongs to each thread: what the calling thread can undo for itself, workers keep."""
    code = WORKERS_THAT_FLUSH.format(early=early)
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "PYTHONPATH": str(Path(zerogap.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(said), done.stdout


def forward_calls(path: Path) -> Iterator[tuple[str, str, int]]:
    """Yield (function, called attribute, line) of every call outside a backward pass."""

    def walk(node: ast.AST, function: str) -> Iterator[tuple[str, str, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                if child.name != "backward":
                    yield from walk(child, child.name)
                continue
            if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute):
                yield function, child.func.attr, child.lineno
            if isinstance(child, ast.BinOp) and isinstance(child.op, ast.MatMult):
                yield function, "matmul", child.lineno
            yield from walk(child, function)

    yield from walk(ast.parse(path.read_text()), "")


def test_banned_calls_stay_out_of_the_forward() -> None:
    folders = [Path(module.__path__[0]) for module in (zerogap.ops.portable, zerogap.models)]
    files = [path for folder in folders for path in folder.glob("*.py") if path.name != "hub.py"]
    ours = {("norm.py", "rms_norm"), ("decoder.py", "rms_norm"), ("decoder.py", "norm"), ("decoder.py", "linear")}
    found = [
        f"{path.name}:{line} {name}"
        for path in files
        for function, name, line in forward_calls(path)
        if name in BANNED and name not in EXACT.get(function, ()) and (path.name, name) not in ours
    ]
    assert found == []
    control = list(forward_calls(Path(__file__)))
    assert any(name == "matmul" for _, name, _ in control)
