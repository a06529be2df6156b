"""Filters, draws and log-probs from given logits: against a plain sort, float64 and the portable backend."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zerogap_kernels as kernels
from laws import THREADS, assert_bits, assert_row_law, every_path
from sampler import Settings, distribution, kept_by_sorting, sample, scaled, score
from zerogap.ops import portable

VOCABULARIES = [1, 2, 15, 16, 17, 1023, 1024, 1025, 5000, 49152]
FILTERS = [
    (0, 0.9, 0.0),
    (0, 0.99, 0.0),
    (50, 1.0, 0.0),
    (0, 1.0, 0.05),
    (40, 0.8, 0.0),
    (1000, 0.95, 0.001),
    (1, 0.5, 0.5),
]


def logits_of(rows: int, vocabulary: int, seed: int = 0, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, vocabulary)) * spread).astype(np.float32)


def uniforms(rows: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).random(rows)


def check_row(l: np.ndarray, settings: Settings, token: int, logprob: float, entropy: float, kept: np.ndarray) -> None:
    """Hold one row's results to float64."""
    p = distribution(l, kept)
    assert kept[token]
    assert p[token] > 0
    np.testing.assert_allclose(logprob, np.log(p[token]), rtol=2e-6, atol=2e-6)
    some = p[p > 0]
    np.testing.assert_allclose(entropy, -(some * np.log(some)).sum(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_plain_draws(vocabulary: int) -> None:
    l, u = logits_of(9, vocabulary), uniforms(9)
    for name in every_path():
        result = sample(l, u, Settings())
        assert (result.count == vocabulary).all(), name
        assert result.kept.all()
        for row in range(9):
            check_row(l[row], Settings(), result.token[row], result.logprob[row], result.entropy[row], result.kept[row])
            cumulative = distribution(l[row], result.kept[row]).cumsum()
            assert (cumulative[result.token[row] - 1] if result.token[row] else 0) <= u[row] + 1e-6
            assert u[row] <= cumulative[result.token[row]] + 1e-6


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), FILTERS)
def test_kept_sets_are_those_of_a_sort(vocabulary: int, top_k: int, top_p: float, min_p: float) -> None:
    rows = 3
    for temperature, spread in [(1.0, 3.0), (0.7, 0.5), (1.3, 30.0)]:
        wanted = Settings(temperature, top_k, top_p, min_p)
        l, u = logits_of(rows, vocabulary, spread=spread), uniforms(rows)
        result = sample(l, u, wanted)
        for row in range(rows):
            x = scaled(l[row], temperature)
            np.testing.assert_array_equal(result.kept[row], kept_by_sorting(x, top_k, top_p, min_p))
            assert result.count[row] == result.kept[row].sum()
            check_row(x, wanted, result.token[row], result.logprob[row], result.entropy[row], result.kept[row])


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), FILTERS)
def test_kept_sets_are_those_of_the_portable_backend(top_k: int, top_p: float, min_p: float) -> None:
    l = logits_of(6, 5000)
    l[:, 7] = l[:, 900] = l.max(1)  # ties at the top
    l[:, 100:3000:50] = np.round(l[:, 100:3000:50])
    theirs = portable.log_distribution(
        torch.from_numpy(l.copy()), portable.SamplerRows.uniform_settings(6, 0.9, top_k, top_p, min_p)
    )
    ours = sample(l, uniforms(6), Settings(0.9, top_k, top_p, min_p))
    assert theirs.kept_RV is not None
    np.testing.assert_array_equal(ours.kept, theirs.kept_RV.numpy())
    tokens = torch.from_numpy(ours.token)
    np.testing.assert_allclose(ours.logprob, theirs.logprobs_of(tokens).numpy(), rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(ours.entropy, theirs.entropy_R.numpy(), rtol=1e-5, atol=2e-6)


def test_draws_are_those_of_the_portable_backend() -> None:
    l, u = logits_of(400, 300), uniforms(400)
    theirs = portable.draw(
        portable.log_distribution(torch.from_numpy(l.copy()), portable.SamplerRows.uniform_settings(400, top_p=0.9)),
        torch.from_numpy(u),
    )
    np.testing.assert_array_equal(sample(l, u, Settings(top_p=0.9)).token, theirs.numpy())


values = st.sampled_from([0.0, 0.5, 1.0, 1.0, -1.0, 3.0, -200.0, -np.inf, 1e-30, 80.0, 7.25, -3e38])


@settings(max_examples=200, deadline=None)
@given(
    l=st.lists(values, min_size=1, max_size=70).filter(lambda row: max(row) > -np.inf),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 5, 69, 70, 1000]),
    top_p=st.sampled_from([0.0, 1e-9, 0.25, 0.5, 0.75, 0.9, 0.999999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-3, 0.5, 1.0]),
    u=st.sampled_from([0.0, 0.25, 0.5, 1 - 2**-53]) | st.floats(0, 1, exclude_max=True),
    path=st.sampled_from(kernels.paths_here()),
)
def test_any_row(l, temperature, top_k, top_p, min_p, u, path) -> None:
    before = kernels.path()
    kernels.choose_path(path)
    row = np.array([l], np.float32)
    wanted = Settings(temperature, top_k, top_p, min_p)
    with np.errstate(all="ignore"):
        x = scaled(row[0], temperature)
        if not np.isfinite(x.max()):
            return
        result = sample(row, np.array([u]), wanted)
        expected = kept_by_sorting(x, top_k, top_p, min_p) if temperature > 0 else np.ones(len(x), bool)
    kernels.choose_path(before)
    np.testing.assert_array_equal(result.kept[0], expected)
    if temperature == 0:
        assert result.token[0] == x.argmax()
    check_row(x, wanted, result.token[0], result.logprob[0], result.entropy[0], expected)
    again = score(row, result.token, wanted)
    assert_bits(again.logprob, result.logprob)
    assert_bits(again.entropy, result.entropy)


@pytest.mark.parametrize("vocabulary", [17, 1025, 6000])
def test_rows_keep_the_row_law(vocabulary: int) -> None:
    kinds = [Settings(), Settings(0.8, 0, 0.9), Settings(0.0), Settings(1.2, 40, 0.95, 0.01)]
    for wanted in kinds:

        def op(l: np.ndarray, threads: int, wanted: Settings = wanted) -> np.ndarray:
            result = sample(l, np.full(len(l), 0.625), wanted, threads=threads)
            return np.stack(
                [result.logprob, result.entropy, result.token.astype(np.float32), result.count.astype(np.float32)], 1
            )

        assert_row_law(op, logits_of(70, vocabulary)[:: 3 if vocabulary > 1025 else 1])


def test_rows_of_mixed_settings_are_as_alone() -> None:
    rows, vocabulary = 150, 1500
    l, u = logits_of(rows, vocabulary), uniforms(rows)
    rng = np.random.default_rng(5)
    wanted = Settings(
        rng.choice([0.0, 0.7, 1.0], rows),
        rng.choice([0, 3, 50], rows),
        rng.choice([0.5, 0.95, 1.0], rows),
        rng.choice([0.0, 0.1], rows),
        [list(rng.integers(0, vocabulary, rng.integers(0, 4))) for _ in range(rows)],
    )
    together = [sample(l, u, wanted, threads=threads) for threads in THREADS]
    for result in together[1:]:
        assert_bits(result.logprob, together[0].logprob)
        np.testing.assert_array_equal(result.token, together[0].token)
        np.testing.assert_array_equal(result.kept, together[0].kept)
    for row in range(rows):
        one = slice(row, row + 1)
        alone = sample(l[one], u[one], wanted.of(one), threads=1)
        assert_bits(alone.logprob, together[0].logprob[one])
        assert_bits(alone.entropy, together[0].entropy[one])
        assert alone.token[0] == together[0].token[row]
        np.testing.assert_array_equal(alone.kept[0], together[0].kept[row])


@pytest.mark.parametrize("wanted", [Settings(), Settings(0.7, 0, 0.9), Settings(1.0, 30, 0.9, 0.02), Settings(0.0)])
def test_scoring_has_the_bits_of_sampling(wanted: Settings) -> None:
    l = logits_of(130, 3000)
    drawn = sample(l, uniforms(130), wanted)
    for kept in (True, False):
        scored = score(l, drawn.token, wanted, kept=kept, threads=3)
        assert_bits(scored.logprob, drawn.logprob)
        assert_bits(scored.entropy, drawn.entropy)
    np.testing.assert_array_equal(score(l, drawn.token, wanted).kept, drawn.kept)


def test_replayed_kept_sets_have_the_bits_of_the_filters() -> None:
    l, wanted = logits_of(70, 2100), Settings(0.8, 0, 0.9)
    drawn = sample(l, uniforms(70), wanted)
    stored: list[np.ndarray | None] = []
    for row in range(70):
        bits = np.packbits(drawn.kept[row])
        ids = np.empty(drawn.count[row], np.int32)
        kernels.kept_ids(bits, ids)
        np.testing.assert_array_equal(ids, np.flatnonzero(drawn.kept[row]))
        stored.append(ids if row % 2 else bits)
    again = score(l, drawn.token, Settings(0.8, replay=stored))
    assert_bits(again.logprob, drawn.logprob)
    assert_bits(again.entropy, drawn.entropy)
    np.testing.assert_array_equal(again.kept, drawn.kept)
    np.testing.assert_array_equal(again.count, drawn.count)
    stored[3] = None
    whole = score(l, drawn.token, Settings(0.8, replay=stored))
    assert_bits(whole.logprob[3:4], score(l[3:4], drawn.token[3:4], Settings(0.8)).logprob)


def test_replay_outlives_the_peak() -> None:
    """Under later weights a kept set need not hold the most likely token."""
    l = logits_of(1, 2000)
    l[0, 5] = 200.0
    kept = np.array([7, 1500, 1999], np.int32)
    result = score(l, np.array([1500]), Settings(replay=[kept]))
    mask = np.isin(np.arange(2000), kept)
    np.testing.assert_allclose(result.logprob[0], np.log(distribution(l[0], mask)[1500]), rtol=1e-6)
    assert score(l, np.array([5]), Settings(replay=[kept])).logprob[0] == -np.inf


def test_greedy_takes_the_lowest_id_of_the_highest_logit_at_temperature_1() -> None:
    l = logits_of(4, 3000)
    l[:, [2999, 1500, 40]] = l.max(1, keepdims=True) + 1
    result = sample(l, uniforms(4), Settings(0.0, 5, 0.1, 0.5))
    assert (result.token == 40).all()
    assert_bits(result.logprob, score(l, result.token, Settings(1.0)).logprob)
    assert result.kept.all()


def test_suppressed_tokens_are_never_drawn() -> None:
    l = logits_of(300, 50)
    best = l.argmax(1)
    wanted = Settings(0.0, suppressed=[[int(best[row])] for row in range(300)])
    result = sample(l, uniforms(300), wanted)
    assert (result.token != best).all()
    assert (score(l, best, wanted).logprob == -np.inf).all()
    everything = Settings(suppressed=[list(range(50))])
    nothing_left = sample(l[:1], uniforms(1), everything)
    assert np.isnan(nothing_left.logprob[0])
    assert 0 <= nothing_left.token[0] < 50


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(
    "wanted", [Settings(), Settings(0.7, 0, 0.9), Settings(1.0, 30, 0.9, 0.02), Settings(0.0), Settings(min_p=0.1)]
)
def test_a_row_without_a_distribution_says_so(bad: float, wanted: Settings) -> None:
    for _ in every_path():
        for vocabulary in (17, 2500):
            l = logits_of(5, vocabulary)
            l[2, vocabulary - 3] = bad
            l[4] = bad
            result = sample(l, uniforms(5), wanted)
            assert np.isnan(result.logprob[[2, 4]]).all()
            assert np.isfinite(result.logprob[[0, 1, 3]]).all()
            assert ((result.token >= 0) & (result.token < vocabulary)).all()
            assert np.isnan(score(l, result.token, wanted).logprob[[2, 4]]).all()


@pytest.mark.parametrize("wanted", [Settings(), Settings(0.8, 0, 0.8), Settings(1.0, 6)])
def test_draws_follow_the_distribution(wanted: Settings) -> None:
    draws = 20_000
    row = logits_of(1, 1100, spread=1.0)
    row[0, 3:1090] -= 8.0
    l = np.repeat(row, draws, 0)
    result = sample(l, uniforms(draws, seed=3), wanted)
    p = distribution(scaled(row[0], wanted.temperature), result.kept[0])
    counts = np.bincount(result.token, minlength=1100)
    assert counts[p == 0].sum() == 0
    frequent = p * draws >= 5
    expected = np.append(p[frequent], p[~frequent].sum()) * draws
    observed = np.append(counts[frequent], counts[~frequent].sum())
    expected, observed = expected[expected > 0], observed[expected > 0]
    chi_square = ((observed - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


def test_the_ends_of_the_unit_interval() -> None:
    l = np.full((2, 1030), -np.inf, np.float32)
    l[:, [3, 1027]] = 0.0
    result = sample(l, np.array([0.0, 1 - 2**-53]), Settings())
    assert result.token.tolist() == [3, 1027]


def test_top_tokens() -> None:
    l = logits_of(4, 2500)
    l[1, [2000, 5]] = l[1].max() + 1
    l[3, :] = -np.inf
    l[3, [2, 9]] = 1.0
    for wanted in (Settings(), Settings(0.9, 20, 0.9)):
        result = sample(l, uniforms(4), wanted)
        counts = np.array([0, 5, 20, 7])
        ids, logprobs = np.empty((4, 20), np.int64), np.empty((4, 20), np.float32)
        token, logprob = np.empty(4, np.int64), np.empty(4, np.float32)
        kernels.sample(
            l, None, uniforms(4), *wanted.arrays(4), token, logprob, 2,
            top_count=counts, top_ids=ids, top_logprobs=logprobs,
        )  # fmt: skip
        np.testing.assert_array_equal(token, result.token)
        for row in range(4):
            every = score(np.repeat(l[row : row + 1], 2500, 0), np.arange(2500), wanted).logprob
            order = np.lexsort((np.arange(2500), -every))
            order = order[every[order] > -np.inf][: counts[row]]
            assert ids[row, : len(order)].tolist() == order.tolist()
            assert_bits(logprobs[row, : len(order)], every[order])
            assert (ids[row, len(order) :] == -1).all()


def test_uniform_numbers_are_those_of_the_portable_backend() -> None:
    keys = np.random.default_rng(0).integers(0, 2**40, (50, 4))
    keys[0] = 0
    numbers = np.empty(50)
    for seed in (0, 7, 2**63 + 1):
        kernels.uniform(seed, keys, numbers)
        np.testing.assert_array_equal(numbers, portable.uniform(seed, [tuple(key) for key in keys.tolist()]).numpy())


def test_wrong_arguments_are_refused() -> None:
    l, u = logits_of(2, 10), uniforms(2)
    with pytest.raises(ValueError, match=r"uniform 1\.0.* of row 0"):
        sample(l, np.array([1.0, 0.5]), Settings())
    with pytest.raises(ValueError, match=r"uniform \[1\]: must be \[2\]"):
        sample(l, u[:1], Settings())
    with pytest.raises(ValueError, match=r"temperature -1.* of row 0: must be 0 or more"):
        sample(l, u, Settings(-1.0))
    with pytest.raises(ValueError, match="min_p"):
        sample(l, u, Settings(min_p=1.5))
    with pytest.raises(ValueError, match="target: token 10 at 1 is outside 0 to 9"):
        score(l, np.array([0, 10]), Settings())
    with pytest.raises(ValueError, match="suppressed: token -1 at 0"):
        sample(l, u, Settings(suppressed=[[-1], []]))
    with pytest.raises(ValueError, match=r"replay \[1\]: must be \[2\]"):
        sample(l, u, Settings(replay=[None]))
    with pytest.raises(ValueError, match=r"replay of row 1 \[2\]: ids must ascend"):
        sample(l, u, Settings(replay=[None, np.array([3, 3], np.int32)]))
    with pytest.raises(ValueError, match=r"replay of row 0 \[1\]: must be \[2\]"):
        sample(l, u, Settings(replay=[np.zeros(1, np.uint8), None]))
    with pytest.raises(ValueError, match="vocabulary of 0 tokens"):
        sample(l[:, :0].copy(), u, Settings())
    assert len(sample(l[:0], u[:0], Settings()).token) == 0


def test_the_sort_can_disagree() -> None:
    """Negative control: the reference sees a kept set that is wrong by one token."""
    l = logits_of(1, 500)
    kept = sample(l, uniforms(1), Settings(top_p=0.9)).kept[0]
    kept[np.flatnonzero(kept)[-1]] = False
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(kept, kept_by_sorting(l[0], 0, 0.9, 0.0))
