"""Running the same work again without its Python: CUDA graphs, and what stands between host and device around them.

A captured function takes no arguments: it reads tensors that stay where they are and writes others. What changes from
step to step comes in one transfer and goes out in one (`Staging`).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

Body: TypeAlias = Callable[[], None]
Capture: TypeAlias = Callable[[Body], Body]
"""Takes a function and returns another that does the same work over the same tensors."""

_ALIGNMENT = 16  # bytes; kernels load 16 at a time


def rerun(body: Body) -> Body:
    """Capture nothing: run the function again. Works on every device."""
    return body


class CudaGraphs:
    """Captures functions as CUDA graphs (HIP graphs on AMD) of one device, which share their scratch memory.

    The memory can be shared because graphs run one after the other and nothing in it is read after its graph's end.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._pool: Any = None

    def __call__(self, body: Body) -> Body:
        """Run ``body`` once, so that its kernels are compiled and loaded, capture it, and return the graph's replay."""
        with torch.cuda.device(self.device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                body()
            torch.cuda.current_stream().wait_stream(stream)
            if not self._graphs:  # memory of graphs that are all gone is the allocator's again
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                body()
        self._graphs.add(graph)
        return graph.replay


@dataclass(frozen=True)
class Field:
    """A tensor within a block of bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes it takes, with those up to the next field."""
        size = math.prod(self.shape) * self.dtype.itemsize
        return -(-size // _ALIGNMENT) * _ALIGNMENT


def block_bytes(fields: Sequence[Field]) -> int:
    """Return the bytes of a block with these fields."""
    return sum(field.nbytes for field in fields)


def views(block: Tensor, fields: Sequence[Field]) -> Mapping[str, Tensor]:
    """Return the fields' tensors within a block of bytes [at least ``block_bytes``], uint8."""
    found, start = {}, 0
    for field in fields:
        size = math.prod(field.shape) * field.dtype.itemsize
        found[field.name] = block[start : start + size].view(field.dtype).view(field.shape)
        start += field.nbytes
    return found


class Staging:
    """A block of bytes on the host and one on the device. Layouts of many sizes may lie over it, one at a time.

    Args:
        size: bytes.
        device: the other side; the host's block is pinned if that is a GPU.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.device = torch.zeros(size, dtype=torch.uint8, device=device)

    def upload(self, size: int) -> None:
        """Send the first bytes to the device, without waiting: the host's must stay until the device has read them."""
        self.device[:size].copy_(self.host[:size], non_blocking=True)

    def download(self, size: int) -> None:
        """Fetch the first bytes and wait for them."""
        self.host[:size].copy_(self.device[:size])
