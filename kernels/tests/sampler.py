"""The sampler kernels with their results as arrays, and a plain float64 account of what they must give."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

import zerogap_kernels as kernels

UNIT = 2.0**42  # masses are whole multiples of 1 / UNIT


@dataclass
class Settings:
    """Sampler settings; a single number stands for every row."""

    temperature: Any = 1.0
    top_k: Any = 0
    top_p: Any = 1.0
    min_p: Any = 0.0
    suppressed: list[list[int]] | None = None
    replay: list[np.ndarray | None] | None = None

    def arrays(self, rows: int) -> list[np.ndarray]:
        """The four per-row arrays in the order of the kernels' arguments."""
        kinds = (
            (self.temperature, np.float64),
            (self.top_k, np.int64),
            (self.top_p, np.float64),
            (self.min_p, np.float64),
        )
        return [np.broadcast_to(np.asarray(value, kind), rows).copy() for value, kind in kinds]

    def keywords(self) -> dict[str, Any]:
        """Suppressed tokens and replayed sets as the kernels take them."""
        if self.suppressed is None:
            return {"replay": self.replay}
        start = np.cumsum([0, *map(len, self.suppressed)]).astype(np.int64)
        ids = np.array([i for row in self.suppressed for i in row], np.int64)
        return {"replay": self.replay, "suppressed_start": start, "suppressed": ids}

    def of(self, rows: slice) -> Settings:
        """The settings of some rows."""
        part = {}
        for name in ("temperature", "top_k", "top_p", "min_p"):
            value = getattr(self, name)
            part[name] = value if np.ndim(value) == 0 else np.asarray(value)[rows]
        cut = {
            name: None if getattr(self, name) is None else getattr(self, name)[rows]
            for name in ("suppressed", "replay")
        }
        return Settings(**part, **cut)


@dataclass
class Result:
    """What a call wrote."""

    logprob: np.ndarray
    entropy: np.ndarray
    kept: np.ndarray
    count: np.ndarray
    token: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    peak: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    total: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))


def vocabulary_of(x: np.ndarray, head: kernels.Packed | None) -> int:
    """Tokens of the LM head, or of the logits."""
    return x.shape[1] if head is None else head.shape[0]


def buffers(rows: int, vocabulary: int) -> tuple[np.ndarray, ...]:
    """Fresh log-probs, entropies, kept sets as bits, and their sizes."""
    bits = np.zeros((rows, -(-vocabulary // 8)), np.uint8)
    return np.empty(rows, np.float32), np.empty(rows, np.float32), bits, np.empty(rows, np.int64)


def sample(
    x: np.ndarray, uniform: np.ndarray, settings: Settings, head: kernels.Packed | None = None, threads: int = 2
) -> Result:
    """Draw from rows of logits, or of hidden values with ``head``."""
    rows, vocabulary = len(x), vocabulary_of(x, head)
    logprob, entropy, bits, count = buffers(rows, vocabulary)
    token = np.empty(rows, np.int64)
    kernels.sample(
        x, head, uniform, *settings.arrays(rows), token, logprob, threads,
        entropy=entropy, kept_bits=bits, kept_count=count, **settings.keywords(),
    )  # fmt: skip
    return Result(logprob, entropy, np.unpackbits(bits, axis=1, count=vocabulary).astype(bool), count, token)


def score(
    x: np.ndarray,
    target: np.ndarray,
    settings: Settings,
    head: kernels.Packed | None = None,
    threads: int = 2,
    kept: bool = True,
) -> Result:
    """Score given tokens."""
    rows, vocabulary = len(x), vocabulary_of(x, head)
    logprob, entropy, bits, count = buffers(rows, vocabulary)
    peak, total = np.empty(rows, np.float32), np.empty(rows, np.float32)
    sets = {"kept_bits": bits, "kept_count": count} if kept else {}
    kernels.token_logprobs(
        x, head, target, *settings.arrays(rows), logprob, threads,
        entropy=entropy, peak=peak, total=total, **sets, **settings.keywords(),
    )  # fmt: skip
    unpacked = np.unpackbits(bits, axis=1, count=vocabulary).astype(bool)
    return Result(logprob, entropy, unpacked, count, peak=peak, total=total)


def scaled(logits: np.ndarray, temperature: float, suppressed: list[int] | None = None) -> np.ndarray:
    """One row of logits as the filters see it."""
    l = logits / np.float32(temperature or 1.0)
    if suppressed:
        l[suppressed] = -np.inf
    return l


def kept_by_sorting(l: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The kept set of one row of scaled logits, bool [V], by sorting all of them."""
    vocabulary = len(l)
    d = (l.max() - l).astype(np.float32)
    weight = np.empty_like(d)
    kernels.exp(-d, weight, 1)
    mass = [int(w * UNIT) for w in weight.astype(np.float64)]
    order = np.lexsort((np.arange(vocabulary), d))
    if 0 < top_k < vocabulary:
        order = order[:top_k]
    kept = np.zeros(vocabulary, bool)
    aim = max(top_p, 0.0) * float(sum(mass[i] for i in order))
    before = 0
    for rank, i in enumerate(order):
        kept[i] = top_p >= 1 or rank == 0 or before < aim
        before += mass[i]
    return kept & (weight >= np.float32(max(min_p, 0.0)))


def distribution(l: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Probabilities of one row in float64, [V]."""
    l = np.where(kept, l.astype(np.float64), -np.inf)
    weight = np.exp(l - l.max())
    return weight / weight.sum()
