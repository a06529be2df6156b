"""The native kernels on every CPU path of this machine: the same bits, whichever the CPU of a later run picks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from zerogap import ops
from zerogap.certify.subjects import our_subjects
from zerogap.certify.whole import WholeVerdict
from zerogap.models.config import ModelConfig
from zerogap.ops import backend

_ROWS = 9  # more than a register tile of any path, and no multiple of one
_LENGTH_QUICK, _LENGTH_FULL = 150, 1100  # positions of attention: several blocks; two splits


def check_paths(config: ModelConfig, full: bool) -> WholeVerdict:
    """Compute every op on each path that this machine runs, and compare the words with those of the best one."""
    paths = backend.cpu_paths()
    name = "CPU paths: " + ", ".join(paths)
    if len(paths) < 2:
        return WholeVerdict(name, 0, True, "the only one that this machine runs")
    compared = 0
    for op, run in _runs(config, full):
        words: Tensor | None = None
        for path in paths:
            with backend.on_cpu_path(path):
                found = run().contiguous().view(torch.int32)
            if words is None:
                words = found
                continue
            compared += words.numel()
            different = int((words != found).sum())
            if different:
                detail = f"{op}: {different} of {words.numel()} outputs of {path} differ from {paths[0]}"
                return WholeVerdict(name, compared, False, detail)
    return WholeVerdict(name, compared, True)


def _runs(config: ModelConfig, full: bool) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    generator = torch.Generator().manual_seed(17)
    for subject in our_subjects(config):
        x = torch.randn(_ROWS, subject.width, generator=generator)
        yield subject.name, lambda subject=subject, x=x: subject.run(x)  # type: ignore[misc]
    length, size = _LENGTH_FULL if full else _LENGTH_QUICK, config.head_dim
    q = torch.randn(length, config.num_heads, size, generator=generator)
    k, v = (torch.randn(length, config.num_kv_heads, size, generator=generator) for _ in range(2))
    plan = ops.AttentionPlan.build([ops.Chunk(0, length, range(length))], 1)
    yield "attention", lambda: ops.attention(q, k, v, plan, size**-0.5)
