"""A small language model in numpy, for the test server: real distributions that depend on the whole context.

The state is a decaying mean of token embeddings; a two-layer network turns it into logits over 256 bytes, 256 byte
pairs and an end token. A token that was seen lately becomes likelier, so repetition is natural. Each row is computed
alone, in float64, so the model itself is exact under any batching.
"""

from __future__ import annotations

import numpy as np

_LETTERS = b"etaoinshrdlu cmf"
VOCAB = 256 + len(_LETTERS) ** 2 + 1
EOS = VOCAB - 1
_HIDDEN = 24
_PRINTABLE = np.array([32 <= t < 127 for t in range(256)] + [True] * (VOCAB - 256))


def encode(text: str) -> list[int]:
    """Return the canonical ids of ``text``: pairs before bytes, from the left."""
    data, ids, at = text.encode("utf-8", "replace"), [], 0
    index = {bytes((a, b)): 256 + n for n, (a, b) in enumerate((p // 256, p % 256) for p in _pair_codes())}
    while at < len(data):
        pair = data[at : at + 2]
        if pair in index:
            ids.append(index[pair])
            at += 2
        else:
            ids.append(data[at])
            at += 1
    return ids


def _pair_codes() -> list[int]:
    return [a * 256 + b for a in _LETTERS for b in _LETTERS]


def decode(ids: list[int]) -> str:
    """Return the text of ``ids``; the end token has none."""
    codes = _pair_codes()
    data = b"".join(
        bytes((codes[t - 256] // 256, codes[t - 256] % 256)) if t >= 256 else bytes((t,)) for t in ids if t != EOS
    )
    return data.decode("utf-8", "replace")


class TinyModel:
    """Logits for a context, one state at a time."""

    def __init__(self, seed: int = 7) -> None:
        source = np.random.default_rng(seed)
        self.embedding = source.normal(size=(VOCAB, _HIDDEN))
        self.inner = source.normal(size=(_HIDDEN, _HIDDEN)) / np.sqrt(_HIDDEN) * 1.5
        self.outer = source.normal(size=(VOCAB, _HIDDEN)) * 0.8
        self.bias = np.where(_PRINTABLE, 3.0, -6.0)
        self.bias[list(_LETTERS)] += 1.5  # single letters stay likely, so that sampled ids are often not canonical
        self.bias[EOS] = -4.0

    def start(self) -> np.ndarray:
        """Return the state before the first token: the embedding mean, then the recent count of every token."""
        return np.zeros(_HIDDEN + VOCAB)

    def advance(self, state: np.ndarray, token: int) -> np.ndarray:
        """Return the state after one more token."""
        new = state.copy()
        new[:_HIDDEN] = 0.8 * state[:_HIDDEN] + self.embedding[token]
        new[_HIDDEN:] *= 0.9
        new[_HIDDEN + token] += 1.0
        return new

    def logits(self, state: np.ndarray) -> np.ndarray:
        """Return float64 logits [VOCAB]."""
        hidden = np.tanh(self.inner @ np.tanh(0.5 * state[:_HIDDEN]))
        return self.outer @ hidden + self.bias + 1.5 * np.minimum(state[_HIDDEN:], 1.5)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return float64 log-probs."""
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())
