"""Which sampling settings an engine used, estimated from what it drew.

Where an engine's log-probs show the raw distribution, its hidden defaults show only in which tokens it draws. Each
draw is a token together with the raw log-probs of the K most likely tokens at its position; the rest of the
vocabulary is known by its mass alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
SURPRISED = 5.0  # standard errors off neutral sampling before it is said not to be neutral
_T_GRID = np.exp(np.linspace(math.log(0.2), math.log(2.5), 64))
_P_GRID = np.round(np.arange(0.30, 1.0, 0.01), 2)
_MIN_P_GRID = np.array([0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5])


@dataclass(frozen=True)
class Draws:
    """N draws with K alternatives each.

    Attributes:
        mass_NK: probabilities of the most likely tokens, most likely first, 0 where there are fewer.
        rank_N: index of the drawn token among them, K when it is none of them.
    """

    mass_NK: Array
    rank_N: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rank_N)

    @property
    def inside_N(self) -> NDArray[np.bool_]:
        """Which draws are among their alternatives."""
        result: NDArray[np.bool_] = self.rank_N < self.mass_NK.shape[1]
        return result

    @property
    def tail_N(self) -> Array:
        """Mass beyond the alternatives."""
        result: Array = np.clip(1.0 - self.mass_NK.sum(axis=1), 0.0, 1.0)
        return result


def make_draws(rows: Sequence[tuple[Sequence[float], float]], width: int) -> Draws:
    """Return draws from (log-probs of the most likely tokens, log-prob of the drawn token) pairs."""
    table = np.zeros((len(rows), width))
    rank = np.full(len(rows), width, dtype=np.int64)
    for number, (values, drawn) in enumerate(rows):
        best = sorted(values, reverse=True)[:width]
        table[number, : len(best)] = np.exp(best)
        if drawn in best:
            rank[number] = best.index(drawn)
    return Draws(table, rank)


def surprise(draws: Draws) -> float:
    """Return how many standard errors the draws are off neutral sampling; the larger of two looks.

    One look counts draws beyond the alternatives, whose probability is known exactly. The other takes the mean log
    probability of the draws among them, which a temperature moves most.
    """
    tail = draws.tail_N
    outside = _standard(float((~draws.inside_N).sum()), float(tail.sum()), float((tail * (1 - tail)).sum()))
    weight = draws.mass_NK[draws.inside_N]
    share = weight / weight.sum(axis=1, keepdims=True)
    value = np.log(np.where(weight > 0, weight, 1.0))
    mean = (share * value).sum(axis=1)
    spread = (share * (value - mean[:, None]) ** 2).sum(axis=1)
    seen = value[np.arange(len(weight)), draws.rank_N[draws.inside_N]]
    return max(outside, _standard(float(seen.sum()), float(mean.sum()), float(spread.sum())))


def _standard(seen: float, expected: float, variance: float) -> float:
    return abs(seen - expected) / math.sqrt(max(variance, 1.0))


def estimate(draws: Draws, name: str) -> tuple[float, float]:
    """Return (value, standard error) of the one setting that is not neutral.

    Args:
        draws: what was drawn with everything but this setting neutral.
        name: "temperature", "top_p", "top_k" or "min_p". The error is NaN where a limit is estimated, not a mean.
    """
    if name == "temperature":
        return _temperature(draws)
    if name == "top_k":
        ranks = draws.rank_N
        return float(ranks.max(initial=0) + 1), float("nan")
    likelihood, options = (_top_p, _P_GRID) if name == "top_p" else (_min_p, _MIN_P_GRID)
    return float(max(options, key=lambda value: likelihood(draws, float(value)))), float("nan")


def _temperature(draws: Draws) -> tuple[float, float]:
    """Fit T on the draws among the alternatives, given that they are: this needs no tail."""
    weight = draws.mass_NK[draws.inside_N]
    value = np.where(weight > 0, np.log(np.where(weight > 0, weight, 1.0)), -np.inf)
    seen = value[np.arange(len(weight)), draws.rank_N[draws.inside_N]]

    def score(t: float) -> float:
        scaled = value / t
        top = scaled.max(axis=1)
        return float((seen / t - top - np.log(np.exp(scaled - top[:, None]).sum(axis=1))).sum())

    coarse = float(max(_T_GRID, key=score))
    fine = np.linspace(coarse * 0.9, coarse * 1.1, 81)
    scores = np.array([score(float(t)) for t in fine])
    best = float(fine[int(np.argmax(scores))])
    return best, _error(score, best)


def _error(score: Callable[[float], float], best: float) -> float:
    """Return one standard error from the curvature of the log-likelihood at its top."""
    step = best * 0.02
    curve = (score(best + step) - 2 * score(best) + score(best - step)) / step**2
    return 1.0 / math.sqrt(-curve) if curve < 0 else float("nan")


def _top_p(draws: Draws, top_p: float) -> float:
    """Log-likelihood of a nucleus of ``top_p`` at temperature 1, the tail taken as made of small tokens."""
    mass = draws.mass_NK
    before = np.cumsum(mass, axis=1) - mass
    kept = (before < top_p) & (mass > 0)
    listed = mass.sum(axis=1)
    beyond = np.clip(np.minimum(draws.tail_N, top_p - listed), 0.0, None)
    total = (mass * kept).sum(axis=1) + beyond
    inside = draws.inside_N
    rows = np.flatnonzero(inside)
    if not kept[rows, draws.rank_N[rows]].all() or (beyond[~inside] <= 0).any():
        return -math.inf
    own = np.where(inside, mass[np.arange(len(mass)), np.where(inside, draws.rank_N, 0)], beyond)
    return float(np.log(own / total).sum())


def _min_p(draws: Draws, min_p: float) -> float:
    """Log-likelihood of a floor relative to the most likely token, given that the draw is among the alternatives."""
    mass = draws.mass_NK
    kept = (mass >= min_p * mass[:, :1]) & (mass > 0)
    inside = draws.inside_N
    if kept[~inside].all(axis=1).sum() < (~inside).sum():
        return -math.inf
    rows = np.flatnonzero(inside)
    ranks = draws.rank_N[rows]
    if not kept[rows, ranks].all():
        return -math.inf
    return float(np.log(mass[rows, ranks] / (mass * kept).sum(axis=1)[rows]).sum())
