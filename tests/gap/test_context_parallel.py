"""Dumps of several context-parallel ranks give the table that one rank would have given."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerogap.errors import UsageError
from zerogap.gap.readers import load
from zerogap.gap.readers.context_parallel import assemble, response_ranges

torch = pytest.importorskip("torch")

LENGTHS = ((31, 20), (8, 7), (40, 3), (17, 16), (64, 40))  # (total, response)


def dealt(values: list[Any], total: int, cp_size: int, padded: int = 0) -> list[list[Any]]:
    """What each rank holds, by a second way: pad, deal the chunks of rows out, and keep rows before response tokens."""
    prompt = total - len(values)
    length = max(total, padded)
    chunk = (length + 2 * cp_size - 1) // (2 * cp_size)
    rows: list[Any] = [None] * (2 * cp_size * chunk)
    for place, value in enumerate(values):
        rows[prompt + place - 1] = (value,)
    chunks = [rows[start : start + chunk] for start in range(0, len(rows), chunk)]
    return [[row[0] for row in chunks[r] + chunks[-1 - r] if row is not None] for r in range(cp_size)]


@given(st.integers(2, 60), st.integers(1, 59), st.sampled_from([2, 3, 4, 8]), st.integers(0, 80))
def test_the_ranks_tile_the_response(total: int, response: int, cp_size: int, padded: int) -> None:
    response = min(response, total - 1)
    values = list(range(response))
    slices = dict(enumerate(dealt(values, total, cp_size, padded)))
    assert assemble(slices, total, response, cp_size, padded) == values
    places = [
        p for rank in range(cp_size) for part in response_ranges(total, response, cp_size, rank, padded) for p in part
    ]
    assert sorted(places) == values


def write(folder: Path, cp_size: int, *, dense: bool = False, skip: int | None = None, spoil: bool = False,
          named: bool = True) -> None:  # fmt: skip
    """Rollout dump and the train dumps of 2 tensor-parallel by ``cp_size`` ranks, as Miles writes them."""
    rng = np.random.default_rng(0)
    samples, whole = [], []
    for index, (total, response) in enumerate(LENGTHS):
        engine = (-rng.exponential(0.5, response) - 0.01).astype(np.float32)
        trainer = (engine + rng.normal(0, 0.01, response)).astype(np.float32)
        tokens = list(range(total))
        samples.append({"index": index, "tokens": tokens, "response_length": response,
                        "rollout_log_probs": engine.tolist(), "loss_mask": [1] * response, "reward": 1.0,
                        "status": "completed"})  # fmt: skip
        whole.append((index, total, response, tokens, engine.tolist(), trainer.tolist()))
    (folder / "rollout_data").mkdir(parents=True)
    (folder / "train_data").mkdir()
    torch.save({"rollout_id": 3, "metadata": {}, "samples": samples}, folder / "rollout_data" / "3.pt")
    padded = 80 if dense else 0
    for cp_rank, tensor_rank in itertools.product(range(cp_size), range(2)):
        if cp_rank == skip:
            continue
        data: dict[str, Any] = {"sample_indices": [], "tokens": [], "total_lengths": [], "response_lengths": [],
                                "loss_masks": [], "rollout_log_probs": [], "log_probs": []}  # fmt: skip
        if dense:
            data["max_seq_lens"] = [padded] * len(whole)
        for index, total, response, tokens, engine, trainer in whole:
            data["sample_indices"].append(index)
            data["tokens"].append(torch.tensor(tokens))
            data["total_lengths"].append(total)
            data["response_lengths"].append(response)
            data["loss_masks"].append(torch.ones(response, dtype=torch.int64))
            for key, values in (("rollout_log_probs", engine), ("log_probs", trainer)):
                part = dealt(values, total, cp_size, padded)[cp_rank] if cp_size > 1 else values
                data[key].append(torch.tensor(part[:-1] if spoil and index == 0 else part))
        rank = cp_rank * 2 + tensor_rank
        dump = {"rollout_id": 3, "rank": rank, "rollout_data": data, "cp_size": cp_size,
                "qkv_format": "bshd" if dense else "thd"}  # fmt: skip
        torch.save(dump | ({"cp_rank": cp_rank} if named else {}), folder / "train_data" / f"3_{rank}.pt")


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("cp_size", [2, 4])
def test_dumps_of_several_ranks_are_put_together(tmp_path: Path, cp_size: int, dense: bool) -> None:
    write(tmp_path / "one", 1)
    write(tmp_path / "cut", cp_size, dense=dense)
    one, cut = load(tmp_path / "one"), load(tmp_path / "cut")
    assert cut.accumulator.numbers() == one.accumulator.numbers()
    assert cut.accumulator.numbers().compared == sum(response for _, response in LENGTHS)
    for name in ("logprob_engine", "logprob_trainer", "token_id", "sample", "position"):
        np.testing.assert_array_equal(cut.table.columns[name], one.table.columns[name])  # type: ignore[union-attr]


def test_the_dump_of_one_rank_alone_says_which_others_are_needed(tmp_path: Path) -> None:
    write(tmp_path / "run", 4, skip=2)
    with pytest.raises(UsageError, match="dump of rank 2 is not there; name the folder"):
        load(tmp_path / "run")
    with pytest.raises(UsageError, match="rank 1, 2, 3 is not there"):
        load(tmp_path / "run" / "train_data" / "3_0.pt")


def test_another_layout_is_refused_and_never_guessed(tmp_path: Path) -> None:
    write(tmp_path / "run", 2, spoil=True)
    with pytest.raises(UsageError, match=r"sample 0: .* is no zigzag of 20 response tokens of 31; dump with"):
        load(tmp_path / "run")


def test_slices_without_a_rank_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "run", 2, named=False)
    with pytest.raises(UsageError, match="does not say which"):
        load(tmp_path / "run")
