"""Diagnoses of inputs that differ: shifts, other tokens, other context, packing, slices, positions, padding."""

from __future__ import annotations

import numpy as np

from zerogap.gap.diagnoses.base import Finding
from zerogap.gap.diagnoses.context import Context
from zerogap.gap.diagnoses.statistics import rank_correlation, rank_sum_z
from zerogap.gap.table import Array

SHIFT_BETTER = 0.5  # gap at the shift / gap at 0
SHIFT_NEEDS = 0.05  # nats at shift 0
SEQUENCE_BAD = 4.0  # mean of a bad sequence / typical sequence
SEQUENCE_NATS = 0.12  # and at least this
POSITION_GROWTH = 2.0  # last / first third of positions, for tokens of equal probability
# A wrong rotary base: nothing to see behind one token, and more with each. Set on runs of seeds 1 and 2, where it gave
# 5.4 to 12 and 0.98 to 1.0, other weights, precisions and temperatures up to 1.6 and 0.81.
FROM_NOTHING_GROWTH = 3.0  # gap behind long contexts against that behind the shortest, for tokens of equal probability
FROM_NOTHING_SHARE = 0.9  # of the sequences grow
SHORT_CONTEXT, LONG_CONTEXT = 1.6, 2.5  # times the shortest context (its 2 % quantile)
CONTEXT_TOKENS = 4  # tokens that open a response
CONTEXT_DECAY = 3.5  # their mean against the last third, for tokens of equal probability
CP_SHARE = 0.7  # of the outliers at slice borders
LEFT_PAD_RANK = 0.7  # rank correlation of padding and gap over sequences
LEFT_PAD_Z = 3.0  # standard errors of the rank sum, padded rows against bare ones


def diagnose_inputs(c: Context) -> list[Finding]:
    """Return what the places of the disagreeing tokens say."""
    shifted = _shift(c)
    if shifted:
        return shifted
    found = [*_retokenised(c), *_cp_boundary(c)]
    if len(c.rows) < 20:
        return [*found, *_left_pad(c)]
    placed = [*_left_pad(c), *_packing(c)]
    if not placed and not found:
        placed = _positions(c) or _from_nothing(c) or _context(c) or _some_sequences(c)
    return found + placed


def shift_gap(c: Context, shift: int) -> tuple[float, int]:
    """Return (mean abs(trainer[t] - engine[t + shift]), pairs) within sequences."""
    a, b = np.arange(len(c.table)), np.arange(len(c.table)) + shift
    inside = (b >= 0) & (b < len(c.table))
    a, b = a[inside], b[inside]
    both = (c.sequence[a] == c.sequence[b]) & c.use[a] & c.use[b]
    a, b = a[both], b[both]
    if not len(a):
        return float("nan"), 0
    trainer = c.table.columns["logprob_trainer"][a].astype(np.float64)
    engine = c.table.columns["logprob_engine"][b].astype(np.float64)
    return float(np.abs(trainer - engine).mean()), len(a)


def _shift(c: Context) -> list[Finding]:
    if len(c.rows) < 3:
        return []
    at_zero = float(c.size.mean())
    if at_zero < SHIFT_NEEDS:
        return []
    gaps = {shift: shift_gap(c, shift) for shift in (-2, -1, 1, 2)}
    usable = {shift: gap for shift, (gap, pairs) in gaps.items() if pairs >= 3}
    if not usable:
        return []
    best = min(usable, key=usable.__getitem__)
    needed = SHIFT_BETTER if gaps[best][1] >= 30 else 0.15
    if usable[best] > needed * at_zero:
        return []
    listed = ", ".join(f"gap@{s:+d}={g:.4g}" for s, g in sorted(usable.items()))
    return [
        Finding(
            "inputs-differ/off-by-one",
            0.95 if usable[best] < 0.2 * at_zero else 0.8,
            f"OFF_BY_ONE shift={best:+d} (gap@0={at_zero:.4g}, {listed})",
            {"shift": best, "gap_at_0": at_zero, "gap_at_shift": usable[best]},
            c.worst(3),
        )
    ]


def _retokenised(c: Context) -> list[Finding]:
    if not c.table.has("engine_token_id", "token_id"):
        return []
    differ = c.table.columns["engine_token_id"] != c.table.columns["token_id"]
    for name in ("engine_token_id", "token_id"):
        if name in c.table.nulls:
            differ &= ~c.table.nulls[name]
    if not differ.any():
        return []
    sequences = np.unique(c.sequence[differ])
    first = int(np.flatnonzero(differ)[0])
    index = first - int(c.starts[c.sequence[first]])
    columns = c.table.columns
    return [
        Finding(
            "inputs-differ/retokenised",
            1.0,
            f"RETOKENIZED at index {index}: ids differ at {int(differ.sum())} tokens of {len(sequences)} sequences",
            {"index": index, "tokens": int(differ.sum()), "sequences": len(sequences)},
            tuple(
                f"row {row}: engine id {columns['engine_token_id'][row]}, trainer id {columns['token_id'][row]}"
                for row in np.flatnonzero(differ)[:3]
            ),
        )
    ]


def _absolute_length(c: Context) -> Array:
    prompt = c.table.get("prompt_length", 0)[c.starts]
    result: Array = prompt + c.lengths
    return result


def _cp_boundary(c: Context) -> list[Finding]:
    """Outliers at the borders of context-parallel slices, which cut a sequence into 2*cp equal chunks."""
    if len(c.size) < 200:
        return []
    typical = float(np.median(c.size))
    outlier = c.size > max(0.5, 30 * typical, 0.1 * float(c.size.max()))
    count = int(outlier.sum())
    if count < 3 or count > 0.06 * len(c.size):
        return []
    total = _absolute_length(c)[c.in_sequence]
    prompt = c.column("prompt_length")
    best: tuple[float, int, bool] = (0.0, 0, False)
    for cp in (2, 4, 8, 16, 32):
        for absolute in (True, False):
            where = c.position + (prompt if absolute and prompt is not None else 0) + 1
            chunk = np.maximum(total // (2 * cp), 1)
            near = np.minimum(where % chunk, chunk - where % chunk) <= 1
            near &= (chunk >= 8) & (where >= chunk - 1) & (where < total - 1)
            share = float(near[outlier].mean())
            chance = float(near.mean())
            # Every slice border of a smaller cp is one of a larger cp: take the smallest that explains them.
            if share >= CP_SHARE and share > 6 * chance and share > best[0] + 0.05:
                best = (share, cp, absolute)
    if not best[1]:
        return []
    rows = np.flatnonzero(outlier)
    where_text = ", ".join(str(int(p)) for p in np.unique(c.position[rows])[:6])
    return [
        Finding(
            "inputs-differ/cp-boundary",
            min(0.95, best[0]),
            f"CP_BOUNDARY_LABEL: {best[0]:.0%} of {count} outliers stand at the borders of {2 * best[1]} chunks "
            f"(cp {best[1]}); worst token positions: {where_text}",
            {"cp": best[1], "share": best[0], "outliers": count},
            c.worst(4),
        )
    ]


def _left_pad(c: Context) -> list[Finding]:
    pads = c.table.columns.get("left_pad")
    if pads is None:
        return []
    counts, means = c.sequence_means
    pad = pads[c.starts].astype(float)
    keep = counts > 0
    if len(np.unique(pad[keep])) < 2:
        return []
    pad, means = pad[keep], means[keep]
    rank = rank_correlation(pad, means)
    bare, padded = pad <= np.quantile(pad, 0.25), pad > np.quantile(pad, 0.25)
    if not padded.any():
        return []
    ratio = float(means[padded].mean() / max(means[bare].mean(), 1e-9))
    few = len(pad) < 8
    apart = rank >= (0.9 if few else LEFT_PAD_RANK) or rank_sum_z(means[padded], means[bare]) > LEFT_PAD_Z
    if ratio < (5.0 if few else 2.5) or not apart or means[padded].mean() < 0.02:
        return []
    return [
        Finding(
            "inputs-differ/left-pad",
            0.9,
            f"diff correlates with left_pad (rank correlation {rank:.2f}): mean {means[bare].mean():.4g} with "
            f"little or "
            f"no padding, {means[padded].mean():.4g} with more",
            {"rank_correlation": rank, "ratio": ratio},
            tuple(f"left_pad {p:g}: mean abs(d) {m:.4g}" for p, m in sorted(zip(pad, means, strict=True))[-3:]),
        )
    ]


def _packing(c: Context) -> list[Finding]:
    rows = c.column("pack_row")
    if rows is None or not (rows > 0).any() or not (rows == 0).any():
        return []
    first, later = float(c.size[rows == 0].mean()), float(c.size[rows > 0].mean())
    if later < 3 * max(first, 1e-9) or later < SHIFT_NEEDS:
        return []
    return [
        Finding(
            "inputs-differ/packing",
            0.95,
            f"mean {first:.4g} in the first sequence of each pack, {later:.4g} in the others",
            {"first": first, "later": later},
            c.worst(3, rows > 0),
        )
    ]


def _adjusted(c: Context) -> Array:
    """abs(d) divided by its mean in the token's probability class, so that easy and hard text compare."""
    edges = np.log([0.1, 0.5, 0.9, 0.99])
    klass = np.searchsorted(edges, c.engine)
    # Means of the quieter half keep a fault from hiding itself in its own norm.
    scale = np.ones(len(edges) + 1)
    for k in range(len(scale)):
        here = c.size[klass == k]
        if len(here):
            scale[k] = max(float(here[here <= np.quantile(here, 0.5)].mean()), 1e-9)
    return np.minimum(c.size / scale[klass], 50.0)


def _thirds(c: Context) -> tuple[float, float, float, int]:
    """Return mean adjusted size in the first, middle and last third of positions, and their span."""
    span = int(c.position.max()) + 1
    edges = np.quantile(c.position, [1 / 3, 2 / 3])
    adjusted = _adjusted(c)
    parts = [adjusted[c.position <= edges[0]], adjusted[(c.position > edges[0]) & (c.position <= edges[1])],
             adjusted[c.position > edges[1]]]  # fmt: skip
    means = [float(p.mean()) if len(p) else float("nan") for p in parts]
    return means[0], means[1], means[2], span


def _positions(c: Context) -> list[Finding]:
    mean = float(c.size.mean())
    if len(c.rows) < 400 or mean < 0.02:
        return []
    first, middle, last, span = _thirds(c)
    if span < 32 or last < POSITION_GROWTH * first or middle < 0.9 * first:
        return []
    third = np.quantile(c.position, [1 / 3, 2 / 3])
    low, high = float(c.size[c.position <= third[0]].mean()), float(c.size[c.position > third[1]].mean())
    return [
        Finding(
            "inputs-differ/positions",
            0.85,
            f"mean abs(d) {low:.4g} in the first third of positions, {high:.4g} in the last ({last / first:.1f} times "
            "for tokens of equal probability)",
            {"first_third": low, "last_third": high, "adjusted_ratio": last / first},
            c.worst(3, c.position > third[1]),
        )
    ]


def _from_nothing(c: Context) -> list[Finding]:
    """Positions that are turned at another rate: one token alone has none, and each further one shows more of it.

    Other weights and precisions differ from the first token on. It shows where texts begin with few tokens; behind long
    prompts the difference is as large at the first token as at the last.
    """
    prompt = c.column("prompt_length")
    mean = float(c.size.mean())
    if prompt is None or len(c.rows) < 400 or mean < 0.02:
        return []
    context = prompt + c.position
    least = float(np.quantile(context, 0.02))
    short, long = context < SHORT_CONTEXT * least, context >= LONG_CONTEXT * least
    klass = np.searchsorted(np.log([0.1, 0.5, 0.9, 0.99]), c.engine)
    scale = np.bincount(klass, weights=c.size) / np.maximum(np.bincount(klass), 1)
    adjusted = np.minimum(c.size / np.maximum(scale[klass], 1e-9), 10.0)
    sequences = len(c.starts)

    def per_sequence(rows: Array) -> tuple[Array, Array]:
        count = np.bincount(c.in_sequence[rows], minlength=sequences)
        total = np.bincount(c.in_sequence[rows], weights=adjusted[rows], minlength=sequences)
        return count, total / np.maximum(count, 1)

    (short_count, early), (long_count, late) = per_sequence(short), per_sequence(long)
    both = (short_count > 0) & (long_count > 0)
    if both.sum() < 16 or short.sum() < 50:
        return []
    growth = float(adjusted[long].mean() / max(adjusted[short].mean(), 1e-9))
    share = float((late > early)[both].mean())
    if growth < FROM_NOTHING_GROWTH or share < FROM_NOTHING_SHARE:
        return []
    low, high = float(c.size[short].mean()), float(c.size[long].mean())
    return [
        Finding(
            "inputs-differ/positions",
            0.85,
            f"mean abs(d) {low:.4g} behind fewer than {SHORT_CONTEXT * least:.0f} tokens, {high:.4g} behind "
            f"{LONG_CONTEXT * least:.0f} or more ({growth:.1f} times for tokens of equal probability, in {share:.0%} "
            "of the sequences): it begins near nothing and grows with the context, as another rotary base does",
            {"short_context": low, "long_context": high, "adjusted_ratio": growth, "growing_share": share},
            c.worst(3, long),
        )
    ]


def _context(c: Context) -> list[Finding]:
    """Another prompt: large from the first token on, fading as the shared response grows."""
    if len(c.rows) < 400 or c.size.mean() < SEQUENCE_NATS:
        return []
    opening = c.position < CONTEXT_TOKENS
    later = c.position >= np.quantile(c.position, 0.66)
    if opening.sum() < 20 or later.sum() < 50:
        return []
    adjusted = _adjusted(c)
    ratio = float(adjusted[opening].mean() / max(adjusted[later].mean(), 1e-9))
    counts, means = c.sequence_means
    everywhere = float((means[counts > 0] > 0.06).mean())
    if ratio < CONTEXT_DECAY or everywhere < 0.7:
        return []
    return [
        Finding(
            "inputs-differ/context",
            0.75,
            f"mean abs(d) {c.size[opening].mean():.4g} in the first {CONTEXT_TOKENS} tokens, "
            f"{c.size[later].mean():.4g} in the last "
            "third: the text before the response differs",
            {"opening": float(c.size[opening].mean()), "later": float(c.size[later].mean()), "adjusted_ratio": ratio},
            c.worst(3, opening),
        )
    ]


def _some_sequences(c: Context) -> list[Finding]:
    # Single huge tokens do not make a sequence bad.
    counts, _ = c.sequence_means
    capped = np.bincount(c.in_sequence, weights=np.minimum(c.size, 1.0), minlength=len(c.starts))
    means = capped / np.maximum(counts, 1)
    enough = counts >= 8
    if enough.sum() < 8:
        return []
    typical = float(np.median(means[enough]))
    quiet = float(np.quantile(means[enough], 0.25))
    bad = enough & (means > max(SEQUENCE_BAD * quiet, SEQUENCE_NATS))
    share = float(bad.sum() / enough.sum())
    if not 0 < share <= 0.8 or bad.sum() < 2:
        return []
    inner = means[enough & ~bad]
    # A gap between the two groups: not the tail of one distribution.
    if float(np.quantile(means[bad], 0.1)) < 2.0 * float(np.quantile(inner, 0.9)):
        return []
    return [
        Finding(
            "inputs-differ/some-sequences",
            0.75,
            f"{int(bad.sum())} of {int(enough.sum())} sequences have mean abs(d) above {means[bad].min():.4g}, "
            f"the others below {inner.max():.4g}",
            {"bad": int(bad.sum()), "sequences": int(enough.sum()), "typical": typical},
            c.worst(3, bad[c.in_sequence]),
        )
    ]
