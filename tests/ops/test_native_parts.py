"""A large batch is cut by sequences, each thread taking its own through the whole forward: no bit may tell."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support import random_decoder, same_bits
from zerogap import ops
from zerogap.certify.rows import torch_threads
from zerogap.models.rows import PagedCache, Rows, SequenceRows
from zerogap.ops import backend

pytest.importorskip("zerogap_kernels")
from zerogap.ops.native.plan import native_plan

PAGE = 16


@pytest.fixture(autouse=True)
def native() -> object:
    with backend.using("native"):
        yield


def cut(count: int, *chunks: ops.Chunk, least: int = 1) -> list[tuple[int, int]]:
    return [tuple(part) for part in native_plan(ops.AttentionPlan.build(chunks, PAGE)).parts(count, least)]


def alone(count: int, rows: int = 1, start: int = 20) -> list[ops.Chunk]:
    return [ops.Chunk(start, rows, [4 * i, 4 * i + 1, 4 * i + 2]) for i in range(count)]


def test_parts_are_whole_sequences_of_equal_cost() -> None:
    assert cut(2, *alone(64)) == [(0, 32), (32, 32)]
    assert cut(3, *alone(48)) == [(0, 16), (16, 16), (32, 16)]
    assert cut(2, *alone(4, rows=9)) == [(0, 18), (18, 18)]
    assert cut(2, *alone(31), least=15) == [(0, 16), (16, 15)]


def test_too_few_or_too_uneven_sequences_are_not_cut() -> None:
    assert cut(1, *alone(64)) == []
    assert cut(2, *alone(31), least=16) == []
    assert cut(2, ops.Chunk(0, 40, range(3)), *alone(9, start=0)) == []
    assert cut(2, ops.Chunk(60000, 1, [99] * 3751), *alone(8)) == []  # as many rows, but no equal cost


def test_a_shared_prompt_may_be_read_by_all_but_not_written_beside_its_readers() -> None:
    answers = [ops.Chunk(16, 1, [0, 1 + i]) for i in range(16)]
    assert cut(2, *answers) == [(0, 8), (8, 8)]
    writer = ops.Chunk(0, 16, [0])
    assert cut(2, writer, *answers) == []


def hidden(threads: int, batches: list[list[SequenceRows]], pages: int) -> list[Tensor]:
    decoder = random_decoder("qwen3").eval().requires_grad_(False)
    cache = PagedCache(decoder.config, pages, PAGE)
    with torch.no_grad(), torch_threads(threads):
        return [decoder.hidden(Rows.build(batch, PAGE), cache) for batch in batches]


def test_a_forward_in_parts_has_the_bits_of_one_thread() -> None:
    """Prompts of uneven length, then 40 decode steps' worth of rows, behind a shared page and each on its own pages."""
    count, vocabulary = 40, 50
    prompt = [(5 * i + 2) % vocabulary for i in range(PAGE)]
    tables = [[0, *range(1 + 3 * i, 4 + 3 * i)] for i in range(count)]
    texts = [[*prompt, *((3 * i + n * n) % vocabulary for i in range(12 + n % 5))] for n in range(count)]
    batches = [[SequenceRows(prompt, 0, [0])]]
    batches += [[SequenceRows(t[PAGE:-3], PAGE, table) for t, table in zip(texts, tables, strict=True)]]
    batches += [
        [SequenceRows([t[k]], len(t) + k, table) for t, table in zip(texts, tables, strict=True)] for k in (-3, -2, -1)
    ]
    plans = [native_plan(Rows.build(batch, PAGE).plan) for batch in batches]
    assert [len(plan.parts(2, 12)) for plan in plans] == [0, 2, 2, 2, 2]
    wanted = hidden(1, batches, 1 + 3 * count)
    for threads in (2, 3):
        for one, other in zip(wanted, hidden(threads, batches, 1 + 3 * count), strict=True):
            assert same_bits(one, other)
