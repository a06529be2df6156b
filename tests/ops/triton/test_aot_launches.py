"""What is launched is what is built ahead of time: same constants, same types, nothing specialised on the batch."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'zerogap[gpu]'")

from zerogap.errors import UsageError
from zerogap.ops.plan import Chunk
from zerogap.ops.triton import aot, targets
from zerogap.ops.triton.attention import attention
from zerogap.ops.triton.linear import linear
from zerogap.ops.triton.plan import AttentionPlan
from zerogap.ops.triton.targets import TARGETS, Target

MODULES = [sys.modules[f"zerogap.ops.triton.{name}"] for name in ("linear", "attention", "attention_backward")]


@pytest.fixture(params=["sm_80", "sm_90", "sm_100", "gfx942"])
def target(request: pytest.FixtureRequest) -> Target:
    return TARGETS[request.param]


def launches(monkeypatch: pytest.MonkeyPatch, target: Target, run: Any) -> list[tuple[Any, ...]]:
    """Return (kernel, arguments, constants, warps, stages) of each launch of ``run`` on a GPU that is not there."""
    seen: list[tuple[Any, ...]] = []

    def record(kernel: Any, grid: Any, arguments: Any, constexprs: Any, where: Target, *shape: int) -> None:
        assert where == target
        assert all(0 < size < 1 << 31 for size in grid)
        seen.append((kernel, arguments, constexprs, *shape))

    for module in MODULES:
        monkeypatch.setattr(module, "launch", record)
        monkeypatch.setattr(module, "detect", lambda device: target)
    run()
    return seen


def specialised(kernel: Any, arguments: Any, constexprs: dict[str, Any], target: Target) -> dict[str, tuple[str, Any]]:
    """Return type and specialisation of each argument, as Triton's launcher finds them."""
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(target.gpu_target()))
    _, found, _ = bind(*arguments, **constexprs)
    return {name: tuple(one) for name, one in zip(kernel.arg_names, found, strict=True) if one[0] != "constexpr"}


def assert_built(target: Target, seen: list[tuple[Any, ...]]) -> None:
    configs = list(aot.configs(target))
    assert seen
    for kernel, arguments, constexprs, warps, stages in seen:
        types = specialised(kernel, arguments, constexprs, target)
        signature = {name: kind for name, (kind, _) in types.items()}
        same = [c for c in configs if (c.function, c.num_warps, c.num_stages) == (kernel, warps, stages)]
        assert any(c.constexprs == constexprs and c.signature == signature for c in same), (constexprs, signature)
        for name, (kind, special) in types.items():
            if kind.startswith("*"):
                assert "D" in special, f"{name} is not known to be aligned"
            else:
                assert not special, f"{name} is specialised on its value"


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize("rows", [1, 16, 17, 64, 300])
def test_linear(monkeypatch: pytest.MonkeyPatch, target: Target, rows: int) -> None:
    def run() -> None:
        linear(half(rows, 4096), half(2560, 4096), segments=8)
        linear(half(rows, 2560), half(1024, 2560), half(1024))

    assert_built(target, launches(monkeypatch, target, run))


@pytest.mark.parametrize(("start", "count", "page_size"), [(0, 700, 1), (0, 1, 16), (1500, 1, 16), (1500, 16, 16)])
def test_attention(monkeypatch: pytest.MonkeyPatch, target: Target, start: int, count: int, page_size: int) -> None:
    pages = -(-(start + count) // page_size)
    plan = AttentionPlan.build([Chunk(start, count, range(pages))], page_size)
    q, k = half(count, 32, 128).requires_grad_(page_size == 1), half(pages * page_size, 8, 128)
    if page_size > 1:  # the engine's layout
        k = half(8, pages * page_size, 128).transpose(0, 1)

    def run() -> None:
        out = attention(q, k, k, plan, 0.1)
        if page_size == 1:
            out.float().sum().backward()

    assert_built(target, launches(monkeypatch, target, run))


def test_switches_that_change_bits_are_pinned_or_refused(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    assert targets.pinned(target)["enable_fp_fusion"] is False
    monkeypatch.setenv("DISABLE_PTXAS_OPT", "1")
    with pytest.raises(UsageError, match="DISABLE_PTXAS_OPT"):
        targets.pinned(target)


def test_devices_without_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UsageError, match="need a CUDA or ROCm GPU, not the device cpu"):
        targets.detect(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(UsageError, match=r"no kernels are built for sm_75 .*sm_80, "):
        targets.detect(torch.device("cuda", 0))


def test_the_ops_do_not_load_triton() -> None:
    code = "import sys, zerogap.ops; print([m for m in sys.modules if 'triton' in m and not m.startswith('torch')])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "0"}
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
