"""Every class and cause on real log-probs with real faults (bench/diagnoses.py), and each diagnosis' own edge."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from zerogap.gap import compare, fit_temperature, kept_mass
from zerogap.gap.diagnoses.base import LEVELS, Finding, causes
from zerogap.gap.diagnoses.statistics import rank_correlation, rank_sum_z
from zerogap.gap.facts import Facts
from zerogap.gap.judge import diagnose_table
from zerogap.gap.table import GapTable

BENCH = Path(__file__).parents[2] / "bench" / "diagnoses.py"


def load_bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_diagnoses", BENCH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


bench = load_bench()


@pytest.fixture(scope="module")
def measured() -> dict[str, tuple[float, object]]:
    rows = bench.Rows("measure")
    made = {}
    for name, (cause, maker, options) in bench.FAULTS.items():
        tables = bench.trials(rows, maker, 3, 50_000)
        made[name] = (sum(cause in bench.alarms(bench.verdict_of(t, options)) for t in tables), cause)
    return made


@pytest.mark.parametrize("name", list(bench.FAULTS))
def test_the_fault_is_found(measured: dict[str, tuple[int, str]], name: str) -> None:
    hits, cause = measured[name]
    assert hits >= 2, f"{cause} found in {hits} of 3 tables"


def test_clean_tables_raise_no_alarm() -> None:
    rows = bench.Rows("measure")
    found = [bench.alarms(bench.verdict_of(made, {})) for made in bench.trials(rows, bench.clean, 60, 70_000)]
    assert sum(map(bool, found)) <= 1, [f for f in found if f]


@pytest.mark.slow
def test_recall_and_false_alarms_in_full() -> None:
    results, false, total = bench.measure("measure", 60)
    for name, (recall, others) in results.items():
        cause = bench.FAULTS[name][0]
        assert recall >= 0.95, (name, recall, others)
        assert false[cause] / total <= 0.02, (cause, false[cause], total)
    assert all(count / total <= 0.02 for count in false.values())


def test_every_class_of_the_design_has_a_cause_and_every_cause_its_texts() -> None:
    groups = {name.split("/")[0] for name in causes()}
    assert groups == {"zero", "metric-broken", "sampler", "inputs-differ", "weights-differ", "stale-state", "numerics"}
    for cause in causes().values():
        assert cause.level in LEVELS
        assert all((cause.code, cause.title, cause.expected, cause.confirm, cause.hint))
    codes = [cause.code for cause in causes().values()]
    assert len(codes) == len(set(codes))


def softmax_rows(rng: np.random.Generator, tokens: int = 400, vocabulary: int = 50) -> np.ndarray:
    return rng.normal(0, 3, (tokens, vocabulary))


def logprob(logits: np.ndarray, ids: np.ndarray, temperature: float) -> np.ndarray:
    scaled = logits / temperature
    return (scaled - np.log(np.exp(scaled).sum(1, keepdims=True)))[np.arange(len(ids)), ids]


@pytest.mark.parametrize("temperature", [0.3, 0.6, 0.9, 1.0, 1.4, 2.0])
def test_the_temperature_is_fitted_from_logits(temperature: float) -> None:
    rng = np.random.default_rng(int(temperature * 10))
    logits = softmax_rows(rng)
    ids = rng.integers(0, 50, len(logits))
    found, gap = fit_temperature(logits, ids, logprob(logits, ids, temperature))
    assert found == pytest.approx(temperature, abs=1e-4)
    assert gap < 1e-4


@pytest.mark.parametrize("top_p", [0.7, 0.9])
def test_known_kept_sets_split_the_gap_exactly(top_p: float) -> None:
    rng = np.random.default_rng(2)
    mass = rng.uniform(top_p, 1.0, 500)
    engine = -rng.exponential(0.7, 500)
    report = compare(engine, engine + np.log(mass) + rng.normal(0, 0.005, 500), kept_mass=mass)
    (finding,) = [f for f in report.verdict.findings if f.name == "sampler/truncation"]
    assert finding.numbers["exact"] is True
    assert finding.numbers["sampler_part"] == pytest.approx(np.log(mass).mean(), abs=1e-3)
    assert report.numbers.numerics_mean_abs < 0.006


def test_estimate_of_the_kept_mass_carries_its_uncertainty() -> None:
    rows = bench.Rows("measure")
    draw = rows.draw(np.random.default_rng(5))
    table = bench.FAULTS["truncation top_p0.8"][1](draw)
    verdict = bench.verdict_of(table, {})
    (finding,) = [f for f in verdict.findings if f.name == "sampler/truncation"]
    truth = float(np.mean(draw["top_p0.8_mass"]))
    assert abs(finding.numbers["kept_mass"] - truth) < 3 * finding.numbers["uncertainty"] + 0.03


def test_a_small_honest_gap_with_a_few_tokens_is_left_alone() -> None:
    for seed in range(50):
        rng = np.random.default_rng(seed)
        engine = -rng.exponential(1, 12)
        report = compare(engine, np.minimum(engine + rng.normal(0, 0.01, 12), 0))
        assert not [f for f in report.verdict.findings if f.level == "fault"], report


def test_several_faults_are_said_together() -> None:
    rng = np.random.default_rng(0)
    engine = -rng.exponential(1, (30, 60))
    trainer = engine + rng.normal(0, 0.01, engine.shape)
    trainer = np.minimum(trainer, 0)
    cached = np.where(np.arange(30)[:, None] % 2, 500, 0) + np.zeros((30, 60), int)
    trainer[1::2] -= rng.exponential(0.3, trainer[1::2].shape)
    engine[0, :3] = np.nan
    names = {f.name for f in compare(engine, trainer, cached_tokens=cached).verdict.findings if f.level == "fault"}
    assert {"stale-state/prefix-cache", "metric-broken/missing-logprobs"} <= names


def test_the_words_blame_no_side_where_none_is_known() -> None:
    for name in ("inputs-differ/rope-scaling", "inputs-differ/positions", "weights-differ/elevated"):
        assert "disagree" in causes()[name].title or "the sides" in causes()[name].title


def test_ranks_share_ties() -> None:
    assert rank_correlation(np.array([1, 2, 3, 4]), np.array([2, 4, 6, 8])) == pytest.approx(1.0)
    assert rank_correlation(np.ones(5), np.arange(5)) == 0.0
    assert abs(rank_sum_z(np.array([1.0, 2, 3]), np.array([1.0, 2, 3]))) < 1e-9


def test_kept_mass_from_ids_and_from_a_mask_agree_with_the_engine() -> None:
    rng = np.random.default_rng(4)
    logits = softmax_rows(rng, 200)
    order = np.argsort(-logits, axis=1)[:, :5]
    mask = np.zeros(logits.shape, dtype=bool)
    np.put_along_axis(mask, order, True, axis=1)
    mass = kept_mass(logits, list(order), 0.7)
    assert mass == pytest.approx(kept_mass(logits, mask, 0.7))
    ids = order[:, 1]
    full = logprob(logits, ids, 0.7)
    engine = full - np.log(mass)
    report = compare(engine, full, kept_mass=mass)
    assert report.numbers.numerics_mean_abs < 1e-6
    both = compare(engine, full, logprob_engine_unfiltered=full)
    assert "SAMPLER_TRUNCATION" in {f.code for f in both.verdict.findings}


def contract_table(bad: np.ndarray, hit: np.ndarray, steps: int) -> GapTable:
    """Sequences of four tokens under a contract: ``bad`` of them differ, ``hit`` of them had cached tokens."""
    count = len(bad)
    engine = (-np.random.default_rng(0).exponential(1.0, 4 * count)).astype(np.float32)
    return GapTable(
        {
            "step": np.repeat(np.arange(count) * steps // count, 4),
            "sample": np.repeat(np.arange(count), 4),
            "position": np.tile(np.arange(4), count),
            "logprob_engine": engine,
            "logprob_trainer": np.where(np.repeat(bad, 4), engine - np.float32(0.3), engine).astype(np.float32),
            "cached_tokens": np.repeat(np.where(hit, 16, 0), 4),
        }
    )


def prefix_findings(table: GapTable) -> list[Finding]:
    found = diagnose_table(table, Facts(), contract=True, floor=None)
    # Not that of the sizes, which has the same name and is weaker.
    return [f for f in found if f.name == "stale-state/prefix-cache" and "first_bad" in f.numbers]


def test_known_cached_tokens_name_a_stale_prefix_or_rule_it_out() -> None:
    number = np.arange(160)
    hit = number % 2 == 0
    late = number >= 80
    (sure,) = prefix_findings(contract_table(hit & late & (number % 8 == 0), hit, steps=2))
    assert sure.confidence == 0.95
    assert "had cached tokens" in sure.observed
    # Also without a good first step; and never where a sequence without cached tokens differs, too.
    assert prefix_findings(contract_table(hit & (number % 8 == 0), hit, steps=1))
    assert not prefix_findings(contract_table(late & (number % 8 == 1), hit, steps=2))
    assert not prefix_findings(contract_table(late & (number % 5 == 0), hit, steps=2))
    # Without the column the first step has to have been good, and it is less sure.
    table = contract_table(hit & late & (number % 8 == 0), hit, steps=2)
    del table.columns["cached_tokens"]
    (guessed,) = prefix_findings(table)
    assert guessed.confidence == 0.75


def test_a_replayed_kept_set_is_no_sampler_part() -> None:
    rng = np.random.default_rng(1)
    engine = (-rng.exponential(1.0, 500) - 0.01).astype(np.float32)
    mass = rng.uniform(0.6, 0.9, 500).astype(np.float32)
    noise = rng.normal(0, 0.004, 500).astype(np.float32)
    replayed = compare(engine, engine + noise, kept_mass=mass, kept_replayed=np.ones(500, bool))
    assert replayed.numbers.sampler_part == 0.0
    assert replayed.numbers.numerics_part == pytest.approx(replayed.numbers.mean_signed, abs=1e-12)
    assert replayed.numbers.log_kept_mass_mean == pytest.approx(np.log(mass).mean(), rel=1e-6)
    assert not [f for f in replayed.verdict.findings if f.group == "sampler"]
    half = np.arange(500) < 250
    mixed = np.where(half, engine + noise, engine + np.log(mass) + noise).astype(np.float32)
    partly = compare(engine, mixed, kept_mass=mass, kept_replayed=half)
    assert partly.numbers.sampler_part == pytest.approx(np.log(mass[~half]).sum() / 500, rel=1e-5)
    assert partly.numbers.kept_replayed_share == 0.5
    assert [f.name for f in partly.verdict.findings if f.group == "sampler"] == ["sampler/truncation"]


@pytest.mark.parametrize(
    ("prompt", "grows", "found"),
    [
        (5, lambda context: 1 - np.exp(-(context - 4) / 8), True),  # nothing behind one token, then saturating
        (5, lambda context: np.full(len(context), 0.7), False),  # other weights: from the first token on
        (5, lambda context: 0.5 + context / 40, False),  # grows, but from something
        (60, lambda context: 1 - np.exp(-(context - 4) / 8), False),  # long prompts hide where it begins
    ],
)
def test_a_gap_that_begins_near_nothing_and_grows_with_the_context_is_of_positions(
    prompt: int, grows: Callable[[np.ndarray], np.ndarray], found: bool
) -> None:
    rng = np.random.default_rng(3)
    sequences, length = 40, 28
    position = np.tile(np.arange(length), sequences)
    engine = (-rng.exponential(1.0, len(position)) - 0.01).astype(np.float32)
    size = 0.3 * grows(position + prompt) * rng.normal(0, 1, len(position))
    table = GapTable(
        {
            "sample": np.repeat(np.arange(sequences), length),
            "position": position,
            "prompt_length": np.full(len(position), prompt),
            "logprob_engine": engine,
            "logprob_trainer": np.minimum(engine + size, 0).astype(np.float32),
        }
    )
    names = {finding.name for finding in diagnose_table(table, Facts(), contract=False, floor=None)}
    assert ("inputs-differ/positions" in names) == found, names
