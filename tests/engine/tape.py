"""A stand-in for CUDA graphs that works on the CPU: what a function did is recorded and done again without Python.

Like a graph it holds on to tensors, not to values: numbers that Python computed while it was recorded are part of it
for good, and reading a tensor's value on the host is an error. Kernels under Triton's interpreter are recorded as
launches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

_READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2"}


class HostReadError(Exception):
    """A value was read on the host while a function was recorded."""


class Tape(TorchDispatchMode):
    """What was done, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name in _READS or (name == "aten::index" and _masked(args)):
            raise HostReadError(name)
        result = func(*args, **kwargs)
        if func._schema.is_mutable:
            self.entries.append(lambda: func(*args, **kwargs))
        elif not name.removeprefix("aten::").startswith(("empty", "new_empty")):
            given = {_address(tensor) for tensor in _tensors((args, kwargs))}
            held = [tensor for tensor in _tensors(result) if _address(tensor) not in given]  # no views
            if held:
                self.entries.append(lambda: _again(held, _tensors(func(*args, **kwargs))))
        return result

    def replay(self) -> None:
        """Do all of it again."""
        for entry in self.entries:
            entry()


def _masked(args: Any) -> bool:
    return any(index is not None and index.dtype == torch.bool for index in args[1])


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _again(held: list[Tensor], made: list[Tensor]) -> None:
    for old, new in zip(held, made, strict=True):
        old.copy_(new)


def taped(body: Callable[[], None]) -> Callable[[], None]:
    """Record a function on a tape and return the tape's replay (a ``zerogap.engine.capture.Capture``)."""
    tape = Tape()
    with _launches(tape), tape:
        body()
    return tape.replay


@contextlib.contextmanager
def _launches(tape: Tape) -> Iterator[None]:
    """Record kernels that Triton's interpreter runs as one entry each."""
    try:
        from triton.runtime.interpreter import GridExecutor
    except ImportError:
        yield
        return
    original = GridExecutor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            original(self, *args, **kwargs)
        tape.entries.append(lambda: original(self, *args, **kwargs))

    GridExecutor.__call__ = call
    try:
        yield
    finally:
        GridExecutor.__call__ = original
