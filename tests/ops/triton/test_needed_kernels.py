"""Kernels of a model are found without a GPU, and built before they are needed, once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import config_values
from zerogap.models.config import ModelConfig
from zerogap.ops import backend

pytest.importorskip("triton", reason="Triton is not installed: pip install 'zerogap[gpu]'")

from zerogap.engine.kernels import build_kernels, needed_kernels
from zerogap.ops.triton.targets import TARGETS, Target

LONG = ModelConfig.from_dict(config_values(max_position_embeddings=4096, hidden_size=256, head_dim=64))


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Target:
    """Triton believes that an sm_90 is there, and has an empty cache; it builds for it and launches nothing."""
    from triton.runtime import driver

    target = TARGETS["sm_90"]
    stand_in = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=target.gpu_target,
    )
    monkeypatch.setattr(type(driver), "active", property(lambda self: stand_in))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return target


def names(launches: list[Any]) -> set[str]:
    return {launch.kernel.__name__ for launch in launches}


def test_every_kernel_is_there_once() -> None:
    launches = needed_kernels(LONG, torch.bfloat16, 16, TARGETS["sm_90"])
    assert len({launch.key() for launch in launches}) == len(launches)
    found = names(launches)
    assert {
        "linear_kernel",
        "combine_kernel",
        "attention_kernel",
        "merge_kernel",
        "query_kernel",
        "key_kernel",
    } <= found
    assert {"draw_kernel", "keep_kernel", "uniform_kernel", "grad_logits_kernel", "embedding_grad_kernel"} <= found
    kinds = {
        (launch.options["PAGE_SIZE"], launch.options["SPLIT_GRID"])
        for launch in launches
        if launch.kernel.__name__ == "attention_kernel"
    }
    assert kinds == {(1, False), (1, True), (16, False), (16, True)}


def test_tiles_dtype_and_architecture_make_other_kernels() -> None:
    first = {launch.key() for launch in needed_kernels(LONG, torch.bfloat16, 16, TARGETS["sm_90"])}
    for dtype, name in ((torch.float32, "sm_90"), (torch.bfloat16, "gfx942")):
        assert first - {launch.key() for launch in needed_kernels(LONG, dtype, 16, TARGETS[name])}


def test_finding_them_leaves_nothing_behind() -> None:
    before = backend.cpu_backend()
    needed_kernels(LONG, torch.bfloat16, 16, TARGETS["sm_80"])
    from zerogap.ops.triton import dry

    assert dry.notes() is None
    assert backend.cpu_backend() == before


def test_a_second_build_finds_all_of_it(a_gpu: Target, tmp_path: Path) -> None:
    wanted = ("peak_kernel", "total_kernel", "uniform_kernel", "silu_mul_kernel")
    launches = [one for one in needed_kernels(LONG, torch.bfloat16, 16, a_gpu) if one.kernel.__name__ in wanted][:4]
    told: list[tuple[int, int, str]] = []
    build_kernels(launches, lambda done, total, name: told.append((done, total, name)))
    assert [one[:2] for one in told] == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
    assert told[-1][2] == ""
    built = sorted(tmp_path.rglob("*.cubin"))
    assert len(built) == 4
    times = [path.stat().st_mtime_ns for path in built]
    for launch in launches:
        launch.kernel.device_caches.clear()  # as a new process
    build_kernels(launches, lambda *_: None)
    assert sorted(tmp_path.rglob("*.cubin")) == built
    assert [path.stat().st_mtime_ns for path in built] == times
