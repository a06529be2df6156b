"""Draws the next token of many sequences from their hidden rows: a pure function of each row and its request."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from zerogap.engine.params import suppressed_ids
from zerogap.engine.sequence import Sequence, TopLogprobs
from zerogap.models.decoder import Decoder
from zerogap.ops import portable as ops

_BLOCK_ELEMENTS = 2**24
"""Logits computed at a time: bounds memory; rows are independent, so the cut has no effect on them."""


class Draws(NamedTuple):
    """Per row: token id, its log-prob (a float32 value), and the most probable tokens if asked for."""

    tokens: list[int]
    logprobs: list[float]
    top_logprobs: list[TopLogprobs | None]


def draw_next(decoder: Decoder, hidden_RK: Tensor, sequences: list[Sequence]) -> Draws:
    """Draw the next token of each sequence from the hidden row of its last token.

    Args:
        decoder: has the LM head.
        hidden_RK: one row per sequence.
        sequences: in row order.
    """
    draws = Draws([], [], [])
    settings = sampler_rows(sequences)
    uniform_R = _uniform(sequences)
    block = max(1, _BLOCK_ELEMENTS // decoder.config.vocab_size)
    for first in range(0, len(sequences), block):
        rows = slice(first, first + block)
        distribution = ops.log_distribution(decoder.logits(hidden_RK[rows]), settings[rows])
        token_R = ops.draw(distribution, uniform_R[rows])
        draws.tokens.extend(token_R.tolist())
        draws.logprobs.extend(distribution.logprobs_of(token_R).tolist())
        counts = [sequence.params.logprobs for sequence in sequences[rows]]
        if any(counts):
            logprob_RV = distribution.logprob_RV
            draws.top_logprobs.extend(
                most_probable(logprob_RV[row], count) if count else None for row, count in enumerate(counts)
            )
        else:
            draws.top_logprobs.extend([None] * len(counts))
    return draws


def sampler_rows(sequences: list[Sequence]) -> ops.SamplerRows:
    """Return the sampler settings of each sequence's next token."""
    params = [sequence.params for sequence in sequences]
    suppressed = tuple(
        (row, ids)
        for row, sequence in enumerate(sequences)
        if sequence.params.min_tokens and (ids := suppressed_ids(sequence.params, sequence.generated))
    )
    return ops.SamplerRows(
        temperature_R=torch.tensor([p.temperature for p in params], dtype=torch.float64),
        top_k_R=torch.tensor([p.top_k for p in params], dtype=torch.int64),
        top_p_R=torch.tensor([p.top_p for p in params], dtype=torch.float64),
        min_p_R=torch.tensor([p.min_p for p in params], dtype=torch.float64),
        suppressed=suppressed,
    )


def most_probable(logprob_V: Tensor, count: int) -> TopLogprobs:
    """Return the ``count`` most probable tokens that can be sampled, highest first, equal ones by lower id."""
    least = logprob_V.topk(min(count, len(logprob_V))).values[-1]
    ids = ((logprob_V >= least) & (logprob_V > -torch.inf)).nonzero()[:, 0]
    values, order = logprob_V[ids].sort(descending=True, stable=True)
    return tuple(zip(ids[order][:count].tolist(), values[:count].tolist(), strict=True))


def _uniform(sequences: list[Sequence]) -> Tensor:
    """Return one uniform number per sequence; it depends on seed, key and position alone."""
    rows_of: dict[int, list[int]] = {}
    for row, sequence in enumerate(sequences):
        rows_of.setdefault(sequence.params.seed, []).append(row)
    uniform_R = torch.empty(len(sequences), dtype=torch.float64)
    for seed, rows in rows_of.items():
        keys = [(*sequences[row].key, len(sequences[row].tokens)) for row in rows]
        uniform_R[rows] = ops.uniform(seed, keys)
    return uniform_R
