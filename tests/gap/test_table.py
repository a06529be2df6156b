"""The table: columns by name and alias, kinds of missing values, lengths that must agree, Parquet and JSONL and "
"back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerogap.errors import UsageError
from zerogap.gap.readers import load
from zerogap.gap.readers.records import write_table
from zerogap.gap.table import GapTable, Kind, classify, resolve_columns, schema, value_kinds

WORDS = st.integers(0, 2**32 - 1).map(lambda word: np.array([word], dtype=np.uint32).view(np.float32)[0])


def table(engine: list[float], trainer: list[float] | None = None, **more: object) -> GapTable:
    columns = {"logprob_engine": np.array(engine, dtype=np.float32)}
    if trainer is not None:
        columns["logprob_trainer"] = np.array(trainer, dtype=np.float32)
    columns |= {name: np.asarray(values) for name, values in more.items()}
    return GapTable(columns)


def write_jsonl(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_no_alias_stands_for_two_columns() -> None:
    names = [alias for column in schema().values() for alias in (column.name, *column.aliases)]
    assert len(names) == len(set(names))


def test_a_mapping_wins_over_names_and_unknown_names_say_what_is_near() -> None:
    assert resolve_columns(["a", "log_probs"], {"logprob_engine": "a"}) == {
        "logprob_engine": "a",
        "logprob_trainer": "log_probs",
    }
    with pytest.raises(UsageError, match="did you mean 'logprob_engine'"):
        resolve_columns(["a"], {"logprob_engin": "a"})
    with pytest.raises(UsageError, match="did you mean 'vllm_lp'"):
        resolve_columns(["vllm_lp"], {"logprob_engine": "vlm_lp"})


@given(st.lists(WORDS, min_size=1, max_size=30))
def test_every_float_has_one_kind_and_only_finite_logprobs_are_ok(values: list[float]) -> None:
    kinds = value_kinds(np.array(values, dtype=np.float32))
    for value, kind in zip(values, kinds, strict=True):
        if kind == Kind.OK:
            assert np.isfinite(value)
            assert -900 < value <= 1e-3
        if np.isnan(value):
            assert kind == Kind.NAN


@pytest.mark.parametrize("value", [-9999.0, -100.0, -1e9, float(np.finfo(np.float32).min), -1000.0])
def test_sentinels_are_no_logprobs(value: float) -> None:
    assert value_kinds(np.array([value, -3.0], dtype=np.float32)).tolist() == [Kind.SENTINEL, Kind.OK]


def test_zeros_at_the_tail_are_a_filler_only_where_the_other_side_doubts_them() -> None:
    engine, _ = classify(table([-0.1, -0.2, 0.0, 0.0, 0.0], [-0.1, -0.2, -2.0, -1.5, -3.0]))
    assert engine.tolist() == [0, 0, Kind.ZERO_FILL, Kind.ZERO_FILL, Kind.ZERO_FILL]
    engine, _ = classify(table([-0.1, -0.2, 0.0, 0.0, 0.0], [-0.1, -0.2, 0.0, -1e-6, 0.0]))
    assert not engine.any()  # sure tokens


def test_kept_sets_of_one_token_are_no_filler() -> None:
    """Top-p leaves one token: the engine says exactly 0, everywhere in the text and at its end."""
    values = [0.0, -0.3, 0.0, -0.5, 0.0, -0.2, 0.0, 0.0]
    trainer = [-0.15, -0.4, -0.2, -0.6, -0.1, -0.3, -0.12, -0.2]
    engine, _ = classify(table(values, trainer))
    assert not engine.any()


def test_a_null_that_opens_a_turn_is_expected_and_another_is_not() -> None:
    made = table([np.nan, -0.3, np.nan, -0.1], turn=[0, 0, 1, 1])
    made.nulls["logprob_engine"] = np.array([True, False, True, False])
    assert classify(made)[0].tolist() == [Kind.BOUNDARY_NULL, 0, Kind.BOUNDARY_NULL, 0]
    made.columns["turn"][:] = 0
    assert classify(made)[0].tolist() == [Kind.BOUNDARY_NULL, 0, Kind.NULL, 0]


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_a_table_comes_back_with_the_same_bits(tmp_path: Path, suffix: str) -> None:
    rng = np.random.default_rng(0)
    made = table(
        (-rng.exponential(1, 40)).tolist(),
        (-rng.exponential(1, 40)).tolist(),
        step=np.repeat([0, 1], 20),
        sample=np.repeat(np.array(["a", "b"], dtype=object), 20),
        position=np.tile(np.arange(20), 2),
    )
    made.columns["logprob_engine"][3] = np.nan
    made.nulls["logprob_trainer"] = np.arange(40) == 5
    path = tmp_path / f"table{suffix}"
    write_table(made, path)
    back = load(path).table
    assert back is not None
    keep = ~made.nulls["logprob_trainer"]
    for name in ("logprob_engine", "logprob_trainer"):
        same = back.columns[name].view(np.uint32)[keep] == made.columns[name].view(np.uint32)[keep]
        assert same.all()
    assert back.nulls["logprob_trainer"].tolist() == made.nulls["logprob_trainer"].tolist()
    assert not list(tmp_path.glob(".*"))


def test_lengths_that_differ_name_the_sample_and_the_numbers(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "a.jsonl",
        {"sample": "s7", "tokens": [1, 2, 3], "rollout_log_probs": [-1.0, -2.0], "log_probs": [-1.0, -2.0, -3.0]},
    )
    with pytest.raises(
        UsageError, match=r"sample s7: lengths do not match: tokens=3, rollout_log_probs=2, log_probs=3"
    ):
        load(path)


def test_a_mask_that_was_not_extended_is_named(tmp_path: Path) -> None:
    record = {"sample": 1, "loss_mask": [1] * 2, "logprobs": [-1.0] * 4, "log_probs": [-1.0] * 4, "response_length": 4}
    with pytest.raises(UsageError, match="MASK_NOT_EXTENDED_ON_RESUME"):
        load(write_jsonl(tmp_path / "a.jsonl", record))


def test_prompt_and_response_in_one_token_list_are_told_apart(tmp_path: Path) -> None:
    record = {"index": 3, "tokens": [9, 9, 1, 2], "response_length": 2, "rollout_log_probs": [-1.0, -2.0],
              "log_probs": [-1.0, -2.5], "loss_mask": [1, 1]}  # fmt: skip
    made = load(write_jsonl(tmp_path / "a.jsonl", record)).table
    assert made is not None
    assert made.columns["token_id"].tolist() == [1, 2]
    assert made.columns["prompt_length"].tolist() == [2, 2]


def test_text_where_a_number_belongs_is_an_error_with_the_value(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", {"logprob_engine": [-1.0, "many"], "logprob_trainer": [-1.0, -1.0]})
    with pytest.raises(UsageError, match="'many' is no number"):
        load(path)
