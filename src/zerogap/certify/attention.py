"""The row law of attention: chunks, pages, neighbours and lengths around every border, against the packed whole.

Keys after a row's own are loud in some cases, in its own sequence too: a mask that adds a large negative number or
multiplies by 0, instead of selecting, lets them through.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from zerogap import ops
from zerogap.certify.rows import THREADS, Break, RowVerdict, torch_threads
from zerogap.certify.subjects import CPU, Place
from zerogap.models.config import ModelConfig

_LENGTHS_QUICK = (1, 31, 32, 33, 70)
_LENGTHS_FULL = (1, 2, 7, 8, 9, 31, 32, 33, 63, 64, 65, 96, 97, 200)
# What keys hold from some position on, times a great number; values there are great and finite: a weight of 0 times NaN
# would be NaN, which the law allows within a sequence.
_LATER = {"loud": 1.0, "negative and loud": -1.0, "NaN": math.nan}


@dataclass(frozen=True)
class _Case:
    length: int
    chunk: int
    page_size: int
    threads: int
    neighbour: str  # what other sequences and free pages hold
    later: str = ""  # what keys hold from position ``rows`` on; the rows before are compared
    rows: int = 0

    def __str__(self) -> str:
        said = f"chunks of {self.chunk}, pages of {self.page_size}, neighbours {self.neighbour}, length {self.length}"
        return f"{said}, {self.later} keys from position {self.rows} on" if self.later else said


def check_attention(
    config: ModelConfig, full: bool, threads: tuple[int, ...] = THREADS, place: Place = CPU
) -> RowVerdict:
    """Compare chunked, paged attention beside other sequences with the packed whole sequence alone."""
    comparisons = 0
    for case in (*_cases(full, threads), *_later_cases(full, threads)):
        q, k, v = (x.to(place.device, place.dtype) for x in _inputs(config, case.length))
        with torch_threads(1):
            whole = ops.AttentionPlan.build([ops.Chunk(0, case.length, range(case.length))], 1)
            alone = ops.attention(q, k, v, whole, config.head_dim**-0.5)
        if case.later:
            alone, (k, v) = alone[: case.rows], _loud(case, k, v)
        with torch_threads(case.threads):
            out = _paged(config, case, q, k, v)[: len(alone)]
        comparisons += len(alone)
        out, alone = (x.to("cpu", torch.float32).contiguous() for x in (out, alone))  # widening loses no bit
        different = out.view(torch.int32) != alone.view(torch.int32)
        if bool(different.any()):
            row = int(different.flatten(1).any(1).nonzero()[0])
            gap = (out[row].double() - alone[row].double()).abs()[different[row]].max()
            broken = Break(str(case), case.length, row, case.threads, int(different[row].sum()), float(gap))
            return RowVerdict("attention", comparisons, broken)
    return RowVerdict("attention", comparisons, None)


def _cases(full: bool, threads: tuple[int, ...]) -> Iterator[_Case]:
    lengths = _LENGTHS_FULL if full else _LENGTHS_QUICK
    # In the quick form each length meets some of the combinations, in a fixed mixed order, so that all values occur.
    combinations = list(itertools.product((1, 7, 32, 64), (1, 3, 16, 64), threads, ("random", "extreme", "NaN")))
    random.Random(0).shuffle(combinations)
    turn = itertools.cycle(combinations)
    for length in lengths:
        for chunk, page_size, count, neighbour in itertools.islice(turn, 60 if full else 12):
            yield _Case(length, chunk, page_size, count, neighbour)


def _later_cases(full: bool, threads: tuple[int, ...]) -> Iterator[_Case]:
    combinations = list(itertools.product((7, 32, 64), (1, 16), threads, ("extreme", "NaN"), _LATER))
    order = random.Random(1)
    order.shuffle(combinations)
    turn = itertools.cycle(combinations)
    for length in (_LENGTHS_FULL if full else _LENGTHS_QUICK)[1:]:
        for chunk, page_size, count, neighbour, later in itertools.islice(turn, 30 if full else 8):
            yield _Case(length, chunk, page_size, count, neighbour, later, order.randrange(1, length))


def _loud(case: _Case, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values that are loud from position ``case.rows`` on."""
    k, v = k.clone(), v.clone()
    k[case.rows :] = _LATER[case.later] * _most(k.dtype)
    v[case.rows :] = _most(v.dtype)
    return k, v


def _most(dtype: torch.dtype) -> float:
    return min(1e30, torch.finfo(dtype).max / 4)


def _inputs(config: ModelConfig, length: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    q = torch.randn(length, config.num_heads, config.head_dim, generator=generator)
    k, v = (torch.randn(length, config.num_kv_heads, config.head_dim, generator=generator) for _ in range(2))
    return q, k, v


def _paged(config: ModelConfig, case: _Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Run one sequence chunk by chunk through pages in mixed order, beside a second sequence that decodes."""
    fill = {"random": 0.5, "extreme": _most(q.dtype), "NaN": torch.nan}[case.neighbour]
    pages = -(-case.length // case.page_size)
    order = torch.randperm(pages + 3, generator=torch.Generator().manual_seed(1)).tolist()
    table, other = order[:pages], order[pages : pages + 1]
    shape = ((pages + 3) * case.page_size, config.num_kv_heads, config.head_dim)
    keys, values = (q.new_full(shape, fill) for _ in range(2))
    out = []
    for start in range(0, case.length, case.chunk):
        count = min(case.chunk, case.length - start)
        slots = [table[p // case.page_size] * case.page_size + p % case.page_size for p in range(start, start + count)]
        keys[slots], values[slots] = k[start : start + count], v[start : start + count]
        rows = torch.cat((q.new_full((1, *q.shape[1:]), fill), q[start : start + count]))
        plan = ops.AttentionPlan.build([ops.Chunk(0, 1, other), ops.Chunk(start, count, table)], case.page_size)
        out.append(ops.attention(rows, keys, values, plan, config.head_dim**-0.5)[1:])
    return torch.cat(out)
