"""A captured decode step touches nothing but the device: shown with tensors that have a device and no values.

Reading a value, an output whose shape depends on one, and an op over tensors of two devices are errors there; copies
between devices are counted. Kernels are not run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support import config_values
from zerogap.engine import decode as decode_module
from zerogap.engine.decode import DecodeSteps, Size
from zerogap.models.config import ModelConfig
from zerogap.models.decoder import Decoder
from zerogap.models.rows import PagedCache

pytest.importorskip("triton", reason="Triton is not installed: pip install 'zerogap[gpu]'")

GPU = torch.device("cuda:0")
CROSSED: list[str] = []  # ops that read on one device and write on another


class Transfers(TorchDispatchMode):
    """Notes in ``CROSSED`` what crosses between devices."""

    def __enter__(self) -> Transfers:
        CROSSED.clear()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # A number that takes part in arithmetic is a CPU tensor without dimensions: it goes along with the launch.
        devices = {x.device for x in tree_leaves((args, result)) if isinstance(x, torch.Tensor) and x.dim()}
        if len(devices) > 1:
            CROSSED.append(func._schema.name)
        return result


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[DecodeSteps]:
    """Decode steps of a bfloat16 decoder on a GPU that is not there."""
    from triton.runtime.jit import JITFunction

    monkeypatch.setattr(JITFunction, "run", lambda self, *args, **kwargs: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(FakeTensor, "data_ptr", lambda self: 256, raising=False)
    # Without CUDA in the build, some of Python's operators look for the device's library; these do not.
    monkeypatch.setattr(FakeTensor, "__invert__", lambda x: torch.eq(x, 0), raising=False)
    monkeypatch.setattr(FakeTensor, "__getitem__", _item, raising=False)
    monkeypatch.setattr(FakeTensor, "copy_", _copy, raising=False)
    from zerogap.ops.triton import run

    run._target.cache_clear()
    config = ModelConfig.from_dict(config_values(vocab_size=3000))
    config.rope.tables(1)  # cached tables have values
    default = torch.get_default_dtype()
    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.set_default_dtype(torch.bfloat16)
        with GPU, monkeypatch.context() as patched:
            patched.setattr(Decoder, "to", lambda self, dtype: self)  # it is there
            decoder = Decoder(config, torch.bfloat16)
        torch.set_default_dtype(default)
        monkeypatch.setattr("zerogap.engine.capture.Staging.__init__", _unpinned)
        cache = PagedCache(config, 33, 16, torch.bfloat16, GPU)
        with torch.inference_mode():
            yield DecodeSteps(decoder, cache, 16, 512, lambda body: body)
    run._target.cache_clear()


def _item(x: torch.Tensor, index: Any) -> torch.Tensor:
    if isinstance(index, int):
        return x.select(0, index)
    assert isinstance(index, slice), f"an index that this stand-in lacks: {index!r}"
    start, stop, _ = index.indices(len(x))
    return x.narrow(0, start, stop - start)


def _copy(x: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    assert x.shape == source.shape
    if x.device != source.device:
        CROSSED.append("copy_")
    return x


def _unpinned(self: Any, size: int, device: torch.device) -> None:
    self.host, self.device = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8, device=device)


@pytest.mark.parametrize("sampler", ["eager", "plain", "filtered"])
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (8, 32), (16, 32)])
def test_a_step_stays_on_the_device(steps: DecodeSteps, sampler: Any, rows: int, width: int) -> None:
    body = steps.body(Size(rows, width, sampler))
    with Transfers():
        body()
    assert CROSSED == []


def test_inputs_and_results_cross_once_each(steps: DecodeSteps) -> None:
    with Transfers():
        steps._inputs.upload(1024)
        steps._outputs.download(64)
    assert CROSSED == ["copy_", "copy_"]


def test_what_may_not_be_in_a_step_is_caught(steps: DecodeSteps, monkeypatch: pytest.MonkeyPatch) -> None:
    """Filters that are looked up in settings on the device: the sampler that the eager step calls does that."""
    original = decode_module.ops.SamplerRows

    def unknowing(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "filters": None})

    monkeypatch.setattr(decode_module.ops, "SamplerRows", unknowing)
    with pytest.raises(DataDependentOutputException):
        steps.body(Size(4, 16, "plain"))()
    x = torch.ones(3, device=GPU)
    with pytest.raises(DynamicOutputShapeException):
        torch.ops.aten.nonzero(x)
    with Transfers():
        torch.ops.aten._to_copy(x, device=torch.device("cpu"))
        torch.ops.aten._to_copy(torch.ones(2), device=GPU)
    assert len(CROSSED) == 2
