"""From logits to a distribution, a token and its log-prob on a GPU: the interface of ``zerogap.ops.portable.sampling``.

Log-probs are the portable backend's formulas in its order. Draws and the nucleus count weights in whole quanta, whose
sums are exact in any order (``zerogap.ops.triton.distribution``). Settings are read on the host, where they are made:
nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zerogap.ops.portable.kept import stored_kept_set
from zerogap.ops.portable.sampling import SamplerRows
from zerogap.ops.triton import distribution as d
from zerogap.ops.triton.kept import kept_sets
from zerogap.ops.triton.philox import uniform, uniform_rows
from zerogap.ops.triton.run import run

__all__ = ["LogDistribution", "SamplerRows", "draw", "log_distribution", "uniform", "uniform_rows"]


@dataclass(frozen=True)
class LogDistribution:
    """The distributions of R rows over V tokens.

    Attributes:
        shifted_RV: scaled logits less the maximum of the kept ones; -inf for suppressed tokens.
        weights_RV: e^shifted within the kept set, else +0.
        total_R: sum of the weights.
        log_total_R: its logarithm.
        entropy_R: entropy of each row's distribution in nats.
        kept_RV: the kept set, or None if every row keeps the whole vocabulary.
        greedy_R: rows at temperature 0.
    """

    shifted_RV: Tensor
    weights_RV: Tensor
    total_R: Tensor
    log_total_R: Tensor
    entropy_R: Tensor
    kept_RV: Tensor | None
    greedy_R: Tensor

    def logprobs_of(self, token_R: Tensor) -> Tensor:
        """Return each row's log-prob of its token, [R]; -inf outside the kept set."""
        index = token_R.unsqueeze(1)
        value = self.shifted_RV.gather(1, index).squeeze(1) - self.log_total_R
        if self.kept_RV is None:
            return value
        return value.masked_fill(~self.kept_RV.gather(1, index).squeeze(1), -torch.inf)

    @property
    def logprob_RV(self) -> Tensor:
        """Log-probs of all tokens, [R, V]; -inf outside the kept set."""
        value = self.shifted_RV - self.log_total_R.unsqueeze(1)
        return value if self.kept_RV is None else value.masked_fill(~self.kept_RV, -torch.inf)

    def kept_sets(self) -> tuple[Tensor | None, ...]:
        """Return each row's kept set to be held on the host and replayed (``zerogap.ops.portable.kept``)."""
        if self.kept_RV is None:
            return (None,) * len(self.total_R)
        return tuple(stored_kept_set(row) for row in self.kept_RV.cpu())


def log_distribution(logits_RV: Tensor, settings: SamplerRows) -> LogDistribution:
    """Return the distributions that ``settings`` make of ``logits_RV`` [R, V], float32."""
    rows = rows_of(logits_RV, settings)
    peaks_RB = peaks(rows)
    shifted_RV, weights_RV, sums_RB, terms_RB = weigh(rows, peaks_RB, tables=True)
    kept_RV = rows.kept_RV
    filters = None if settings.kept is not None else _filters(settings, logits_RV)
    if filters is not None:
        kept_RV = kept_sets(shifted_RV, weights_RV, *filters)
        run(d.filter_config(), _grid(rows), shifted_RV, weights_RV, kept_RV, sums_RB, terms_RB, rows.vocabulary)
    total_R, log_total_R, entropy_R = totals(rows, sums_RB, terms_RB)
    return LogDistribution(shifted_RV, weights_RV, total_R, log_total_R, entropy_R, kept_RV, rows.greedy_R)


def draw(distribution: LogDistribution, uniform_R: Tensor) -> Tensor:
    """Sample one token per row by inverting the cumulative distribution in id order; greedy rows take the most likely.

    Args:
        distribution: the rows' distributions.
        uniform_R: float64 numbers in [0, 1), one per row.

    Returns:
        Token ids [R], int64. Among equally likely greedy candidates the lowest id wins.
    """
    rows, vocabulary = distribution.weights_RV.shape
    device, blocks = distribution.weights_RV.device, d.block_count(vocabulary)
    mass_RB = torch.empty(rows, blocks, dtype=torch.int64, device=device)
    first_RB = torch.empty(rows, blocks, dtype=torch.int32, device=device)
    token_R = torch.empty(rows, dtype=torch.int64, device=device)
    grid = (blocks, rows)
    run(
        d.mass_config(vocabulary),
        grid,
        distribution.shifted_RV,
        distribution.weights_RV,
        mass_RB,
        first_RB,
        vocabulary,
    )
    uniform_R = uniform_R.to(device, non_blocking=True)
    run(
        d.draw_config(vocabulary),
        (rows,),
        distribution.weights_RV,
        mass_RB,
        first_RB,
        distribution.greedy_R,
        uniform_R,
        token_R,
        vocabulary,
    )
    return token_R


@dataclass(frozen=True)
class LogitRows:
    """Logits on the device with what is needed to scale them.

    Attributes:
        logits_RV: float32, the last dimension contiguous.
        temperature_R: float32, 1 for greedy rows.
        kept_RV: replayed kept sets, bool; None: there are none.
        greedy_R: rows at temperature 0, bool.
    """

    logits_RV: Tensor
    temperature_R: Tensor
    kept_RV: Tensor | None
    greedy_R: Tensor

    @property
    def vocabulary(self) -> int:
        """Number of tokens."""
        return self.logits_RV.shape[1]


def rows_of(logits_RV: Tensor, settings: SamplerRows) -> LogitRows:
    """Bring settings to the logits' device; suppressed tokens get -inf in a copy of the logits."""
    assert logits_RV.dtype == torch.float32, "log-probs are made from unrounded logits"
    device = logits_RV.device
    if logits_RV.stride(1) != 1:
        logits_RV = logits_RV.contiguous()
    if settings.suppressed:
        row, token = zip(*((row, token) for row, ids in settings.suppressed for token in ids), strict=True)
        place = torch.tensor([row, token], dtype=torch.int64).to(device, non_blocking=True)
        logits_RV = logits_RV.clone()
        logits_RV[place[0], place[1]] = -torch.inf
    greedy_R = settings.temperature_R == 0
    temperature_R = settings.temperature_R.masked_fill(greedy_R, 1.0).to(torch.float32)
    return LogitRows(
        logits_RV,
        temperature_R.to(device, non_blocking=True),
        _replayed(settings.kept, logits_RV),
        greedy_R.to(device, non_blocking=True),
    )


def peaks(rows: LogitRows) -> Tensor:
    """Return the largest scaled logit of each block, [R, B]."""
    logits_RV, kept = rows.logits_RV, rows.kept_RV
    peaks_RB = logits_RV.new_empty(len(logits_RV), d.block_count(rows.vocabulary))
    config = d.peak_config(kept is not None)
    mask = peaks_RB if kept is None else kept
    run(
        config, _grid(rows), logits_RV, rows.temperature_R, mask, peaks_RB, rows.vocabulary, logits_RV.stride(0)
    )  # fmt: skip
    return peaks_RB


def weigh(rows: LogitRows, peaks_RB: Tensor, tables: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (shifted [R, V], weights [R, V], sums and entropy terms of blocks [R, B]); the first two if wanted."""
    logits_RV, kept = rows.logits_RV, rows.kept_RV
    shape = (len(logits_RV), rows.vocabulary) if tables else (1, 1)
    shifted_RV, weights_RV = logits_RV.new_empty(shape), logits_RV.new_empty(shape)
    sums_RB, terms_RB = torch.empty_like(peaks_RB), torch.empty_like(peaks_RB)
    run(
        d.weigh_config(rows.vocabulary, kept is not None, tables),
        _grid(rows),
        logits_RV,
        rows.temperature_R,
        peaks_RB if kept is None else kept,
        peaks_RB,
        shifted_RV,
        weights_RV,
        sums_RB,
        terms_RB,
        rows.vocabulary,
        logits_RV.stride(0),
    )
    return shifted_RV, weights_RV, sums_RB, terms_RB


def totals(rows: LogitRows, sums_RB: Tensor, terms_RB: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's total weight, its logarithm, and the entropy."""
    total_R, log_total_R, entropy_R = (sums_RB.new_empty(len(sums_RB)) for _ in range(3))
    config = d.total_config(rows.vocabulary)
    run(config, (len(sums_RB),), sums_RB, terms_RB, total_R, log_total_R, entropy_R)
    return total_R, log_total_R, entropy_R


def filtered(settings: SamplerRows) -> bool:
    """Return whether top-k, top-p or min-p of some row may drop a token."""
    if settings.filters is not None:
        return settings.filters
    on_R = (settings.top_k_R > 0) | (settings.top_p_R < 1) | (settings.min_p_R > 0)
    return bool((on_R & (settings.temperature_R > 0)).any())


def _filters(settings: SamplerRows, logits_RV: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return top-k, top-p and min-p of each row on the device, off for greedy ones; None if no row has any."""
    if not filtered(settings):
        return None
    vocabulary, device = logits_RV.shape[1], logits_RV.device
    greedy_R = settings.temperature_R <= 0
    top_k_R = settings.top_k_R.masked_fill(greedy_R | (settings.top_k_R <= 0), vocabulary).clamp(max=vocabulary)
    top_p_R = settings.top_p_R.clamp(min=0.0).masked_fill(greedy_R, 1.0)
    min_p_R = settings.min_p_R.masked_fill(greedy_R, 0.0).to(torch.float32)
    return (
        top_k_R.to(device, non_blocking=True),
        top_p_R.to(device, non_blocking=True),
        min_p_R.to(device, non_blocking=True),
    )


def _replayed(kept: tuple[Tensor | None, ...] | None, logits_RV: Tensor) -> Tensor | None:
    if kept is None or all(stored is None for stored in kept):
        return None
    kept_RV = torch.ones(logits_RV.shape, dtype=torch.bool, device=logits_RV.device)
    bits_8 = torch.arange(7, -1, -1, device=logits_RV.device)
    for row, stored in enumerate(kept):
        if stored is None:
            continue
        stored = stored.to(logits_RV.device, non_blocking=True)
        if stored.dtype == torch.uint8:  # one bit per token, the highest first
            unpacked = (stored.to(torch.int64).unsqueeze(1) >> bits_8) & 1
            kept_RV[row] = unpacked.flatten()[: logits_RV.shape[1]].bool()
        else:
            kept_RV[row] = False
            kept_RV[row].index_fill_(0, stored.to(torch.int64), True)
    return kept_RV


def _grid(rows: LogitRows) -> tuple[int, int]:
    return d.block_count(rows.vocabulary), len(rows.logits_RV)
