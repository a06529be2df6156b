"""From a row of logits to a distribution, a token and its log-prob: one definition for engine and trainer.

Everything here is a pure function of one row of logits, its settings and its uniform number. The order is temperature,
suppressed tokens, top-k, top-p, min-p, as in the Hugging Face processors and SGLang. Ties are broken by logit and
then by lower id, sums run in a fixed order. The log-prob is that of the distribution that was sampled from:
renormalised over the kept set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from zerogap.ops.portable.elementwise import blocked_sum, exp, log
from zerogap.ops.portable.kept import kept_mask, stored_kept_set
from zerogap.ops.portable.philox import Words, philox_words

_FIRST_CANDIDATES = 256  # tokens sorted at first in search of the nucleus


@dataclass(frozen=True)
class SamplerRows:
    """Sampler settings of R rows.

    Attributes:
        temperature_R: float64; 0 means greedy, whose log-prob stands at temperature 1.
        top_k_R: int64; 0 is off.
        top_p_R: float64; 1 is off.
        min_p_R: float64; 0 is off. Relative to the most likely token.
        suppressed: pairs of a row and token ids that it may not sample.
        kept: replayed kept sets, one per row as `LogDistribution.kept_sets` returned them; they replace top-k, top-p
            and min-p.
        filters: whether top-k, top-p or min-p of some row may drop a token; None: to be looked up, which waits for
            settings that lie on a GPU.
    """

    temperature_R: Tensor
    top_k_R: Tensor
    top_p_R: Tensor
    min_p_R: Tensor
    suppressed: tuple[tuple[int, tuple[int, ...]], ...] = ()
    kept: tuple[Tensor | None, ...] | None = None
    filters: bool | None = None

    @staticmethod
    def uniform_settings(
        rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
    ) -> SamplerRows:
        """Give every one of ``rows`` rows the same settings."""
        return SamplerRows(
            torch.full((rows,), temperature, dtype=torch.float64),
            torch.full((rows,), top_k, dtype=torch.int64),
            torch.full((rows,), top_p, dtype=torch.float64),
            torch.full((rows,), min_p, dtype=torch.float64),
        )

    def __len__(self) -> int:
        return len(self.temperature_R)

    def __getitem__(self, rows: slice) -> SamplerRows:
        start, stop, _ = rows.indices(len(self))
        return SamplerRows(
            self.temperature_R[rows],
            self.top_k_R[rows],
            self.top_p_R[rows],
            self.min_p_R[rows],
            tuple((row - start, ids) for row, ids in self.suppressed if start <= row < stop),
            None if self.kept is None else self.kept[rows],
            self.filters,
        )

    def replaying(self, kept: tuple[Tensor | None, ...]) -> SamplerRows:
        """Return the same settings with recorded kept sets in place of the filters."""
        return replace(self, kept=kept)


@dataclass(frozen=True)
class LogDistribution:
    """The distributions of R rows over V tokens.

    Attributes:
        shifted_RV: scaled logits less the maximum of the kept ones; -inf for suppressed tokens.
        weights_RV: e^shifted within the kept set, else +0.
        total_R: sum of the weights.
        kept_RV: the kept set, or None if every row keeps the whole vocabulary.
        whole_R: sum of e^shifted over all tokens, kept or not; None if nothing was filtered.
        greedy_R: rows at temperature 0.
    """

    shifted_RV: Tensor
    weights_RV: Tensor
    total_R: Tensor
    kept_RV: Tensor | None
    greedy_R: Tensor
    whole_R: Tensor | None = None

    def logprobs_of(self, token_R: Tensor) -> Tensor:
        """Return each row's log-prob of its token, [R]; -inf outside the kept set."""
        index = token_R.unsqueeze(1)
        value = self.shifted_RV.gather(1, index).squeeze(1) - log(self.total_R)
        if self.kept_RV is not None:
            value = value.masked_fill(~self.kept_RV.gather(1, index).squeeze(1), -torch.inf)
        return value

    @property
    def logprob_RV(self) -> Tensor:
        """Log-probs of all tokens, [R, V]; -inf outside the kept set."""
        value = self.shifted_RV - log(self.total_R).unsqueeze(1)
        return value if self.kept_RV is None else value.masked_fill(~self.kept_RV, -torch.inf)

    @property
    def entropy_R(self) -> Tensor:
        """Entropy of each row's distribution in nats, [R]."""
        terms = torch.where(self.weights_RV > 0, self.weights_RV * self.shifted_RV, 0.0)
        return log(self.total_R) - blocked_sum(terms) / self.total_R

    @property
    def kept_mass_R(self) -> Tensor:
        """Probability of each row's kept set before it was cut out, at the row's temperature, [R]."""
        return torch.ones_like(self.total_R) if self.whole_R is None else self.total_R / self.whole_R

    def kept_sets(self) -> tuple[Tensor | None, ...]:
        """Return each row's kept set to be held and replayed (``zerogap.ops.portable.kept``)."""
        if self.kept_RV is None:
            return (None,) * len(self.total_R)
        return tuple(stored_kept_set(row) for row in self.kept_RV)


@dataclass(frozen=True)
class Sampled:
    """What was drawn for R rows.

    Attributes:
        token_R: ids, int64.
        logprob_R: their log-probs.
        top: the most probable tokens with their log-probs, highest first, for each row that asked for some; None if no
            row did.
    """

    token_R: Tensor
    logprob_R: Tensor
    top: list[tuple[tuple[int, float], ...] | None] | None = None


def log_distribution(logits_RV: Tensor, settings: SamplerRows) -> LogDistribution:
    """Return the distributions that ``settings`` make of ``logits_RV`` [R, V]."""
    greedy_R = settings.temperature_R == 0
    temperature_R = torch.where(greedy_R, 1.0, settings.temperature_R).to(logits_RV.dtype)
    scaled_RV = logits_RV / temperature_R.unsqueeze(1)
    for row, ids in settings.suppressed:
        scaled_RV[row, list(ids)] = -torch.inf
    # A set kept by the filters holds the row's maximum; a replayed one need not, under later weights.
    kept_RV = None if settings.kept is None else _replayed(settings.kept, scaled_RV)
    peak_R1 = (scaled_RV if kept_RV is None else scaled_RV.masked_fill(~kept_RV, -torch.inf)).amax(1, keepdim=True)
    shifted_RV = scaled_RV.sub_(peak_R1)
    weights_RV = exp(shifted_RV)
    if settings.kept is None:
        kept_RV = _kept_sets(shifted_RV, weights_RV, settings)
    whole_R = None
    if kept_RV is not None:
        whole_R = blocked_sum(weights_RV)
        weights_RV.masked_fill_(~kept_RV, 0.0)
    return LogDistribution(shifted_RV, weights_RV, blocked_sum(weights_RV), kept_RV, greedy_R, whole_R)


def most_probable(logprob_V: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """Return the ``count`` most probable tokens that can be sampled, highest first, equal ones by lower id."""
    least = logprob_V.topk(min(count, len(logprob_V))).values[-1]
    ids = ((logprob_V >= least) & (logprob_V > -torch.inf)).nonzero()[:, 0]
    values, order = logprob_V[ids].sort(descending=True, stable=True)
    return tuple(zip(ids[order][:count].tolist(), values[:count].tolist(), strict=True))


def draw(distribution: LogDistribution, uniform_R: Tensor) -> Tensor:
    """Sample one token per row by inverting the cumulative distribution in id order; greedy rows take the most likely.

    Args:
        distribution: the rows' distributions.
        uniform_R: float64 numbers in [0, 1), one per row.

    Returns:
        Token ids [R], int64. Among equally likely greedy candidates the lowest id wins.
    """
    summed_RV = distribution.weights_RV.to(torch.float64).cumsum(1)
    aim_R = uniform_R * summed_RV[:, -1]
    token_R = torch.searchsorted(summed_RV, aim_R.unsqueeze(1), right=True).squeeze(1)
    vocabulary = summed_RV.shape[1]
    ids = torch.arange(vocabulary)
    # u * total can round up to the total: the last token with weight is meant then.
    last_R = torch.where(distribution.weights_RV > 0, ids, 0).amax(1)
    token_R = torch.minimum(token_R, last_R)
    if bool(distribution.greedy_R.any()):
        best_R = torch.where(distribution.shifted_RV == 0, ids, vocabulary - 1).amin(1)
        token_R = torch.where(distribution.greedy_R, best_R, token_R)
    return token_R


def uniform(seed: int, keys: Sequence[tuple[int, int, int, int]]) -> Tensor:
    """Return one number in [0, 1) per key (step, prompt, sample, position), float64 [R].

    Counter-based (Philox 4x64, Salmon et al. 2011): a number depends on the seed and its own key only, never on how
    many were drawn before.
    """
    step, prompt, sample, position = np.array(keys, dtype=np.uint64).reshape(-1, 4).T
    return _uniform(np.full_like(step, seed), step, prompt, sample, position)


def uniform_rows(key_R5: Tensor) -> Tensor:
    """Return one number in [0, 1) per row (seed, step, prompt, sample, position) of int64 words, float64 [R]."""
    return _uniform(*key_R5.numpy().view(np.uint64).T)


def _uniform(seed: Words, step: Words, prompt: Words, sample: Words, position: Words) -> Tensor:
    words = philox_words((seed, step), (np.ones_like(step), position, sample, prompt))
    return torch.from_numpy((words >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _replayed(kept: tuple[Tensor | None, ...], scaled_RV: Tensor) -> Tensor | None:
    if all(stored is None for stored in kept):
        return None
    kept_RV = torch.ones_like(scaled_RV, dtype=torch.bool)
    for row, stored in enumerate(kept):
        if stored is not None:
            kept_RV[row] = kept_mask(stored, kept_RV.shape[1])
    return kept_RV


def _kept_sets(shifted_RV: Tensor, weights_RV: Tensor, settings: SamplerRows) -> Tensor | None:
    vocabulary = shifted_RV.shape[1]
    top_k_R = torch.where(settings.top_k_R > 0, settings.top_k_R, vocabulary).clamp(max=vocabulary)
    sampled_R = settings.temperature_R > 0
    finite_R = ~shifted_RV.isnan().any(1)
    ranked_R = sampled_R & finite_R & ((top_k_R < vocabulary) | (settings.top_p_R < 1))
    floored_R = sampled_R & finite_R & (settings.min_p_R > 0)
    if not bool((ranked_R | floored_R).any()):
        return None
    kept_RV = torch.ones_like(shifted_RV, dtype=torch.bool)
    rows = ranked_R.nonzero().squeeze(1)
    if len(rows):
        kept_RV[rows] = _top_k_top_p(
            shifted_RV[rows], weights_RV[rows], top_k_R[rows], settings.top_p_R[rows].clamp(min=0.0)
        )
    # The most likely token has weight e^0 = 1, so weights are already relative to it.
    floor_R = torch.where(floored_R, settings.min_p_R, 0.0).to(weights_RV.dtype)
    return kept_RV & (weights_RV >= floor_R.unsqueeze(1))


def _top_k_top_p(shifted_FV: Tensor, weights_FV: Tensor, top_k_F: Tensor, top_p_F: Tensor) -> Tensor:
    """Return the kept sets of rows with top-k, top-p or both; the nucleus is taken within the top k.

    Tokens are ranked only as far as some row needs. That never changes a row's result: its ranking is a prefix of the
    full one.
    """
    vocabulary = shifted_FV.shape[1]
    nucleus = bool((top_p_F < 1).any())
    limited = top_k_F < vocabulary
    count = min(vocabulary, max(int(top_k_F[limited].max()) if limited.any() else 1, _FIRST_CANDIDATES))
    while True:
        ids_FC = _ranked(shifted_FV, count)
        rank_C = torch.arange(count)
        in_top_k_FC = rank_C < top_k_F.unsqueeze(1)
        kept_FC = in_top_k_FC
        closed = bool((top_k_F <= count).all())
        if nucleus:
            weights_FC = weights_FV.gather(1, ids_FC).masked_fill(~in_top_k_FC, 0.0)
            # A row without top-k sums its whole vocabulary, in the order in which the log-sum-exp does.
            top_k_FV = torch.zeros_like(weights_FV).scatter_(1, ids_FC, weights_FC)
            total_F = blocked_sum(torch.where(limited.unsqueeze(1), top_k_FV, weights_FV))
            sums_FC = weights_FC.to(torch.float64).cumsum(1)
            aim_F1 = (top_p_F * total_F.to(torch.float64)).unsqueeze(1)
            before_FC = sums_FC - weights_FC
            # A row with top-k alone has no nucleus: its rounded total may lie below the sum of its first tokens.
            whole_F1 = (top_p_F >= 1).unsqueeze(1)
            kept_FC = in_top_k_FC & (whole_F1 | (before_FC < aim_F1) | (rank_C == 0))
            open_F = (top_k_F > count) & ((sums_FC[:, -1:] < aim_F1) | whole_F1).squeeze(1)
            closed = not bool(open_F.any())
        if closed or count == vocabulary:
            return torch.zeros_like(shifted_FV, dtype=torch.bool).scatter_(1, ids_FC, kept_FC)
        count = min(vocabulary, count * 16)


def _ranked(shifted_FV: Tensor, count: int) -> Tensor:
    """Return the ids of the ``count`` highest tokens, by falling logit and then rising id, [F, count]."""
    if count == shifted_FV.shape[1]:
        return shifted_FV.sort(dim=1, descending=True, stable=True).indices
    lowest_F1 = shifted_FV.topk(count, dim=1).values[:, -1:]
    above_FV, equal_FV = shifted_FV > lowest_F1, shifted_FV == lowest_F1
    room_F1 = count - above_FV.sum(1, keepdim=True)
    chosen_FV = above_FV | (equal_FV & (equal_FV.cumsum(1) <= room_F1))
    ids_FC = chosen_FV.nonzero()[:, 1].view(-1, count)
    order_FC = shifted_FV.gather(1, ids_FC).sort(dim=1, descending=True, stable=True).indices
    return ids_FC.gather(1, order_FC)
