"""One step of the engine: the forward over a step's chunks, and the draws of those that end with their last token."""

from __future__ import annotations

import torch

from zerogap.engine.capture import Capture, CudaGraphs
from zerogap.engine.decode import DecodeSteps
from zerogap.engine.sampler import Draws, LastRows, draw_next
from zerogap.engine.scheduler import Chunk
from zerogap.engine.trace import sequence_rows
from zerogap.models.decoder import Decoder, Hook
from zerogap.models.rows import PagedCache, Rows


class Forward:
    """Runs steps, captured ones where it can: the bits are the same.

    Args:
        decoder: the engine's.
        num_pages: pages of KV memory.
        page_size: positions per page.
        max_sequences: running sequences at most.
        capture: how decode steps are captured; None: not at all.

    Attributes:
        replayed: steps that were replays.
    """

    def __init__(
        self, decoder: Decoder, num_pages: int, page_size: int, max_sequences: int, capture: Capture | None
    ) -> None:
        self._decoder = decoder
        # Captured steps have a page for their padding.
        pages = num_pages if capture is None else num_pages + 1
        self.cache = PagedCache(decoder.config, pages, page_size, decoder.dtype, decoder.device)
        positions = min(decoder.config.max_positions, num_pages * page_size)
        self.decode = None if capture is None else DecodeSteps(decoder, self.cache, max_sequences, positions, capture)
        self.replayed = 0
        self._settings = LastRows()

    def run(self, chunks: list[Chunk], cleared: tuple[int, ...], hooks: tuple[Hook, ...]) -> Draws | None:
        """Compute the chunks' rows after clearing pages; return the draws, None if no chunk ends its sequence."""
        if cleared:
            self.cache.clear_pages(list(cleared))
        if self.decode is not None and not hooks and self.decode.takes(chunks):
            self.replayed += 1
            return self.decode.run([chunk.sequence for chunk in chunks])
        parts = [sequence_rows(chunk.sequence, chunk.start, chunk.count) for chunk in chunks]
        hidden_RK = self._decoder.hidden(Rows.build(parts, self.cache.page_size), self.cache, hooks)
        drawing, last_rows, rows = [], [], 0
        for chunk in chunks:
            rows += chunk.count
            if chunk.samples:
                drawing.append(chunk.sequence)
                last_rows.append(rows - 1)
        if not drawing:
            return None
        if len(drawing) < rows:
            last_R = torch.tensor(last_rows).to(hidden_RK.device, non_blocking=True)
            hidden_RK = hidden_RK.index_select(0, last_R)
        return draw_next(self._decoder, hidden_RK, drawing, self._settings.of(drawing))


def default_capture(decoder: Decoder, cuda_graphs: bool) -> Capture | None:
    """Return how decode steps are captured where nobody says: as CUDA graphs on a GPU, and not at all elsewhere."""
    on_gpu = decoder.device.type == "cuda" and decoder.dtype != torch.float64  # float64 is the oracle's
    return CudaGraphs(decoder.device) if on_gpu and cuda_graphs else None
