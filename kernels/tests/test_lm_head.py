"""LM head with log-sum-exp: order of operations, row law from hidden rows, engine against trainer, gradients."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import zerogap_kernels as kernels
from laws import THREADS, assert_bits, assert_row_law, every_path
from sampler import Settings, distribution, sample, scaled, score

VOCABULARIES = [1, 2, 15, 17, 1023, 1025, 3000]
SETTINGS = [Settings(), Settings(0.7), Settings(0.0), Settings(0.8, 0, 0.9), Settings(1.1, 20, 0.9, 0.01)]
DEPTH = 40


def normals(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def heads(vocabulary: int, depth: int = DEPTH) -> list[tuple[kernels.Packed, torch.Tensor]]:
    weight = torch.from_numpy(normals(vocabulary, depth, seed=9))
    return [(kernels.pack(w, 1, 2), w.float()) for w in (weight, weight.bfloat16())]


def logits(hidden: np.ndarray, head: kernels.Packed) -> np.ndarray:
    y = np.empty((len(hidden), head.shape[0]), np.float32)
    kernels.linear(hidden, head, None, y, 2)
    return y


def lanes_of(function: Callable[[np.ndarray, np.ndarray, int], None], x: np.ndarray) -> np.ndarray:
    y = np.empty_like(x)
    function(x, y, 1)
    return y


def tree(x: np.ndarray) -> np.float32:
    while len(x) > 1:
        x = x[: len(x) // 2] + x[len(x) // 2 :]
    return x[0]


def logprob_by_definition(l: np.ndarray, target: int) -> np.float32:
    """The stated order of operations, one rounding at a time."""
    blocks = -(-len(l) // 1024)
    padded = np.full(blocks * 1024, -np.inf, np.float32)
    padded[: len(l)] = l
    peaks = padded.reshape(blocks, 1024).max(1)
    sums = np.zeros(blocks, np.float32)
    for block in range(blocks):
        lanes = np.zeros(16, np.float32)
        for start in range(0, 1024, 16):
            at = block * 1024 + start
            lanes = lanes + lanes_of(kernels.exp, padded[at : at + 16] - peaks[block])
        sums[block] = tree(lanes)
    factors = lanes_of(kernels.exp, peaks - peaks.max())
    lanes = np.zeros(16, np.float32)
    for block in range(blocks):
        lanes[block % 16] = np.float32(float(sums[block]) * float(factors[block]) + float(lanes[block % 16]))
    log_total = lanes_of(kernels.log, np.array([tree(lanes)]))[0]
    return (l[target] - peaks.max()) - log_total


@pytest.mark.parametrize("vocabulary", [*VOCABULARIES, 20000])
def test_log_prob_is_as_defined(vocabulary: int) -> None:
    head, _ = heads(vocabulary)[0]
    hidden = normals(3, DEPTH)
    l = logits(hidden, head)
    target = np.random.default_rng(0).integers(0, vocabulary, 3)
    expected = np.array([logprob_by_definition(l[row], target[row]) for row in range(3)])
    for _ in every_path():
        assert_bits(score(hidden, target, Settings(), head).logprob, expected)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("wanted", SETTINGS)
def test_from_hidden_as_from_logits(vocabulary: int, wanted: Settings) -> None:
    """The product inside has the bits of `linear`, for both kinds of weight."""
    hidden, u = normals(67, DEPTH), np.random.default_rng(1).random(67)
    for head, _ in heads(vocabulary):
        l = logits(hidden, head)
        for _ in every_path():
            ours, theirs = sample(hidden, u, wanted, head), sample(l, u, wanted)
            assert_bits(ours.logprob, theirs.logprob)
            assert_bits(ours.entropy, theirs.entropy)
            np.testing.assert_array_equal(ours.token, theirs.token)
            np.testing.assert_array_equal(ours.kept, theirs.kept)


@pytest.mark.parametrize("vocabulary", [17, 1025, 3000])
@pytest.mark.parametrize("wanted", SETTINGS)
def test_hidden_rows_keep_the_row_law(vocabulary: int, wanted: Settings) -> None:
    for head, _ in heads(vocabulary):

        def op(hidden: np.ndarray, threads: int, head: kernels.Packed = head) -> np.ndarray:
            drawn = sample(hidden, np.full(len(hidden), 0.375), wanted, head, threads)
            target = np.full(len(hidden), 11)
            scored = score(hidden, target, wanted, head, threads, kept=False)
            columns = (
                drawn.logprob,
                drawn.entropy,
                drawn.token,
                drawn.count,
                scored.logprob,
                scored.entropy,
                scored.total,
            )
            return np.stack([column.astype(np.float32) for column in columns], 1)

        assert_row_law(op, normals(70, DEPTH)[:: 2 if vocabulary == 17 else 5])


def test_the_row_law_check_can_fail() -> None:
    """Negative control: a log-sum-exp whose blocks depend on the number of rows."""
    head, _ = heads(3000)[0]

    def op(hidden: np.ndarray, threads: int) -> np.ndarray:
        l = logits(hidden, head)
        cut = 1000 + 16 * len(hidden)
        peak = l.max(1, keepdims=True)
        weights = np.exp(l - peak)
        total = weights[:, :cut].cumsum(1)[:, -1] + weights[:, cut:].cumsum(1)[:, -1]
        return np.log(total)[:, None]

    with pytest.raises(AssertionError, match="differ"), np.errstate(all="ignore"):
        assert_row_law(op, normals(30, DEPTH))


@pytest.mark.parametrize("wanted", SETTINGS)
def test_the_trainer_gets_the_engine_s_bits(wanted: Settings) -> None:
    """Drawn in small groups on one thread, scored all together on others: the gap is 0."""
    head, _ = heads(3000)[0]
    hidden, u = normals(200, DEPTH), np.random.default_rng(1).random(200)
    token, logprob, entropy = np.empty(200, np.int64), np.empty(200, np.float32), np.empty(200, np.float32)
    first = 0
    for count in [1, 2, 3, 5, 8, 13, 64, 65, 39]:
        rows = slice(first, first + count)
        drawn = sample(hidden[rows], u[rows], wanted, head, threads=1)
        token[rows], logprob[rows], entropy[rows] = drawn.token, drawn.logprob, drawn.entropy
        first += count
    assert first == 200
    for name in every_path():
        for threads in THREADS:
            for kept in (True, False):
                scored = score(hidden, token, wanted, head, threads, kept)
                assert_bits(scored.logprob, logprob, f"{name}, {threads} threads")
                assert_bits(scored.entropy, entropy)


def test_a_wide_vocabulary() -> None:
    head, weight = heads(49152, 8)[0]
    hidden = normals(5, 8)
    exact = torch.log_softmax(torch.from_numpy(hidden).double() @ weight.double().T, 1).numpy()
    for wanted in (Settings(), Settings(top_p=0.95)):
        drawn = sample(hidden, np.random.default_rng(0).random(5), wanted, head)
        l = logits(hidden, head)
        for row in range(5):
            p = distribution(l[row], drawn.kept[row])
            np.testing.assert_allclose(drawn.logprob[row], np.log(p[drawn.token[row]]), rtol=1e-6, atol=1e-6)
    scored = score(hidden, np.arange(5) * 9000, Settings(), head)
    np.testing.assert_allclose(scored.logprob, exact[np.arange(5), np.arange(5) * 9000], rtol=1e-6, atol=2e-6)


def grad_logits(
    hidden: np.ndarray,
    head: kernels.Packed,
    target: np.ndarray,
    wanted: Settings,
    grad: np.ndarray,
    threads: int = 2,
) -> np.ndarray:
    """Forward, then backward with the forward's kept sets."""
    scored = score(hidden, target, wanted, head)
    vocabulary = head.shape[0]
    replay = [None if scored.count[r] == vocabulary else np.packbits(scored.kept[r]) for r in range(len(hidden))]
    keywords = {**wanted.keywords(), "replay": replay}
    result = np.full((len(hidden), vocabulary + 3), 7.0, np.float32)
    kernels.token_logprobs_backward(
        hidden, head, target, wanted.arrays(len(hidden))[0], scored.peak, scored.total, grad, result[:, :vocabulary],
        threads, **keywords,
    )  # fmt: skip
    assert (result[:, vocabulary:] == 7.0).all()
    return result[:, :vocabulary]


@pytest.mark.parametrize("vocabulary", [1, 17, 1025, 3000])
@pytest.mark.parametrize("wanted", [*SETTINGS, Settings(0.9, suppressed=[[0] if r % 2 else [] for r in range(70)])])
def test_gradients(vocabulary: int, wanted: Settings) -> None:
    if vocabulary == 1 and wanted.suppressed:
        return
    rows = 70
    hidden, grad = normals(rows, DEPTH) * np.float32(0.3), normals(rows, seed=2)
    for head, weight in heads(vocabulary):
        drawn = sample(hidden, np.random.default_rng(3).random(rows), wanted, head)
        results = [grad_logits(hidden, head, drawn.token, wanted, grad, threads) for threads in THREADS]
        results += [grad_logits(hidden, head, drawn.token, wanted, grad) for _ in every_path()]
        for result in results[1:]:
            np.testing.assert_array_equal(result, results[0])
        # float64 autograd through the product, the temperature and the kept set.
        hidden64 = torch.from_numpy(hidden).double().requires_grad_()
        weight64 = weight.double().requires_grad_()
        l = hidden64 @ weight64.T
        l.retain_grad()
        mask = torch.from_numpy(drawn.kept)
        for row in range(rows):
            for token in (wanted.suppressed or [[]] * rows)[row]:
                mask[row, token] = False
        temperature = torch.from_numpy(np.where(wanted.arrays(rows)[0] == 0, 1.0, wanted.arrays(rows)[0]))
        logprob = torch.log_softmax((l / temperature[:, None]).masked_fill(~mask, -torch.inf), 1)
        logprob = logprob[torch.arange(rows), torch.from_numpy(drawn.token)]
        (logprob * torch.from_numpy(grad).double()).sum().backward()
        assert l.grad is not None
        np.testing.assert_allclose(results[0], l.grad.numpy(), rtol=1e-4, atol=2e-6)
        assert hidden64.grad is not None
        np.testing.assert_allclose(results[0] @ weight.numpy(), hidden64.grad.numpy(), rtol=1e-3, atol=3e-5)


def kept_logits(rows: int, vocabulary: int) -> np.ndarray:
    """Memory for logits that a forward keeps: some more columns than the vocabulary in whole lanes."""
    return np.full((rows, -(-vocabulary // 16) * 16 + 16), 7.0, np.float32)


@pytest.mark.parametrize("vocabulary", [1, 17, 1025, 3000])
@pytest.mark.parametrize("wanted", [*SETTINGS, Settings(0.9, suppressed=[[0] if r % 2 else [] for r in range(70)])])
def test_logits_are_kept_and_become_gradients(vocabulary: int, wanted: Settings) -> None:
    """In place over what the forward kept: log-probs and gradients have the bits of logits computed again."""
    if vocabulary == 1 and wanted.suppressed:
        return
    rows = 70
    hidden, grad = normals(rows, DEPTH), normals(rows, seed=2)
    for head, _ in heads(vocabulary):
        target = sample(hidden, np.random.default_rng(3).random(rows), wanted, head).token
        expected = grad_logits(hidden, head, target, wanted, grad)
        scored = score(hidden, target, wanted, head)
        l = logits(hidden, head)
        for _ in every_path():
            for threads in (1, 3):
                kept, logprob = kept_logits(rows, vocabulary), np.empty(rows, np.float32)
                kernels.token_logprobs(
                    hidden, head, target, *wanted.arrays(rows), logprob, threads, logits=kept, **wanted.keywords()
                )
                assert_bits(logprob, scored.logprob)
                for row in range(rows):
                    suppressed = (wanted.suppressed or [[]] * rows)[row]
                    shown = scaled(l[row], wanted.arrays(rows)[0][row], suppressed)
                    assert_bits(kept[row, :vocabulary], np.where(scored.kept[row], shown, np.float32(-np.inf)))
                assert (kept[:, -16:] == 7.0).all()
                table = kept[:, :vocabulary]
                kernels.token_logprobs_backward(
                    hidden, head, target, wanted.arrays(rows)[0], scored.peak, scored.total, grad, table, threads,
                    in_place=True,
                )  # fmt: skip
                assert_bits(np.ascontiguousarray(table), np.ascontiguousarray(expected))
                assert (kept[:, -16:] == 7.0).all()


def test_wrong_heads_are_refused() -> None:
    hidden = normals(2, DEPTH)
    cut = kernels.pack(normals(20, DEPTH), 2, 1)
    with pytest.raises(ValueError, match="the LM head has 2 segments"):
        sample(hidden, np.zeros(2), Settings(), cut)
    head, _ = heads(20)[0]
    with pytest.raises(ValueError, match=r"x \[2, 39\]: the LM head has 40 inputs"):
        sample(hidden[:, :39].copy(), np.zeros(2), Settings(), head)
    with pytest.raises(ValueError, match=r"grad_logits \[2, 19\]: must be \[2, 20\]"):
        kernels.token_logprobs_backward(
            hidden, head, np.zeros(2, np.int64), np.ones(2), np.ones(2, np.float32), np.ones(2, np.float32),
            np.ones(2, np.float32), np.empty((2, 19), np.float32), 1,
        )  # fmt: skip
    for shape, needed in (((2, 31), 32), ((1, 32), 32)):
        with pytest.raises(ValueError, match=rf"logits \[{shape[0]}, {shape[1]}\]: must be \[2, {needed} or more\]"):
            kernels.token_logprobs(
                hidden, head, np.zeros(2, np.int64), *Settings().arrays(2), np.empty(2, np.float32), 1,
                logits=np.empty(shape, np.float32),
            )  # fmt: skip
    with pytest.raises(ValueError, match="kept_bits and kept_count"):
        kernels.token_logprobs(
            hidden, head, np.zeros(2, np.int64), *Settings().arrays(2), np.empty(2, np.float32), 1,
            kept_bits=np.zeros((2, 3), np.uint8),
        )  # fmt: skip


def test_scaled_is_what_the_kernel_sees() -> None:
    l = normals(1, 30)
    assert_bits(
        score(l, np.array([4]), Settings(0.7)).logprob, score(scaled(l, 0.7), np.array([4]), Settings()).logprob
    )
