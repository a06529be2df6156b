"""A stream cut anywhere gives what the whole gives: no sequence is judged in two parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerogap.gap.metrics import Accumulator
from zerogap.gap.readers import load, loaded, parquet, pieces
from zerogap.gap.readers.pieces import whole_sequences
from zerogap.gap.readers.records import write_table
from zerogap.gap.table import GapTable, concatenate

KEYS = (("step", "sample", "position"), ("step", "sample"), ("sample",), ("position",), ("step", "position"))


def padded_table(seed: int, sequences: int = 40, longest: int = 30) -> GapTable:
    """Sequences of which some end in zeros that are padding and some in zeros that are sure tokens."""
    rng = np.random.default_rng(seed)
    parts: dict[str, list[Any]] = {name: [] for name in ("step", "sample", "position", "engine", "trainer")}
    for sample in range(sequences):
        length = int(rng.integers(1, longest))
        engine = (-rng.exponential(1.0, length) - 1e-3).astype(np.float32)
        trainer = (engine - rng.uniform(1e-4, 1e-2, length)).astype(np.float32)
        tail = int(rng.integers(0, min(6, length) + 1))
        if tail:
            engine[length - tail :] = 0.0
            # Sure where the trainer says so, too; else only the first row of the run says that it is padding.
            trainer[length - tail :] = -1e-5
            if sample % 2:
                trainer[length - tail] = -2.0
        for name, values in (("step", np.full(length, sample // 10)), ("sample", np.full(length, sample % 10)),
                             ("position", np.arange(length)), ("engine", engine), ("trainer", trainer)):  # fmt: skip
            parts[name].append(values)
    joined = {name: np.concatenate(values) for name, values in parts.items()}
    return GapTable({"step": joined["step"], "sample": joined["sample"], "position": joined["position"],
                     "logprob_engine": joined["engine"], "logprob_trainer": joined["trainer"]})  # fmt: skip


def with_columns(table: GapTable, names: tuple[str, ...]) -> GapTable:
    kept = {name: values for name, values in table.columns.items() if name.startswith("logprob") or name in names}
    return GapTable(kept)


def numbers_of(tables: list[GapTable]) -> dict[str, Any]:
    accumulator = Accumulator()
    for table in tables:
        accumulator.add(table)
    return accumulator.numbers().as_dict()


def same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, value in wanted.items():
        if isinstance(value, float):
            assert found[name] == pytest.approx(value, rel=1e-9, nan_ok=True), name
        else:
            assert found[name] == value or (isinstance(value, dict) and name != "missing"), name


def cut_every(table: GapTable, size: int) -> list[GapTable]:
    return [table.where(slice(start, start + size)) for start in range(0, len(table), size)]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 50), st.sampled_from(KEYS))
def test_cut_at_any_rows_it_is_the_same(seed: int, size: int, keys: tuple[str, ...]) -> None:
    table = with_columns(padded_table(seed), keys)
    cut = list(whole_sequences(cut_every(table, size)))
    joined = concatenate(cut)
    for name, values in table.columns.items():
        np.testing.assert_array_equal(joined.columns[name], values)
    same(numbers_of(cut), numbers_of([table]))


def test_the_cuts_themselves_do_harm() -> None:
    # The control of the law above: pieces handed on as they are cut are judged otherwise.
    table = padded_table(0)
    assert numbers_of(cut_every(table, 3))["missing"] != numbers_of([table])["missing"]


@pytest.mark.parametrize("keys", [("step", "sample", "position"), ("sample",), ()])
def test_one_sequence_without_end_is_cut_in_bounded_memory(keys: tuple[str, ...]) -> None:
    rows = 5_000
    table = padded_table(1, sequences=1, longest=2)
    engine = np.full(rows, -0.5, dtype=np.float32)
    engine[::7] = 0.0  # sure tokens; a cut after one of them would make it a tail
    trainer = np.where(engine == 0.0, np.float32(-1e-4), engine - np.float32(0.01)).astype(np.float32)
    whole = with_columns(
        GapTable({"step": np.zeros(rows, np.int64), "sample": np.zeros(rows, np.int64), "position": np.arange(rows),
                  "logprob_engine": engine, "logprob_trainer": trainer}), keys)  # fmt: skip
    cut = list(whole_sequences(cut_every(whole, 10), longest=100))
    assert len(cut) > 40
    assert max(map(len, cut)) <= 110
    for piece in cut[:-1]:
        assert piece.columns["logprob_engine"][-1] != 0.0
    found, wanted = numbers_of(cut), numbers_of([whole])
    for name in ("sequences", "sequence_mean_abs", "sequence_log_ratio_mean", "sequence_log_ratio_min",
                 "sequence_log_ratio_max"):  # fmt: skip
        if not keys:
            found.pop(name), wanted.pop(name)  # without keys nothing says what a sequence is
    same(found, wanted)
    assert len(table) == 1


def test_nothing_but_zeros_is_cut_all_the_same() -> None:
    zeros = GapTable({"logprob_engine": np.zeros(1000, np.float32), "logprob_trainer": np.zeros(1000, np.float32)})
    cut = list(whole_sequences(cut_every(zeros, 10), longest=100))
    assert max(map(len, cut)) <= 110
    assert sum(map(len, cut)) == 1000


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of seven rows, and every source counts as one too large to be sorted."""
    monkeypatch.setattr(parquet, "_BATCH", 7)
    monkeypatch.setattr(loaded, "SAMPLE_TOKENS", 50)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("keys", KEYS)
def test_a_streamed_parquet_file_is_read_as_a_whole_one(tmp_path: Path, keys: tuple[str, ...]) -> None:
    table = with_columns(padded_table(3), keys)
    write_table(table, tmp_path / "a.parquet")
    found = load(tmp_path / "a.parquet").accumulator.numbers().as_dict()
    assert found["missing"]["engine"]["zero_fill"] > 20
    same(found, numbers_of([table]))


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("keys", [(), ("position",), ("step",), ("step", "sample", "position")])
def test_the_sample_for_the_diagnoses_is_bounded_and_never_empty(tmp_path: Path, keys: tuple[str, ...]) -> None:
    table = with_columns(padded_table(4, sequences=400), keys)
    write_table(table, tmp_path / "a.parquet")
    read = load(tmp_path / "a.parquet")
    assert read.accumulator.tokens == len(table)
    assert read.table is not None
    assert 0 < len(read.table) <= 150
    assert read.table.rows_total == len(table)


def test_a_small_file_may_have_its_rows_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_BATCH", 7)
    table = padded_table(5)
    order = np.lexsort((table.columns["sample"], table.columns["position"]))
    write_table(table.where(order), tmp_path / "a.parquet")
    same(load(tmp_path / "a.parquet").accumulator.numbers().as_dict(), numbers_of([table]))


def test_samples_without_names_stay_apart_over_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setattr(parquet, "_SAMPLES", 2)
    rows = [{"logprob_engine": [-1.0, -2.0], "logprob_trainer": [-1.0, -2.5]} for _ in range(7)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    read = load(tmp_path / "a.parquet")
    assert read.accumulator.tokens == 14
    assert read.accumulator.numbers().sequences == 7
    assert read.table is not None
    assert len(np.unique(read.table.sequence_codes())) == 7


def test_batches_of_long_samples_have_few_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setattr(parquet, "_SAMPLE_TOKENS", 300)
    rows = [{"logprob_engine": [-1.0] * 100, "logprob_trainer": [-1.5] * 100, "sample": n} for n in range(10)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    tokens, batches = parquet.parquet_batches(tmp_path / "a.parquet", {})
    assert tokens == 1000
    assert [len(batch) for batch in batches] == [300, 300, 300, 100]


def test_lines_of_single_tokens_are_cut_between_sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from zerogap.gap.readers import text

    monkeypatch.setattr(text, "_LINES", 7)
    monkeypatch.setattr(text, "_ROWS", 5)
    monkeypatch.setattr(loaded, "SAMPLE_TOKENS", 50)
    table = padded_table(6)
    names = {"logprob_engine": "engine", "logprob_trainer": "trainer"}
    with (tmp_path / "a.jsonl").open("w") as file:
        for row in range(len(table)):
            file.write(json.dumps({names.get(k, k): float(v[row]) for k, v in table.columns.items()}) + "\n")
    same(load(tmp_path / "a.jsonl").accumulator.numbers().as_dict(), numbers_of([table]))


def test_the_limit_is_that_of_no_real_sequence() -> None:
    assert pieces.LONGEST >= 1 << 20
