"""What log-probs stand for, fitted from lists of the most likely tokens: temperature, kept mass, penalties, grid.

Every function compares two lists for the same context, one under neutral settings (``plain``) and one under the
settings in question (``other``), token by token. Differences between tokens of one list do not hold the unknown
log-sum-exp, so they need no full vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from zerogap.probe.ask import Token

Top = Mapping[Token, float | None]
EQUAL = 0.03  # nats; above the noise of bf16 log-probs near -8, below the shift of any kept mass under 0.95
FLOOR = -1e3  # what engines write for a token that cannot be sampled is at or below this, or missing


def best(top: Top, count: int) -> dict[Token, float | None]:
    """Return the ``count`` most likely entries: engines add the sampled token to a list that does not hold it."""
    known = [(value, token) for token, value in top.items() if value is not None and not math.isnan(value)]
    known.sort(key=lambda entry: -entry[0])
    return {token: value for value, token in known[:count]}


def finite_pairs(plain: Top, other: Top) -> tuple[np.ndarray, np.ndarray]:
    """Return float64 arrays (plain, other) of the tokens that both lists give a finite log-prob."""
    pairs = [
        (one, two)
        for token, one in plain.items()
        if one is not None and (two := other.get(token)) is not None
        if math.isfinite(one) and math.isfinite(two) and one > FLOOR and two > FLOOR
    ]
    table = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def temperature(lists: Sequence[tuple[Top, Top]]) -> float | None:
    """Return the T for which ``other`` is ``plain / T`` up to a constant per list; None when nothing varies.

    ``log p_T(i) - log p_T(j) = (log p(i) - log p(j)) / T`` whatever the normaliser, so the slope is 1/T.
    """
    top, bottom = 0.0, 0.0
    for plain, other in lists:
        x, y = finite_pairs(plain, other)
        if len(x) < 3:
            continue
        x, y = x - x.mean(), y - y.mean()
        top, bottom = top + float(x @ x), bottom + float(x @ y)
    return top / bottom if top > 1e-3 and bottom > 1e-6 else None


@dataclass(frozen=True)
class Truncation:
    """What a truncating setting did to a list.

    Attributes:
        form: "raw" (nothing), "renormalised" (shifted by -log of the kept mass, the rest gone), "masked" (the rest
            gone, no shift) or "unclear".
        kept_mass: exp(-shift) when renormalised; the mass of what is left when masked; 1 when raw.
        kept: how many tokens are left.
        spread: largest deviation of a token's shift from the common one, in nats.
    """

    form: str
    kept_mass: float
    kept: int
    spread: float


def truncation(plain: Top, other: Top) -> Truncation:
    """Compare the lists without and with truncation, at the same temperature."""
    alive = [token for token, value in plain.items() if value is not None and value > FLOOR]
    if len(alive) > 3:  # the last of a list may fall off it by a tie
        last = min(alive, key=lambda token: plain[token] or 0.0)
        alive.remove(last)
    left = [token for token in alive if (value := other.get(token)) is not None and value > FLOOR]
    x, y = finite_pairs(plain, other)
    if not len(x):
        return Truncation("unclear", float("nan"), 0, float("nan"))
    shift = y - x
    middle = float(np.median(shift))
    spread = float(np.abs(shift - middle).max())
    gone = len(left) < len(alive)
    mass = float(sum(math.exp(plain[token] or 0.0) for token in left))
    if spread > EQUAL:
        return Truncation("unclear", float("nan"), len(left), spread)
    if abs(middle) <= EQUAL:
        return Truncation("masked" if gone else "raw", mass if gone else 1.0, len(left), spread)
    if middle > 0:
        return Truncation("renormalised", math.exp(-middle), len(left), spread)
    return Truncation("unclear", float("nan"), len(left), spread)


@dataclass(frozen=True)
class Penalty:
    """What a penalty did to the tokens that were there before.

    Attributes:
        form: "none", "additive" (a frequency or presence penalty) or "repetition" (logits divided or multiplied).
        value: nats of an additive one, the factor of a repetition penalty; 0 and 1 when there is none.
        error: root mean square residual in nats.
        tokens: how many penalised tokens the fit rests on.
    """

    form: str
    value: float
    error: float
    tokens: int


def penalty(lists: Sequence[tuple[Top, Top, frozenset[Token]]]) -> Penalty:
    """Fit what happened to the ``seen`` tokens of each (plain, other, seen) against the other tokens of its list.

    Logits are log-probs plus an unknown constant c per list. A repetition penalty r turns a logit l > 0 into l / r and
    l < 0 into l * r, so the change of a seen token is linear in its log-prob with slope 1/r - 1 (or r - 1): unknown are
    r and one c per list. An additive penalty changes all seen tokens by the same amount.
    """
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    for plain, other, seen in lists:
        part = _moved(plain, other, seen)
        if part is not None:
            parts.append(part)
    if not parts:
        return Penalty("unclear", float("nan"), float("nan"), 0)
    every = np.concatenate([moved for _, moved in parts])
    if np.abs(every).max() <= EQUAL:
        return Penalty("none", 0.0, float(np.abs(every).max()), len(every))
    mean = float(every.mean())
    additive = float(np.sqrt(np.mean((every - mean) ** 2)))
    if len(every) == 1 or additive <= EQUAL / 3:
        return Penalty("additive", -mean, additive, len(every))
    if len(every) < len(parts) + 2:
        return Penalty("unclear", -mean, additive, len(every))
    factor, error = _repetition(parts)
    return Penalty("repetition", factor, error, len(every))


def _moved(plain: Top, other: Top, seen: frozenset[Token]) -> tuple[np.ndarray, np.ndarray] | None:
    """Return (log-probs, changes against the unseen tokens) of the seen tokens of one list."""
    old, new, marked = [], [], []
    for token, value in plain.items():
        changed = other.get(token)
        if value is None or changed is None or min(value, changed) <= FLOOR or not math.isfinite(value + changed):
            continue
        old.append(value)
        new.append(changed)
        marked.append(token in seen)
    x, y, hit = np.array(old), np.array(new), np.array(marked, dtype=bool)
    if not hit.any() or hit.all():
        return None
    change = y - x
    return x[hit], change[hit] - float(np.median(change[~hit]))


def _repetition(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[float, float]:
    """Return (r, root mean square error) of the best repetition penalty over r and the constant of each list."""
    factors = np.concatenate([np.linspace(0.5, 0.99, 99), np.linspace(1.01, 2.5, 299)])
    spans = [(0.0, 60.0)] * len(parts)
    count = sum(len(moved) for _, moved in parts)
    best, total = 1.0, np.inf
    for _ in range(6):
        square = np.zeros(len(factors))
        chosen = []
        for (logprob, moved), (low, high) in zip(parts, spans, strict=True):
            constants = np.linspace(low, high, 301)
            logit = logprob[None, None, :] + constants[None, :, None]
            factor = factors[:, None, None]
            model = np.where(logit > 0, logit / factor, logit * factor) - logit
            error = ((model - moved) ** 2).sum(axis=2)
            square += error.min(axis=1)
            chosen.append((constants, error.argmin(axis=1)))
        row = int(np.argmin(square))
        best, total = float(factors[row]), float(square[row])
        width = abs(factors[1] - factors[0]) * 2
        factors = np.linspace(best - width, best + width, 41)
        spans = []
        for constants, at in chosen:
            reach = (constants[1] - constants[0]) * 4
            spans.append((constants[at[row]] - reach, constants[at[row]] + reach))
    return best, math.sqrt(total / count)


def grid(values: Sequence[float]) -> str:
    """Return the coarsest grid that log-probs lie on: "bf16", "fp16", "decimals:N" (printed so) or "float32 or finer".

    At least 16 distinct non-zero values are needed for a name; with fewer the answer is "too few".
    """
    distinct = np.unique(np.array([value for value in values if value and math.isfinite(value)], dtype=np.float64))
    if len(distinct) < 16:
        return "too few"
    words = distinct.astype(np.float32)
    close = np.abs(words.astype(np.float64) - distinct) <= np.abs(distinct) * 2.0**-23
    bits = words.view(np.uint32)
    if close.all() and not (bits & 0xFFFF).any():
        return "bf16"
    with np.errstate(over="ignore"):
        halves = distinct.astype(np.float16).astype(np.float64)
    if (np.abs(halves - distinct) <= np.abs(distinct) * 2.0**-23).all():
        return "fp16"
    for decimals in range(1, 5):
        if np.abs(np.round(distinct, decimals) - distinct).max() < 1e-9:
            return f"decimals:{decimals}"
    return "float32 or finer"


def kept_by_top_p(plain: Top, top_p: float) -> float:
    """Return the mass of the smallest set of most likely tokens that reaches ``top_p``."""
    total = 0.0
    for mass in masses(plain):
        total += mass
        if total >= top_p:
            break
    return total


def masses(plain: Top) -> list[float]:
    """Return the probabilities of a list, most likely first."""
    return sorted((math.exp(v) for v in plain.values() if v is not None and math.isfinite(v)), reverse=True)
