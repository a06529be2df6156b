"""Diagnoses of rounding: grids, log-softmax, the trainer against itself, hosts, routes, caches and batches."""

from __future__ import annotations

import numpy as np

from zerogap.gap.diagnoses.base import Finding
from zerogap.gap.diagnoses.context import Context
from zerogap.gap.diagnoses.statistics import rank_sum_z
from zerogap.gap.table import Array

GRID_SHARE = 0.98
CACHE_RATIO = 3.0
ELEVATED = 0.08  # mean abs(d) beyond any healthy unquantised numerics in the field
ELEVATED_FACTOR = 3.0  # over a noise floor that the person states


def diagnose_numerics(c: Context) -> list[Finding]:
    """Return what the size and grid of the differences say."""
    found = [*_second_pass(c), *_grid(c), *_cache(c), *_shared_prefix(c), *_retracted(c), *_hosts(c), *_staleness(c),
             *_duplicates(c)]  # fmt: skip
    found += _tail(c)
    return found


def _second_pass(c: Context) -> list[Finding]:
    second = c.column("logprob_trainer_second")
    if second is None:
        return []
    gap = np.abs(second.astype(np.float64) - c.trainer)
    gap = gap[np.isfinite(gap)]
    if not len(gap) or not gap.any():
        return []
    return [
        Finding(
            "numerics/trainer-not-batch-invariant",
            0.95,
            f"TRAINER_NOT_BATCH_INVARIANT: trainer against itself max {gap.max():.3g}, mean {gap.mean():.3g}; "
            f"trainer against engine mean {c.size.mean():.3g}",
            {"max": float(gap.max()), "mean": float(gap.mean()), "engine_mean": float(c.size.mean())},
        )
    ]


def on_bf16_grid(values: Array) -> float:
    """Return the share of float32 values that bf16 holds exactly."""
    words = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return float(((words & np.uint32(0xFFFF)) == 0).mean()) if len(words) else 0.0


def grid_share(values: Array) -> tuple[float, str]:
    """Share on the bf16 grid, also for values printed with few digits (-0.1406 for -0.140625)."""
    exact = on_bf16_grid(values)
    if exact >= GRID_SHARE or len(values) < 2:
        return exact, "exact"
    from_text = values.astype(np.float64)
    steps = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(from_text), 1e-30))) - 7)
    off = np.abs(from_text / steps - np.round(from_text / steps)) * steps
    printed = float((off <= 5.1e-5).mean())
    chance = float(np.minimum(2 * 5.1e-5 / steps, 1.0).mean())
    return (printed, "printed") if chance < 0.4 else (0.0, "")


def _grid(c: Context) -> list[Finding]:
    engine = c.table.columns["logprob_engine"][c.rows]
    trainer = c.table.columns["logprob_trainer"][c.rows]
    shares: dict[str, tuple[float, str]] = {}
    for side, values in (("engine", engine), ("trainer", trainer)):
        real = values[np.abs(values) > 1e-3]
        shares[side] = grid_share(real) if len(real) >= 4 else (0.0, "")
    on = [side for side, (share, _) in shares.items() if share >= GRID_SHARE]
    if len(on) != 1:
        return []
    side = on[0]
    other = "trainer" if side == "engine" else "engine"
    return [
        Finding(
            "numerics/bf16-logits",
            0.95 if shares[side][1] == "exact" and len(engine) > 20 else 0.7,
            f"LOGITS_BF16 side={side}: {shares[side][0]:.0%} of its log-probs lie on the bf16 grid, "
            f"{shares[other][0]:.0%} of the {other}'s",
            {"side": side, "share": shares[side][0], "other_share": shares[other][0]},
        )
    ]


def _split(c: Context, high: Array, low: Array) -> tuple[float, float]:
    return float(c.size[low].mean()), float(c.size[high].mean())


def _cache(c: Context) -> list[Finding]:
    cached = c.column("cached_tokens")
    if cached is None or not (cached > 0).any():
        return []
    hit = cached > 0
    if not (~hit).any():
        # All hit: compare the upper with the lower half.
        middle = np.median(cached)
        hit = cached > middle
        if not hit.any() or not (~hit).any():
            return []
    without, with_hits = _split(c, hit, ~hit)
    counts, means = c.sequence_means
    sequences = np.unique(c.in_sequence[hit])
    cold = np.unique(c.in_sequence[~hit])
    plain = with_hits >= CACHE_RATIO * max(without, 1e-9) and with_hits >= 0.02
    # Weak leaks touch few tokens, the first ones after the cached prompt: compare sequences by rank.
    if not plain and not _clearly_larger(means[sequences], means[cold], counts[sequences], counts[cold]):
        return []
    return [
        Finding(
            "stale-state/prefix-cache",
            0.9,
            f"mean abs(d) {without:.4g} without cached tokens, {with_hits:.4g} with (up to {int(cached.max())} cached)",
            {"without": without, "with": with_hits, "max_cached": int(cached.max())},
            c.worst(3, hit),
        )
    ]


def _clearly_larger(a: Array, b: Array, count_a: Array, count_b: Array) -> bool:
    """Whether means in ``a`` are larger than in ``b`` by rank and by a factor: about 5 standard errors and 1.5 "
    "times."""
    a, b = a[count_a > 0], b[count_b > 0]
    if len(a) < 8 or len(b) < 8:
        return False
    return rank_sum_z(a, b) > 4.0 and bool(np.median(a) > 1.5 * np.median(b))


def _shared_prefix(c: Context) -> list[Finding]:
    shared = c.column("batch_shared_prefix")
    if shared is None or not (shared > 0).any() or not (shared == 0).any():
        return []
    alone, together = _split(c, shared > 0, shared == 0)
    if together < CACHE_RATIO * max(alone, 1e-9) or together < 0.02:
        return []
    return [
        Finding(
            "numerics/cascade-attention",
            0.85,
            f"CASCADE_ATTENTION suspected: mean abs(d) {together:.4g} where the batch shares a prefix, {alone:.4g} "
            "elsewhere",
            {"shared": together, "alone": alone},
            c.worst(3, shared > 0),
        )
    ]


def _retracted(c: Context) -> list[Finding]:
    at = c.column("retracted_at")
    if at is None or not (at > 0).any():
        return []
    before, after = (at > 0) & (c.position < at), (at > 0) & (c.position >= at)
    if not before.any() or not after.any():
        return []
    low, high = _split(c, before, after)
    if high < CACHE_RATIO * max(low, 1e-9) or high < 0.02:
        return []
    return [
        Finding(
            "numerics/retract-routes",
            0.9,
            f"RETRACT_ROUTE_MISPAIR: mean abs(d) {high:.4g} before the retraction, {low:.4g} after",
            {"before": high, "after": low, "requests": len(np.unique(c.in_sequence[at > 0]))},
            c.worst(3, before),
        )
    ]


def _hosts(c: Context) -> list[Finding]:
    hosts = c.table.columns.get("host")
    if hosts is None:
        return []
    here = hosts[c.rows].astype(str)
    names, group = np.unique(here, return_inverse=True)
    if len(names) < 2:
        return []
    means = np.bincount(group, weights=c.size) / np.bincount(group)
    worst, best = int(np.argmax(means)), int(np.argmin(means))
    if means[worst] < 2.0 * means[best] or np.bincount(group).min() < 30:
        return []
    listed = ", ".join(f"{n} {m:.4g}" for n, m in zip(names, means, strict=True))
    return [
        Finding(
            "numerics/hosts-differ",
            0.8,
            f"mean abs(d) by host: {listed}",
            {str(n): float(m) for n, m in zip(names, means, strict=True)},
            c.worst(2, group == worst),
        )
    ]


def _staleness(c: Context) -> list[Finding]:
    if not c.table.has("version_engine", "version_trainer"):
        return []
    stale = (c.table.columns["version_trainer"] - c.table.columns["version_engine"])[c.rows]
    if not (stale != 0).any() or not (stale == 0).any():
        return []
    fresh, old = _split(c, stale != 0, stale == 0)
    if old < 1.5 * fresh:
        return []
    return [
        Finding(
            "stale-state/stale-tokens",
            0.85,
            f"mean abs(d) {fresh:.4g} at staleness 0, {old:.4g} at staleness up to {int(np.abs(stale).max())}",
            {"fresh": fresh, "stale": old},
        )
    ]


def _duplicates(c: Context) -> list[Finding]:
    """The same tokens scored more than once by one side with different results."""
    if not c.table.has("batch", "token_id", "sample"):
        return []
    ids = c.table.columns["token_id"][c.rows]
    key = np.unique(np.stack([c.table.codes("sample")[c.rows], c.position, ids]), axis=1, return_inverse=True)[
        1
    ].ravel()
    batch = c.table.columns["batch"][c.rows]
    order = np.lexsort((batch, key))
    same = (key[order][1:] == key[order][:-1]) & (batch[order][1:] != batch[order][:-1])
    if not same.any():
        return []
    for side, values in (("engine", c.engine), ("trainer", c.trainer)):
        change = np.abs(np.diff(values[order]))[same]
        if change.any():
            return [
                Finding(
                    "numerics/batch-variance",
                    0.95,
                    f"{side}: {float((change > 0).mean()):.0%} of {len(change)} tokens scored again in another batch "
                    f"differ (max {change.max():.3g})",
                    {"side": side, "max": float(change.max()), "share": float((change > 0).mean())},
                )
            ]
    return []


def _tail(c: Context) -> list[Finding]:
    """Most of the gap on improbable tokens, as rounding gives; said so that it is not taken for a fault."""
    if len(c.size) < 3:
        return []
    klass = np.searchsorted(np.log([0.1, 0.9]), c.engine)
    means = [float(c.size[klass == k].mean()) if (klass == k).any() else None for k in range(3)]
    low, middle, high = means
    if low is None or high is None or low < 0.1 or low < 10 * max(high, 1e-9):
        return []
    if middle is not None and middle > 0.1:
        return []
    return [
        Finding(
            "numerics/low-prob-tail",
            0.8,
            f"LOW_PROB_TAIL dominated: p>0.9 {high:.3g}, 0.1-0.9 {middle if middle is not None else float('nan'):.3g}, "
            f"<0.1 {low:.3g}; not a config error",
            {"over_0.9": high, "0.1_to_0.9": middle, "under_0.1": low},
        )
    ]


def diagnose_elevated(c: Context, explained: bool) -> list[Finding]:
    """A gap above numerics on all tokens alike, when nothing more specific was found."""
    if explained or len(c.size) < 20:
        return []
    mean = float(c.size.mean())
    limit = ELEVATED if c.floor is None else max(ELEVATED_FACTOR * c.floor, 1e-9)
    if mean <= limit:
        return []
    median = float(np.median(c.size))
    if mean >= 3.0:
        return [
            Finding("weights-differ/layout", 0.7, f"mean abs(d) {mean:.4g} on all tokens", {"mean": mean}, c.worst(3))
        ]
    return [
        Finding(
            "weights-differ/elevated",
            0.6,
            f"mean abs(d) {mean:.4g}, median {median:.4g}: above "
            + (f"{ELEVATED_FACTOR:g} times the stated noise floor {c.floor:g}" if c.floor else f"{limit:g}, the most "
               "that unquantised numerics give")
            + ", without a pattern in sign, position or sequence",
            {"mean": mean, "median": median, "limit": limit},
            c.worst(3),
        )
    ]  # fmt: skip
