"""The order of calls around a CUDA graph, on a machine without one; that it works on a GPU is for a GPU to show."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from zerogap.engine.capture import CudaGraphs
from zerogap.engine.forward import default_capture

from ..support import random_decoder


class Stream:
    def __init__(self, said: list[str], name: str) -> None:
        self.said, self.name = said, name

    def wait_stream(self, other: Stream) -> None:
        self.said.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    handles = iter(range(1, 100))

    class Graph:
        def replay(self) -> None:
            calls.append("replay")

    @contextlib.contextmanager
    def graph(graph: Any, pool: Any, capture_error_mode: str) -> Iterator[None]:
        calls.append(f"capture into {pool} {capture_error_mode}")
        yield
        calls.append("captured")

    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda: Stream(calls, "side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream(calls, "main"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    return calls


def test_kernels_are_loaded_before_they_are_captured(said: list[str]) -> None:
    replay = CudaGraphs(torch.device("cuda", 0))(lambda: said.append("body"))
    assert said == [
        "side waits for main",
        "body",
        "main waits for side",
        "capture into 1 thread_local",
        "body",
        "captured",
    ]
    replay()
    assert said[-1] == "replay"


def test_graphs_share_memory_while_one_lives(said: list[str]) -> None:
    graphs = CudaGraphs(torch.device("cuda", 0))
    replays = [graphs(lambda: None), graphs(lambda: None)]
    replays.clear()
    gc.collect()
    replays.append(graphs(lambda: None))
    pools = [call.split()[2] for call in said if call.startswith("capture ")]
    assert pools == ["1", "1", "2"]


def test_nothing_is_captured_on_the_cpu() -> None:
    assert default_capture(random_decoder(), cuda_graphs=True) is None
