"""Seconds of one linear layer, ours and MKL's in turn in one process, over weights that are not in the cache."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from jsonlines import Answer, Watch
from torch import Tensor

COLD_BYTES = 256 << 20  # weights walked between two uses of the same one: eight times this machine's last cache


def backend_linear(backend: str) -> Callable[..., Tensor]:
    """Return the ``linear`` of a backend of ours.

    Raises:
        ImportError: it is not installed.
    """
    return importlib.import_module(f"zerogap.ops.{backend}").linear


@torch.no_grad()  # no inference mode: torch would not count the changes of weights made in it, so no copy could be kept
def linear(
    out_features: int, in_features: int, rows: int, segments: int, backend: str, passes: int, seed: int
) -> Answer:
    """Time ``passes`` walks over copies of one weight for each side, in turn.

    Returns:
        Seconds per call of each walk: ``ours_s`` and ``mkl_s``, and the largest relative difference of the results.
    """
    ours = backend_linear(backend)
    generator = torch.Generator().manual_seed(seed)
    copies = max(1, -(-COLD_BYTES // (4 * out_features * in_features)))
    weights = [torch.randn(out_features, in_features, generator=generator) for _ in range(copies)]
    x = torch.randn(rows, in_features, generator=generator)
    answer: Answer = {"ours_s": [], "mkl_s": []}

    def walk(run: Callable[[Tensor, Tensor], Tensor]) -> float:
        watch = Watch()
        for weight in weights:
            run(x, weight)
        return watch.seconds / copies

    sides: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "ours_s": lambda x, weight: ours(x, weight, None, segments),
        "mkl_s": torch.nn.functional.linear,
    }
    first, second = (run(x, weights[0]) for run in sides.values())
    answer["difference"] = float((first - second).abs().max() / second.abs().max())
    for run in sides.values():
        walk(run)
    for _ in range(passes):
        for name, run in sides.items():
            answer[name].append(walk(run))
    return answer
