"""Draws the next token of many sequences from their hidden rows: a pure function of each row and its request."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from zerogap import ops
from zerogap.engine.params import SamplingParams, suppressed_ids
from zerogap.engine.sequence import Sequence, TopLogprobs
from zerogap.models.decoder import Decoder


class Draws(NamedTuple):
    """Per row: token id, its log-prob (a float32 value), and the most probable tokens if asked for."""

    tokens: list[int]
    logprobs: list[float]
    top_logprobs: list[TopLogprobs | None]


class LastRows:
    """The settings of the last step, which decode steps of the same sequences share."""

    def __init__(self) -> None:
        self._params: list[SamplingParams] = []
        self._rows: ops.SamplerRows | None = None

    def of(self, sequences: list[Sequence]) -> ops.SamplerRows:
        """Return `sampler_rows`, the last ones if all requests have the same settings still."""
        params = [sequence.params for sequence in sequences]
        if self._rows is None or params != self._params or any(p.min_tokens for p in params):
            self._params, self._rows = params, sampler_rows(sequences)
        return self._rows


def draw_next(decoder: Decoder, hidden_RK: Tensor, sequences: list[Sequence], settings: ops.SamplerRows) -> Draws:
    """Draw the next token of each sequence from the hidden row of its last token.

    Args:
        decoder: has the LM head.
        hidden_RK: one row per sequence.
        sequences: in row order.
        settings: of their next tokens.
    """
    counts = [sequence.params.logprobs for sequence in sequences]
    sampled = ops.sample(
        hidden_RK, decoder.lm_head_weight, settings, _uniform(sequences), counts if any(counts) else None
    )
    top = sampled.top or [None] * len(sequences)
    return Draws(*_fetched(sampled.token_R, sampled.logprob_R), top)


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


def _fetched(token_R: Tensor, logprob_R: Tensor) -> tuple[list[int], list[float]]:
    """Return ids and log-probs as Python numbers; from a GPU in one transfer."""
    if token_R.is_cuda:
        both_2R = torch.stack((token_R.to(torch.int32), logprob_R.view(torch.int32))).cpu()
        token_R, logprob_R = both_2R[0], both_2R[1].view(torch.float32)
    return token_R.tolist(), logprob_R.tolist()


def _uniform(sequences: list[Sequence]) -> Tensor:
    """Return one uniform number per sequence; it depends on seed, key and position alone."""
    rows_of: dict[int, list[int]] = {}
    for row, sequence in enumerate(sequences):
        rows_of.setdefault(sequence.params.seed, []).append(row)
    if len(rows_of) == 1:
        return ops.uniform(sequences[0].params.seed, [(*each.key, len(each.tokens)) for each in sequences])
    uniform_R = torch.empty(len(sequences), dtype=torch.float64)
    for seed, rows in rows_of.items():
        keys = [(*sequences[row].key, len(sequences[row].tokens)) for row in rows]
        uniform_R[rows] = ops.uniform(seed, keys)
    return uniform_R
