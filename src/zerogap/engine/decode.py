"""Decode steps from a fixed set of captured ones: no Python between their kernels, one transfer in and one out.

A step in which every sequence has one row is padded to the next captured number of rows and width of block table, and
replayed. By the row law padding changes no bit, so a replayed step draws what the eager one would. Padding rows write
to a page that belongs to nobody and attend to their own key there.

What is captured reads no value on the host. So the sampler is left out, and runs eagerly over the captured forward's
hidden rows, where some row asks for the most probable tokens (``logprobs``) or has ids that it may not draw now
(``min_tokens``). Steps with prompts' chunks or with hooks are eager altogether.
"""

from __future__ import annotations

from collections.abc import Sequence as Listed
from typing import Literal, NamedTuple

import numpy as np
import torch

from zerogap import ops
from zerogap.engine.capture import Body, Capture, Field, Staging, block_bytes, views
from zerogap.engine.params import suppressed_ids
from zerogap.engine.sampler import Draws, draw_next, sampler_rows
from zerogap.engine.scheduler import Chunk
from zerogap.engine.sequence import Sequence
from zerogap.models.decoder import Decoder
from zerogap.models.rows import PagedCache, Rows
from zerogap.ops import backend
from zerogap.ops.plan import DecodeTensors

_NARROWEST = 16  # pages of the narrowest block table
_STEP = 16  # rows between captured numbers of rows, from 16 on

SamplerKind = Literal["eager", "plain", "filtered"]


class Size(NamedTuple):
    """What a captured step is made for: rows, pages of a row, and how it samples."""

    rows: int
    width: int
    sampler: SamplerKind


def row_ladder(most: int) -> tuple[int, ...]:
    """Return the numbers of rows that steps are captured for: 1, 2, 4, 8, then multiples of 16, to hold ``most``."""
    small = [rows for rows in (1, 2, 4, 8) if rows < most]
    return (*small, *range(_STEP, most + _STEP, _STEP)) if most > 8 else (*small, most)


def width_ladder(most: int) -> tuple[int, ...]:
    """Return the widths of block tables that steps are captured for: doubling from 16 pages, to hold ``most``."""
    widths = [_NARROWEST]
    while widths[-1] < most:
        widths.append(2 * widths[-1])
    return (*widths[:-1], max(1, most))


def decode_fields(rows: int, width: int) -> tuple[Field, ...]:
    """Return what a step needs to know, row by row."""
    return (
        Field("key_R5", (rows, 5), torch.int64),
        Field("slot_R", (rows,), torch.int64),
        Field("top_k_R", (rows,), torch.int64),
        Field("temperature_R", (rows,), torch.float64),
        Field("top_p_R", (rows,), torch.float64),
        Field("min_p_R", (rows,), torch.float64),
        Field("token_R", (rows,), torch.int32),
        Field("position_R", (rows,), torch.int32),
        Field("length_R", (rows,), torch.int32),
        Field("tile_R4", (rows, 4), torch.int32),
        Field("table_RW", (rows, width), torch.int32),
    )


def decode_bytes(max_sequences: int, positions: int, page_size: int) -> int:
    """Return the bytes of a step's inputs at most.

    Args:
        max_sequences: running sequences at most.
        positions: of the longest sequence.
        page_size: positions per page.
    """
    return block_bytes(decode_fields(row_ladder(max_sequences)[-1], -(-positions // page_size)))


def fill_rows(host: dict[str, np.ndarray], sequences: Listed[Sequence], page_size: int, padding_page: int) -> None:
    """Write the next row of each sequence, and padding, into a step's inputs; block tables apart.

    Args:
        host: a step's fields.
        sequences: as many as there are rows at most.
        page_size: positions per page.
        padding_page: a page that belongs to no sequence.
    """
    count = len(sequences)
    position_R = np.array([len(sequence.tokens) - 1 for sequence in sequences], dtype=np.int64)
    page_R = np.array(
        [sequence.block_table[(len(sequence.tokens) - 1) // page_size] for sequence in sequences], dtype=np.int64
    )
    params = [sequence.params for sequence in sequences]
    rows = {
        "key_R5": [(p.seed, *s.key, len(s.tokens)) for s, p in zip(sequences, params, strict=True)],
        "slot_R": page_R * page_size + position_R % page_size,
        "top_k_R": [p.top_k for p in params],
        "temperature_R": [p.temperature for p in params],
        "top_p_R": [p.top_p for p in params],
        "min_p_R": [p.min_p for p in params],
        "token_R": [sequence.tokens[-1] for sequence in sequences],
        "position_R": position_R,
        "length_R": position_R + 1,
    }
    padding = {"slot_R": padding_page * page_size, "temperature_R": 1.0, "top_p_R": 1.0, "length_R": 1}
    for name, values in rows.items():
        host[name][:count] = values
        host[name][count:] = padding.get(name, 0)
    order = np.argsort(-host["position_R"], kind="stable")  # the longest walks first
    host["tile_R4"][:, 0] = host["tile_R4"][:, 3] = order
    host["tile_R4"][:, 1] = host["position_R"][order]
    host["tile_R4"][:, 2] = 1


class DecodeSteps:
    """Captures decode steps as they come up and replays them.

    Args:
        decoder: the engine's.
        cache: the engine's; its last page is nobody's and takes what padding writes.
        max_sequences: rows at most.
        positions: of the longest sequence.
        capture: how a step is captured.
    """

    def __init__(self, decoder: Decoder, cache: PagedCache, max_sequences: int, positions: int, capture: Capture):
        device = decoder.device
        self._decoder, self._cache, self._capture = decoder, cache, capture
        self._ops = backend.on(device, decoder.dtype)
        self._padding_page = cache.num_pages - 1
        self._rows = row_ladder(max_sequences)
        self._widths = width_ladder(-(-positions // cache.page_size))
        self._inputs = Staging(block_bytes(decode_fields(self._rows[-1], self._widths[-1])), device)
        self._outputs = Staging(block_bytes(_drawn_fields(self._rows[-1])), device)
        self._hidden_RK = torch.zeros(self._rows[-1], decoder.config.hidden_size, dtype=decoder.dtype, device=device)
        self._angles = decoder.angle_tables(positions)
        self._replays: dict[Size, Body] = {}
        self._held = self._addresses()
        self._layout: tuple[int, int] | None = None
        self._tables: list[tuple[list[int], int]] = []

    @property
    def captured(self) -> int:
        """How many steps are captured now."""
        return len(self._replays)

    @staticmethod
    def takes(chunks: list[Chunk]) -> bool:
        """Return whether a step can be a captured one: each sequence has one row and draws its next token."""
        return all(chunk.count == 1 and chunk.samples for chunk in chunks)

    def run(self, sequences: list[Sequence]) -> Draws:
        """Compute the last token's row of each sequence and draw the next token."""
        count, size = len(sequences), self._size(sequences)
        self._write(sequences, size)
        self._inputs.upload(block_bytes(decode_fields(size.rows, size.width)))
        replay = self._replays.get(size)
        if replay is None:
            replay = self._replays[size] = self._capture(self.body(size))
        replay()
        if size.sampler == "eager":
            return draw_next(self._decoder, self._hidden_RK[:count], sequences, sampler_rows(sequences))
        fields = _drawn_fields(size.rows)
        self._outputs.download(block_bytes(fields))
        drawn = views(self._outputs.host, fields)
        return Draws(drawn["token_R"][:count].tolist(), drawn["logprob_R"][:count].tolist(), [None] * count)

    def weights_changed(self) -> None:
        """Forget captured steps if a weight lies elsewhere now: they would read where it was."""
        if self._addresses() != self._held:
            self._replays.clear()
            self._held = self._addresses()

    def _addresses(self) -> list[int]:
        return [weight.data_ptr() for weight in self._decoder.parameters()]

    def _size(self, sequences: list[Sequence]) -> Size:
        pages = -(-max(len(sequence.tokens) for sequence in sequences) // self._cache.page_size)
        rows = next(rows for rows in self._rows if rows >= len(sequences))
        return Size(rows, next(width for width in self._widths if width >= pages), sampler_kind(sequences))

    def _write(self, sequences: list[Sequence], size: Size) -> None:
        """Write a step's inputs; a row whose sequence has the same pages as in the step before has them already."""
        layout, page_size = (size.rows, size.width), self._cache.page_size
        fields = views(self._inputs.host, decode_fields(*layout))
        host = {name: tensor.numpy() for name, tensor in fields.items()}
        fill_rows(host, sequences, page_size, self._padding_page)
        held = self._tables if self._layout == layout else []
        now = [(sequence.block_table, len(sequence.block_table)) for sequence in sequences]
        table_RW = host["table_RW"]
        for row, (pages, count) in enumerate(now):
            if row < len(held) and held[row][0] is pages and held[row][1] == count:
                continue
            table_RW[row, :count] = pages
            table_RW[row, count:] = self._padding_page
        table_RW[len(sequences) :] = self._padding_page
        self._layout, self._tables = layout, now

    def body(self, size: Size) -> Body:
        """Return the function that computes a step from the inputs on the device, and leaves its results there."""
        given = views(self._inputs.device, decode_fields(size.rows, size.width))
        drawn = views(self._outputs.device, _drawn_fields(size.rows))
        position_R, hidden_RK = given["position_R"], self._hidden_RK[: size.rows]
        settings = ops.SamplerRows(
            given["temperature_R"],
            given["top_k_R"],
            given["top_p_R"],
            given["min_p_R"],
            filters=size.sampler == "filtered",
        )

        def body() -> None:
            plan = self._ops.decode_plan(
                DecodeTensors(position_R, given["length_R"], given["table_RW"], given["tile_R4"], self._cache.page_size)
            )
            rows = Rows(given["token_R"], position_R, given["slot_R"], plan)
            cos_RD, sin_RD = (table.index_select(0, position_R) for table in self._angles)
            found_RK = self._decoder.hidden_on_device(rows, (cos_RD, sin_RD), self._cache)
            if size.sampler == "eager":
                hidden_RK.copy_(found_RK)
                return
            uniform_R = self._ops.uniform_rows(given["key_R5"])
            sampled = ops.sample(found_RK, self._decoder.lm_head_weight, settings, uniform_R)
            drawn["token_R"].copy_(sampled.token_R)
            drawn["logprob_R"].copy_(sampled.logprob_R)

        return body


def sampler_kind(sequences: list[Sequence]) -> SamplerKind:
    """Return how the next tokens can be drawn: within the captured step, with or without kept sets, or after it."""
    params = [sequence.params for sequence in sequences]
    if any(p.logprobs for p in params) or any(suppressed_ids(s.params, s.generated) for s in sequences):
        return "eager"
    filtered = any(p.temperature > 0 and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0) for p in params)
    return "filtered" if filtered else "plain"


def _drawn_fields(rows: int) -> tuple[Field, ...]:
    return Field("token_R", (rows,), torch.int32), Field("logprob_R", (rows,), torch.float32)
