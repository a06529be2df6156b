"""The numbers against a plain second computation, in one call and streamed, with missing values left out."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerogap.gap.metrics import Accumulator, measure
from zerogap.gap.table import GapTable


def random_table(seed: int, tokens: int = 600, noise: float = 0.1) -> GapTable:
    rng = np.random.default_rng(seed)
    engine = (-rng.exponential(1.0, tokens)).astype(np.float32)
    trainer = np.minimum(engine + rng.normal(0, noise, tokens), 0).astype(np.float32)
    return GapTable(
        {
            "step": np.arange(tokens) // 200,
            "sample": np.arange(tokens) // 50,
            "position": np.arange(tokens) % 50,
            "logprob_engine": engine,
            "logprob_trainer": trainer,
            "loss_mask": rng.random(tokens) > 0.2,
        }
    )


def test_the_numbers_are_those_of_their_definitions() -> None:
    table = random_table(1)
    keep = table.columns["loss_mask"]
    d = table.columns["logprob_trainer"][keep].astype(float) - table.columns["logprob_engine"][keep].astype(float)
    n = measure(table)
    r = np.exp(d)
    assert n.compared == keep.sum()
    assert n.masked_out == (~keep).sum()
    assert n.mean_abs == pytest.approx(np.abs(d).mean(), rel=1e-12)
    assert n.max_abs == np.abs(d).max()
    assert n.k1 == pytest.approx(-d.mean(), rel=1e-12)
    assert n.k2 == pytest.approx((d**2).mean() / 2, rel=1e-12)
    assert n.k3 == pytest.approx((r - 1 - d).mean(), rel=1e-9)
    assert n.ess_share == pytest.approx(r.sum() ** 2 / (len(r) * (r**2).sum()), rel=1e-12)
    assert n.clip_low_share == (r < 0.8).mean()
    assert n.clip_high_share == (r > 1.2).mean()
    assert n.quantiles["p99"] == pytest.approx(np.quantile(np.abs(d).astype(np.float32), 0.99))
    sums = [d[table.columns["sample"][keep] == s].sum() for s in range(12)]
    assert n.sequences == 12
    assert n.sequence_log_ratio_max == pytest.approx(max(sums), rel=1e-9)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.lists(st.integers(1, 11).map(lambda sequence: 50 * sequence), max_size=5))
def test_streamed_in_pieces_of_whole_sequences_it_is_the_same(seed: int, cuts: list[int]) -> None:
    table = random_table(seed)
    whole = Accumulator()
    whole.add(table)
    pieces = Accumulator()
    edges = [0, *sorted(set(cuts)), len(table)]
    for start, end in itertools.pairwise(edges):
        pieces.add(table.where(np.arange(start, end)))
    a, b = whole.numbers().as_dict(), pieces.numbers().as_dict()
    for name, value in a.items():
        if isinstance(value, float):
            assert b[name] == pytest.approx(value, rel=1e-9, nan_ok=True), name
        else:
            assert b[name] == value or isinstance(value, dict), name
    assert {k: v.compared for k, v in whole.steps.items()} == {k: v.compared for k, v in pieces.steps.items()}


def test_what_is_missing_is_counted_by_kind_and_never_averaged_in() -> None:
    engine = np.array([-0.1, 0, np.nan, -2.0, -np.inf, -9999, np.inf, 1.0], dtype=np.float32)
    trainer = np.full(8, -0.1, dtype=np.float32)
    trainer[3] = -2.5
    table = GapTable({"logprob_engine": engine, "logprob_trainer": trainer})
    table.nulls["logprob_engine"] = np.arange(8) == 1
    n = measure(table)
    assert n.compared == 2
    assert n.mean_abs == pytest.approx(0.25)
    assert n.missing["engine"] == {"nan": 1, "neg_inf": 1, "null": 1, "pos_inf": 1, "positive": 1, "sentinel": 1}


def test_equal_means_equal_bits() -> None:
    one = np.array([-0.5, 0.0], dtype=np.float32)
    other = np.array([np.nextafter(np.float32(-0.5), np.float32(0)), -0.0], dtype=np.float32)
    n = measure(GapTable({"logprob_engine": one, "logprob_trainer": other}))
    assert n.different == 2
    assert measure(GapTable({"logprob_engine": one, "logprob_trainer": one.copy()})).different == 0


def test_nothing_to_compare_is_neither_zero_nor_an_error() -> None:
    n = measure(GapTable({"logprob_engine": np.zeros(0, np.float32), "logprob_trainer": np.zeros(0, np.float32)}))
    assert n.compared == 0
    assert math.isnan(n.mean_abs)


def test_the_sampler_part_and_the_numerics_part_add_up_to_d() -> None:
    table = random_table(3, noise=0.01)
    mass = np.random.default_rng(0).uniform(0.7, 1.0, len(table)).astype(np.float32)
    table.columns["logprob_trainer"] = (table.columns["logprob_engine"] + np.log(mass)).astype(np.float32)
    table.columns["kept_mass"] = mass
    n = measure(table)
    assert n.sampler_part + n.numerics_part == pytest.approx(n.mean_signed, abs=1e-9)
    assert abs(n.numerics_part) < 1e-6
    assert n.sampler_part < -0.1


def test_the_histogram_gives_quantiles_within_a_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerogap.gap.metrics.EXACT_LIMIT", 100)
    table = random_table(5, 5000)
    n = measure(table)
    keep = table.columns["loss_mask"]
    d = np.abs(table.columns["logprob_trainer"][keep].astype(float) - table.columns["logprob_engine"][keep])
    assert not n.quantiles_exact
    assert n.quantiles["p90"] == pytest.approx(np.quantile(d, 0.9), rel=0.01)


def test_profiles_put_tokens_where_they_belong() -> None:
    accumulator = Accumulator()
    accumulator.add(random_table(2))
    profiles = accumulator.profiles()
    assert sum(row[1] for row in profiles["position"].rows) == accumulator.numbers().compared
    assert [row[0] for row in profiles["position"].rows][:4] == ["0", "1", "2-3", "4-7"]
    assert sum(row[1] for row in profiles["probability"].rows) == accumulator.numbers().compared
