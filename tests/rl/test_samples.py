"""What a real run writes about its samples beside the log-probs: cached tokens and the trainer's kept mass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.rl.small_run import train

from zerogap.gap.judge import Options, judge
from zerogap.gap.readers import load
from zerogap.models.hub import resolve_model
from zerogap.models.rows import PackedCache, Rows
from zerogap.models.weights import load_decoder
from zerogap.rl.records import read_records
from zerogap.rl.samples import read_samples, samples_path

TOP_P, TEMPERATURE = 0.8, 0.9
CUT = (f"rollout.top_p={TOP_P}", f"rollout.temperature={TEMPERATURE}", "rollout.max_tokens=12", "rollout.min_tokens=6")
LEARNS = ("rollout.top_p=0.95", "rollout.prompts_per_step=12")  # some groups have rewards that differ, some do not


@pytest.fixture(scope="module")
def cut_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cut") / "run"
    assert train(folder, *CUT, steps=2) == 0
    return folder


def records(folder: Path, step: int) -> list[dict[str, Any]]:
    return list(read_samples(samples_path(folder, step)))


def nucleus_mass(logits: np.ndarray) -> float:
    """The nucleus by a second, plain computation: fewest tokens that reach top_p, at the temperature."""
    scaled = logits.astype(np.float64) / TEMPERATURE
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    sums = np.cumsum(np.sort(probabilities)[::-1])
    return float(sums[np.searchsorted(sums, TOP_P)])


def test_the_kept_mass_is_that_of_the_nucleus_under_the_weights_that_sampled(cut_run: Path) -> None:
    decoder = load_decoder(resolve_model("builtin:tiny-qwen3"))
    compared = 0
    for record in records(cut_run, 0)[:6]:
        tokens = record["prompt_ids"] + record["response_ids"]
        with torch.no_grad():
            hidden = decoder.hidden(Rows.packed([tokens[:-1]]), PackedCache())
            logits = decoder.logits(hidden).numpy()[len(record["prompt_ids"]) - 1 :]
        for place, (mass, row) in enumerate(zip(record["kept_mass"], logits, strict=True)):
            if place >= 6:  # before, stop ids cannot be sampled and so are no part of the distribution
                assert mass == pytest.approx(nucleus_mass(row), rel=1e-5)
                compared += 1
            else:
                assert TOP_P - 1e-5 <= mass <= 1
    assert compared > 10


def test_the_gap_of_a_cut_run_has_no_sampler_part_and_says_what_replay_saves(cut_run: Path) -> None:
    loaded = load(cut_run)
    numbers = loaded.accumulator.numbers()
    masses = np.array([m for step in (0, 1) for r in records(cut_run, step) for m in r["kept_mass"] if m is not None])
    assert numbers.kept_mass_tokens == numbers.compared == len(masses) > 100
    assert (numbers.kept_replayed_share, numbers.sampler_part, numbers.numerics_part) == (1.0, 0.0, 0.0)
    assert numbers.numerics_mean_abs == 0.0
    assert numbers.log_kept_mass_mean == pytest.approx(np.log(masses).mean(), rel=1e-9)
    assert numbers.log_kept_mass_mean < -0.01
    assert judge(loaded, Options()).status == "zero"


def test_cached_tokens_are_those_that_the_engine_counted(cut_run: Path) -> None:
    for step, metrics in enumerate(read_records(cut_run / "metrics.jsonl")):
        counted = sum(record["cached_tokens"] for record in records(cut_run, step))
        assert counted == metrics["rollout/cached_tokens"] > 0
    table = load(cut_run).table
    assert table is not None
    assert (table.columns["cached_tokens"] > 0).any()


def test_a_run_that_cuts_nothing_has_no_kept_mass_and_older_files_are_read(tmp_path: Path) -> None:
    assert train(tmp_path / "run") == 0
    path = samples_path(tmp_path / "run", 0)
    assert all("kept_mass" not in record and "kept_replayed" not in record for record in read_samples(path))
    numbers = load(tmp_path / "run").accumulator.numbers()
    assert numbers.kept_mass_tokens == 0
    older = path.read_text().replace('"cached_tokens"', '"unknown"')
    path.write_text(older)
    assert load(tmp_path / "run").accumulator.numbers() == numbers


def test_tokens_that_were_not_compared_have_no_kept_mass(tmp_path: Path) -> None:
    assert train(tmp_path / "run", *LEARNS, "gap.scope=trained") == 0
    found = records(tmp_path / "run", 0)
    for record in found:
        for mass, trainer in zip(record["kept_mass"], record["logprobs_trainer"], strict=True):
            assert (mass is None) == (trainer is None)
    known = [mass is not None for record in found for mass in record["kept_mass"]]
    assert 0 < sum(known) < len(known)


def test_more_updates_keep_the_mass_of_the_weights_that_sampled(tmp_path: Path) -> None:
    for updates in (1, 2):
        assert train(tmp_path / str(updates), *LEARNS, f"train.updates_per_rollout={updates}") == 0
    one, two = (records(tmp_path / str(updates), 0) for updates in (1, 2))
    assert any(record["advantage"] for record in one)
    assert [record["kept_mass"] for record in one] == [record["kept_mass"] for record in two]
