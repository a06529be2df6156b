"""The few statistics that the diagnoses share; numpy alone."""

from __future__ import annotations

import math

import numpy as np

from zerogap.gap.table import Array


def ranks(values: Array) -> Array:
    """Return the ranks 1..N; equal values share their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    result: Array = (last - (counts - 1) / 2)[inverse]
    return result


def rank_correlation(a: Array, b: Array) -> float:
    """Return Spearman's correlation; 0 for constant or too short input."""
    if len(a) < 2 or np.ptp(np.asarray(a)) == 0 or np.ptp(np.asarray(b)) == 0:
        return 0.0
    value = float(np.corrcoef(ranks(np.asarray(a)), ranks(np.asarray(b)))[0, 1])
    return 0.0 if math.isnan(value) else value


def rank_sum_z(a: Array, b: Array) -> float:
    """Return how many standard errors the ranks of ``a`` stand above those of ``b`` (Mann-Whitney)."""
    if not len(a) or not len(b):
        return 0.0
    rank = ranks(np.concatenate([a, b]))
    u = float(rank[: len(a)].sum()) - len(a) * (len(a) + 1) / 2
    return (u - len(a) * len(b) / 2) / math.sqrt(len(a) * len(b) * (len(a) + len(b) + 1) / 12)


def cluster_error(values: Array, groups: Array) -> float:
    """Return the standard error of the mean when values of one group (sequence) may hang together."""
    count = int(groups.max(initial=0)) + 1
    mean = values.mean()
    residual = np.bincount(groups, weights=values - mean, minlength=count)
    used = len(np.unique(groups))
    if used < 8:
        return float(values.std() / math.sqrt(max(len(values) - 1, 1)))
    return float(math.sqrt(np.dot(residual, residual) * used / (used - 1)) / len(values))
