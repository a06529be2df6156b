"""The sampler part of the gap: truncation, one-sided temperature, penalties; with kept sets exactly, else by signature.

With ``d = logprob_trainer - logprob_engine`` and Z the trainer's kept mass at the engine's temperature, the sampler
part is log Z (at most 0) and the numerics part ``d - log Z``; where the trainer replays the kept set, there is none.
Without Z the engine's mean of ``exp(d)`` estimates it: over tokens drawn from the engine's distribution, E[exp(d)] is
the trainer's mass on the engine's support.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from zerogap.errors import UsageError
from zerogap.gap.diagnoses.base import Finding
from zerogap.gap.diagnoses.context import Context
from zerogap.gap.diagnoses.statistics import cluster_error
from zerogap.gap.table import Array

MASS_LOST = 0.008  # 1 - mean ratio that counts as truncation
MASS_SIGMAS = 4.0
ONE_SIDED = 5.5  # sum of negative d / sum of positive d, beyond the middle
FAR_SIDED = 1.4  # 2 % quantile below 0 against the 98 % quantile above
TEMPERATURE_STEP = 0.08  # |ratio of temperatures - 1| that counts
TEMPERATURE_FIT = 0.85  # R^2 of the line; other weights and inputs scatter more
PENALTY_LEAN = 4.0  # negative against positive d on new tokens
PENALTY_CONTRAST = 2.5  # the same lean against that of repeated tokens


def diagnose_sampler(c: Context) -> list[Finding]:
    """Return what the signs and slopes of d say about the sampler."""
    if len(c.rows) < 4:
        return []
    if c.table.has("kept_mass") or c.table.has("logprob_engine_unfiltered"):
        exact = _exact(c)
        if exact:
            return exact
    return _truncation(c) or _temperature(c) or _penalty(c)


def _exact(c: Context) -> list[Finding]:
    """Kept masses are known: say how much of the gap is the sampler's."""
    if c.table.has("kept_mass"):
        mass = c.table.columns["kept_mass"][c.rows].astype(np.float64)
    else:
        # The engine's own kept mass: what filtering added to the token's log-prob.
        mass = np.exp(c.table.columns["logprob_engine_unfiltered"][c.rows].astype(np.float64) - c.engine)
    known = (mass > 0) & (mass <= 1.001)
    replayed = c.column("kept_replayed")
    if replayed is not None:  # both sides are renormalised there: d has no sampler part
        known &= ~replayed
    if not known.any():
        return []
    sampler = np.log(np.minimum(mass[known], 1.0))
    before = float(c.size[known].mean())
    numerics = c.d[known] - sampler
    after = float(np.abs(numerics).mean())
    if -sampler.mean() < 1e-4 or after > 0.8 * before:
        return []
    return [
        Finding(
            "sampler/truncation",
            0.98,
            f"SAMPLER_TRUNCATION kept_mass~{mass[known].mean():.2f} (from kept sets): sampler part "
            f"{sampler.mean():+.4g} nats a token, numerics {after:.4g} of {before:.4g} mean abs(d)",
            {
                "kept_mass": float(mass[known].mean()),
                "sampler_part": float(sampler.mean()),
                "numerics_mean_abs": after,
                "mean_abs": before,
                "exact": True,
            },
            c.worst(3),
        )
    ]


def _truncation(c: Context) -> list[Finding]:
    d = c.d
    ratio = np.exp(np.clip(d, -20, 20))
    mass = float(ratio.mean())
    error = cluster_error(ratio, c.in_sequence)
    few = len(d) < 50
    down, up = float(-d[d < 0].sum()), float(d[d > 0].sum())
    one_sided = down / max(up, 1e-12)
    numbers = {"kept_mass": mass, "uncertainty": 2 * error, "exact": False, "one_sided": min(one_sided, 1e6)}
    if few:
        material = np.abs(d) > 1e-3
        if material.sum() < 4 or (d[material] > 0).any() or d.mean() > -0.03 or mass > 0.98 or d.min() < -1.2:
            return []
        confidence = 0.6 + 0.03 * min(int(material.sum()), 8)
    else:
        if 1 - mass < max(MASS_LOST, MASS_SIGMAS * error) or mass < 0.15:
            return []
        far_down, far_up = -float(np.quantile(d, 0.02)), float(np.quantile(d, 0.98))
        if one_sided < ONE_SIDED or far_down < FAR_SIDED * max(far_up, 0.0):
            return []
        # A kept set of one token: the engine is sure (exactly 0), the trainer is not.
        lone = (c.engine == 0.0) & (d < -0.01)
        numbers["lone_kept_share"] = float(lone.mean())
        # Other weights or inputs also lose mean ratio when their spread is huge; a kept set never loses that much.
        if np.quantile(d, 0.001) < -6 and not lone.any():
            return []
        confidence = 0.95 if lone.any() else 0.8
    sure = c.engine > math.log(0.99)
    rest = f"; tokens with p~1 differ by {c.size[sure].mean():.3g}" if sure.any() and not few else ""
    return [
        Finding(
            "sampler/truncation",
            confidence,
            f"SAMPLER_TRUNCATION kept_mass~{mass:.2f} (+-{2 * error:.2g}, estimated from the mean ratio): "
            f"engine minus trainer is >= 0 on {float((d <= 1e-6).mean()):.0%} of tokens, mean ratio {mass:.3f}{rest}",
            numbers,
            c.worst(3),
        )
    ]


def _logit(logprob: Array) -> Array:
    clipped = np.clip(logprob, -20.0, -1e-4)
    result: Array = clipped - np.log(-np.expm1(clipped))
    return result


def temperature_slope(engine: Array, trainer: Array) -> tuple[float, float, float]:
    """Return (slope, R^2, median ratio) of the trainer's logits over the engine's, for tokens with few rivals.

    For two outcomes ``logit p = (z1 - z2) / T``, so the slope is the engine's temperature over the trainer's. The line
    is fitted by total least squares, which a symmetric error does not flatten; the median ratio over sure tokens must
    tell the same, or the slope is only scatter.
    """
    use = (engine > math.log(0.2)) & (engine < math.log(0.999)) & (trainer > -12)
    if use.sum() < 30:
        return float("nan"), 0.0, float("nan")
    x, y = _logit(engine[use]), _logit(trainer[use])
    values, vectors = np.linalg.eigh(np.cov(x, y))
    direction = vectors[:, int(np.argmax(values))]
    slope = float(direction[1] / direction[0]) if direction[0] else float("inf")
    r = float(np.corrcoef(x, y)[0, 1])
    sure = x > 1.0
    return slope, r * r, float(np.median(y[sure] / x[sure])) if sure.sum() >= 10 else float("nan")


def _temperature(c: Context) -> list[Finding]:
    if len(c.rows) < 200 or c.size.mean() < 0.02:
        return []
    slope, fit, middle = temperature_slope(c.engine, c.trainer)
    if not math.isfinite(slope) or fit < TEMPERATURE_FIT or abs(slope - 1) < TEMPERATURE_STEP:
        return []
    if math.isnan(middle) or (middle - 1) * (slope - 1) <= 0 or abs(middle - 1) < 0.5 * abs(slope - 1):
        return []
    temperature = c.column("temperature")
    stated = c.facts.number("temperature")
    engine_t = float(temperature[0]) if temperature is not None else stated
    spread = 0.03 + abs(slope - 1) / 8
    fitted = f"temperature of the engine / temperature of the trainer = {slope:.2f} +- {spread:.2f}"
    if engine_t is not None and abs(slope - engine_t) < 0.12 and engine_t != 1.0:
        fitted += f": the trainer scores at T=1, the engine at T={engine_t:g}"
    elif engine_t is not None and abs(slope * engine_t - 1) < 0.12 and engine_t != 1.0:
        fitted += f": the engine scores at T=1, the trainer at T={engine_t:g}"
    return [
        Finding(
            "sampler/temperature",
            0.7 + 0.25 * min(1.0, abs(slope - 1) / 0.3),
            f"TEMPERATURE_MISMATCH: {fitted} (R^2 {fit:.3f})",
            {"temperature_ratio": slope, "r_squared": fit},
            c.worst(3),
        )
    ]


def _lean(d: Array) -> float:
    """Sum of the negative over sum of the positive differences."""
    return float(-d[d < 0].sum() / max(float(d[d > 0].sum()), 1e-9))


def _penalty(c: Context) -> list[Finding]:
    """The engine pushes repeated tokens down, so new ones go up: d leans down on new tokens, not on repeated ones.

    Over the engine's samples the mean ratio of repeated tokens is then above 1 and that of new ones below.
    """
    ids = c.table.columns.get("token_id")
    if ids is None or len(c.rows) < 300 or c.size.mean() < 0.03:
        return []
    pair = c.sequence.astype(np.int64) * (int(ids.max()) + 1) + ids
    _, first = np.unique(pair, return_index=True)
    repeated = np.ones(len(ids), dtype=bool)
    repeated[first] = False
    again = repeated[c.rows]
    if again.sum() < 50 or (~again).sum() < 50:
        return []
    old, new = c.d[again], c.d[~again]
    lean_old, lean_new = _lean(old), _lean(new)
    ratio_old, ratio_new = (float(np.exp(np.clip(d, -9, 3)).mean()) for d in (old, new))
    up, down = float((new > 0.1).mean()), float((new < -0.1).mean())
    if lean_new < PENALTY_LEAN or lean_new < PENALTY_CONTRAST * lean_old:
        return []
    if ratio_old < 1.1 or ratio_new > 0.95 or up > 0.3 * down:
        return []
    return [
        Finding(
            "sampler/penalties",
            0.8,
            f"repeated tokens: mean ratio {ratio_old:.2f}; new tokens: mean ratio {ratio_new:.2f}, {down:.0%} below "
            f"-0.1 and {up:.0%} above 0.1",
            {"ratio_repeated": ratio_old, "ratio_new": ratio_new, "lean_new": lean_new, "lean_repeated": lean_old},
            c.worst(3, again),
        )
    ]


def kept_mass(logits_NV: Array, kept: Sequence[Array] | Array, temperature: float = 1.0) -> Array:
    """Return the trainer's probability of each token's kept set, for the table's ``kept_mass`` column.

    Args:
        logits_NV: the trainer's raw logits of N tokens over the vocabulary.
        kept: a bool mask [N, V], or for each token the ids that the engine's sampler kept.
        temperature: the engine's.

    Returns:
        float64 [N], 0..1.

    Raises:
        UsageError: the shapes do not match.
    """
    logits = np.asarray(logits_NV, dtype=np.float64) / temperature
    if logits.ndim != 2 or len(kept) != len(logits):
        raise UsageError(f"kept_mass: {len(kept)} kept sets for logits of shape {logits.shape}")
    mask = (
        np.asarray(kept) if isinstance(kept, np.ndarray) and kept.dtype == bool else np.zeros(logits.shape, dtype=bool)
    )
    if mask.shape != logits.shape:
        raise UsageError(f"kept_mass: a mask of shape {mask.shape} for logits of shape {logits.shape}")
    if not (isinstance(kept, np.ndarray) and kept.dtype == bool):
        for row, ids in enumerate(kept):
            mask[row, np.asarray(ids, dtype=np.int64)] = True
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    result: Array = (weights * mask).sum(axis=1) / weights.sum(axis=1)
    return result


def fit_temperature(
    logits_NV: Array, token_ids: Array, logprob_engine: Array, *, low: float = 0.1, high: float = 3.0
) -> tuple[float, float]:
    """Fit the temperature at which the trainer's logits give the engine's log-probs.

    Args:
        logits_NV: the trainer's raw logits of N tokens over the vocabulary.
        token_ids: sampled ids [N].
        logprob_engine: what the engine recorded [N], nats.
        low, high: range that is searched.

    Returns:
        (temperature, mean abs(d) at it, in nats).

    Raises:
        UsageError: the shapes do not match.
    """
    logits = np.asarray(logits_NV, dtype=np.float64)
    ids = np.asarray(token_ids).astype(np.int64)
    target = np.asarray(logprob_engine, dtype=np.float64)
    if logits.ndim != 2 or ids.shape != (len(logits),) or target.shape != ids.shape:
        raise UsageError(f"fit_temperature: shapes do not match: {logits.shape}, {ids.shape}, {target.shape}")

    def gap(temperature: float) -> float:
        scaled = logits / temperature
        top = scaled.max(axis=1, keepdims=True)
        lse = top[:, 0] + np.log(np.exp(scaled - top).sum(axis=1))
        return float(np.abs(scaled[np.arange(len(ids)), ids] - lse - target).mean())

    grid = np.exp(np.linspace(math.log(low), math.log(high), 41))
    best = int(np.argmin([gap(float(t)) for t in grid]))
    a, b = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, len(grid) - 1)])
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(40):
        left, right = b - golden * (b - a), a + golden * (b - a)
        if gap(left) < gap(right):
            b = right
        else:
            a = left
    found = (a + b) / 2
    return found, gap(found)
