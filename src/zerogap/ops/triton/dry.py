"""Noting launches instead of running them: which kernels some work needs is found by doing it without them.

Within `noting` every launch is written down with types in place of values, and a CPU tensor stands for one of the GPU.
What kernels would have written stays whatever memory held; token ids (int64) are set to 0, since torch indexes with
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_ELEMENTS = 64  # of a stand-in: only its type and alignment count


@dataclass(frozen=True)
class Launch:
    """A launch: its kernel, arguments of the right types, and constants with compiler switches."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def key(self) -> tuple[Any, ...]:
        """Return what tells one compiled kernel from another."""
        types = tuple(x.dtype if isinstance(x, Tensor) else type(x) for x in self.arguments)
        return self.kernel, types, tuple(sorted((name, str(value)) for name, value in self.options.items()))


@dataclass
class Notes:
    """What was noted for a target (``zerogap.ops.triton.targets``, which imports this), each compiled kernel once."""

    target: Any
    launches: dict[tuple[Any, ...], Launch] = field(default_factory=dict)

    def add(self, kernel: Any, arguments: Sequence[Any], options: dict[str, Any]) -> None:
        """Note a launch."""
        for x in arguments:
            if isinstance(x, Tensor) and x.dtype == torch.int64:
                x.data.zero_()  # unseen by autograd
        kept = tuple(torch.empty(_ELEMENTS, dtype=x.dtype) if isinstance(x, Tensor) else x for x in arguments)
        launch = Launch(kernel, kept, options)
        self.launches.setdefault(launch.key(), launch)


_notes: Notes | None = None


def notes() -> Notes | None:
    """Return what is being noted down; None: launches run."""
    return _notes


@contextmanager
def noting(target: Any) -> Iterator[Notes]:
    """Note launches for ``target`` down in the body."""
    global _notes
    assert _notes is None, "one at a time"
    _notes = Notes(target)
    try:
        yield _notes
    finally:
        _notes = None
