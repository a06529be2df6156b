"""Which sampling settings an engine used, estimated from what it drew.

Where an engine's log-probs show the raw distribution, its hidden defaults show only in which tokens it draws. Each
draw is a token together with the raw log-probs of the most likely tokens at its position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_T_GRID = np.round(np.exp(np.linspace(math.log(0.2), math.log(2.5), 52)), 4)
_P_GRID = (0.99, 0.98, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5, 0.4, 0.3)
_K_GRID = (20, 16, 12, 10, 8, 6, 5, 4, 3, 2, 1)
_MIN_P_GRID = (0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3)
GAIN = 12.0  # nats of likelihood that a setting must gain before it is named


@dataclass(frozen=True)
class Draws:
    """N draws with K alternatives each.

    Attributes:
        logprob_NK: raw log-probs, most likely first, -inf where there are fewer.
        rank_N: index of the drawn token among them, K when it is none of them.
    """

    logprob_NK: np.ndarray
    rank_N: np.ndarray

    def __len__(self) -> int:
        return len(self.rank_N)


def make_draws(rows: Sequence[tuple[Sequence[float], float]], width: int) -> Draws:
    """Return draws from (log-probs of the most likely tokens, log-prob of the drawn token) pairs."""
    table = np.full((len(rows), width), -np.inf)
    rank = np.full(len(rows), width, dtype=np.int64)
    for number, (values, drawn) in enumerate(rows):
        best = sorted(values, reverse=True)[:width]
        table[number, : len(best)] = best
        hits = [index for index, value in enumerate(best) if value == drawn]
        if hits:
            rank[number] = hits[0]
    return Draws(table, rank)


@dataclass(frozen=True)
class Settings:
    """Estimated sampling settings.

    Attributes:
        temperature_error: one standard error.
        gain: log-likelihood of these settings over neutral ones, in nats.
        draws: how many draws the estimate rests on.
    """

    temperature: float
    temperature_error: float
    top_p: float
    top_k: int
    min_p: float
    gain: float
    draws: int

    @property
    def is_neutral(self) -> bool:
        """Whether nothing but the raw distribution is needed to explain the draws."""
        return self.gain < GAIN


def estimate(draws: Draws, only: str = "") -> Settings:
    """Return the most likely settings: a temperature and at most one truncation, and this only where it gains much.

    Args:
        draws: what was drawn.
        only: the one value that may differ from neutral ("temperature", "top_p", "top_k" or "min_p"); "" for any.
    """
    neutral = _likelihood(draws, 1.0, 1.0, 0, 0.0)
    cuts: list[tuple[float, int, float]] = [(1.0, 0, 0.0)]
    cuts += [(p, 0, 0.0) for p in _P_GRID if only in ("", "top_p")]
    cuts += [(1.0, k, 0.0) for k in _K_GRID if only in ("", "top_k")]
    cuts += [(1.0, 0, m) for m in _MIN_P_GRID if only in ("", "min_p")]
    temperatures = _T_GRID if only in ("", "temperature") else np.ones(1)
    options = []
    for cut in cuts:
        price = GAIN if cut != cuts[0] else 0.0
        options += [(_likelihood(draws, float(t), *cut) - price, float(t), *cut) for t in temperatures]
    _, temperature, top_p, top_k, min_p = max(options)
    error = float("nan")
    score = _likelihood(draws, temperature, top_p, top_k, min_p)
    if len(temperatures) > 1:
        fine = np.linspace(temperature * 0.9, temperature * 1.1, 81)
        scores = np.array([_likelihood(draws, float(t), top_p, top_k, min_p) for t in fine])
        best = int(np.argmax(scores))
        temperature, score, error = float(fine[best]), float(scores[best]), _error(fine, scores, best)
    return Settings(temperature, error, top_p, top_k, min_p, score - neutral, len(draws))


def _likelihood(draws: Draws, temperature: float, top_p: float, top_k: int, min_p: float) -> float:
    """Return the log-likelihood of the drawn ranks within the lists; -inf when a draw is impossible.

    A draw outside its list says nothing about the order within it, so it only counts against a setting that
    forbids it.
    """
    scaled = draws.logprob_NK / temperature
    tail = np.clip(1.0 - np.exp(draws.logprob_NK).sum(axis=1), 0.0, None)
    if temperature == 1.0:
        weight = np.exp(scaled)
    else:
        # The tail beyond the list is not known token by token; at the list's edge it is tempered like the last token.
        last = np.where(np.isfinite(draws.logprob_NK), draws.logprob_NK, np.inf).min(axis=1)
        tail = tail * np.exp(last * (1.0 / temperature - 1.0))
        weight = np.exp(scaled)
        total = weight.sum(axis=1) + tail
        weight, tail = weight / total[:, None], tail / total
    kept = np.isfinite(draws.logprob_NK)
    if top_k:
        kept &= np.arange(kept.shape[1])[None, :] < top_k
    if top_p < 1.0:
        before = np.cumsum(weight, axis=1) - weight
        kept &= before < top_p
    if min_p > 0.0:
        kept &= weight >= min_p * weight[:, :1]
    open_end = np.ones(len(draws), dtype=bool)
    if top_k and top_k <= kept.shape[1]:
        open_end[:] = False
    if top_p < 1.0:
        open_end &= weight.sum(axis=1) < top_p
    if min_p > 0.0:
        open_end &= kept[:, -1]
    inside = draws.rank_N < kept.shape[1]
    if (~inside & ~open_end).any():
        return -np.inf
    rows = np.flatnonzero(inside)
    ranks = draws.rank_N[rows]
    if not kept[rows, ranks].all():
        return -np.inf
    mass = (weight * kept).sum(axis=1)[rows]
    return float(np.log(weight[rows, ranks] / mass).sum())


def _error(grid: np.ndarray, scores: np.ndarray, best: int) -> float:
    """Return one standard error of the grid's best point from the curvature of the log-likelihood."""
    near = np.isfinite(scores) & (np.abs(np.arange(len(grid)) - best) <= 20)
    if near.sum() < 5:
        return float("nan")
    curve = np.polyfit(grid[near] - grid[best], scores[near], 2)[0]
    return float(1.0 / math.sqrt(-2.0 * curve)) if curve < 0 else float("nan")
