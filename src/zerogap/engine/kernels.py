"""Building a model's GPU kernels before they are needed, with a count of how many there are.

Which ones a model needs is found by running its decoder, sampler and backward pass with launches noted instead of run
(``zerogap.ops.triton.dry``). Triton keeps what it built in its own cache, whose key is made of the kernel's source and
that of all it calls, Triton's version, compiler switches, argument types and the architecture: each is built once per
machine and user.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zerogap import ops
from zerogap.engine.capture import rerun
from zerogap.engine.decode import DecodeSteps, Size
from zerogap.models.config import ModelConfig
from zerogap.models.decoder import Decoder
from zerogap.models.rows import PackedCache, PagedCache, Rows, SequenceRows
from zerogap.ops import backend

if TYPE_CHECKING:
    from zerogap.ops.triton.dry import Launch
    from zerogap.ops.triton.targets import Target

Progress = Callable[[int, int, str], None]
"""Told (kernels done, kernels in all, name of the next one); once more at the end, with no name."""

_LAYERS = 2  # all but the first are alike


def needed_kernels(config: ModelConfig, dtype: torch.dtype, page_size: int, target: Target) -> list[Launch]:
    """Return every kernel that engine and trainer launch for a model, each once. No GPU is needed.

    Args:
        config: the model.
        dtype: of rows and weights.
        page_size: of the engine's KV memory.
        target: the architecture.
    """
    from zerogap.ops.triton.dry import noting

    decoder = _unfilled(replace(config, num_layers=min(_LAYERS, config.num_layers)), dtype)
    for weight in decoder.parameters():
        weight.requires_grad_(weight.dim() == 1)  # gradients of matrices are the library's products
    with backend.noting_kernels(), noting(target) as notes:
        for rows in _row_counts(config, dtype, target):
            with torch.no_grad():
                _score(decoder, decoder.hidden(Rows.packed([[0] * rows]), PackedCache()))
        hidden_RK = decoder.hidden(Rows.packed([[0] * 40, [0] * 9]), PackedCache())
        _score(decoder, hidden_RK).backward()
        table = torch.zeros(8, config.hidden_size, dtype=dtype, requires_grad=True)
        ops.embedding(torch.zeros(1, dtype=torch.int64), table).sum().backward()
        with torch.no_grad():
            _engine(decoder, page_size, _two_splits(config, dtype, target))
    return list(notes.launches.values())


def _unfilled(config: ModelConfig, dtype: torch.dtype) -> Decoder:
    """Return a decoder whose weights are memory that is never written, and so costs nothing."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # made in another dtype they would be converted
    try:
        return Decoder(config, dtype)
    finally:
        torch.set_default_dtype(before)


def _score(decoder: Decoder, hidden_RK: Tensor) -> Tensor:
    """Score rows without filters, with them, and with the kept sets they left; return the sum of log-probs."""
    hidden_RK = hidden_RK[:4]
    target_R = torch.zeros(len(hidden_RK), dtype=torch.int64)
    plain = ops.SamplerRows.uniform_settings(len(hidden_RK))
    filtered = ops.SamplerRows.uniform_settings(len(hidden_RK), 0.7, 20, 0.9, 0.05)
    kept = plain.replaying((torch.zeros(1, dtype=torch.int32), *[None] * (len(hidden_RK) - 1)))
    parts = [
        ops.token_logprobs(hidden_RK, decoder.lm_head_weight, target_R, settings).logprob_R
        for settings in (plain, filtered, kept)
    ]
    return torch.cat(parts).sum()


def _engine(decoder: Decoder, page_size: int, positions: int) -> None:
    """Run chunks at both ends of a sequence, and decode steps, over pages."""
    pages = -(-positions // page_size)
    cache = PagedCache(decoder.config, pages + 1, page_size, decoder.dtype)
    for start in {0, positions - 3}:
        decoder.hidden(Rows.build([SequenceRows([0] * 3, start, range(pages))], page_size), cache)
    steps = DecodeSteps(decoder, cache, 1, positions, rerun)
    for width in {1, pages}:
        for sampler in ("plain", "filtered"):
            steps.body(Size(1, width, sampler))()


def _row_counts(config: ModelConfig, dtype: torch.dtype, target: Target) -> list[int]:
    """Return numbers of rows that meet every tile of every matrix, and attention's splits in parallel."""
    from zerogap.ops.triton.table import linear_tiles

    name, counts = str(dtype).removeprefix("torch."), {1, _two_splits(config, dtype, target)}
    for out_features in (config.hidden_size, config.intermediate_size, config.vocab_size):
        for segments in (1, 2):
            tiles = linear_tiles(target, name, out_features, segments).tiles
            counts |= {tile.rows for tile in tiles if tile.rows is not None}
    return sorted(counts | {1 + max(counts)})


def _two_splits(config: ModelConfig, dtype: torch.dtype, target: Target) -> int:
    """Return the length of a sequence whose keys attention walks in two splits, if the model reaches so far."""
    from zerogap.ops.triton.table import attention_tile

    name, share = str(dtype).removeprefix("torch."), config.num_heads // config.num_kv_heads
    return min(attention_tile(target, name, config.head_dim, share).split + 1, config.max_positions)


def build_kernels(launches: list[Launch], progress: Progress) -> None:
    """Build kernels for the current GPU; those in Triton's cache are read from there.

    Args:
        launches: what is needed.
        progress: is told how far it is.
    """
    for done, launch in enumerate(launches):
        progress(done, len(launches), launch.kernel.__name__)
        launch.kernel.warmup(*launch.arguments, grid=(1,), **launch.options)
    progress(len(launches), len(launches), "")


def prepare_gpu(
    config: ModelConfig, dtype: torch.dtype, page_size: int, device: torch.device, progress: Progress
) -> None:
    """Build what a model needs on a GPU, before the first step waits for it.

    Args:
        config: the model.
        dtype: of rows and weights.
        page_size: of the engine's KV memory.
        device: the GPU; on the CPU nothing is built.
        progress: is told how far it is.
    """
    if device.type == "cpu" or dtype == torch.float64:
        return
    from zerogap.ops.triton.targets import detect

    launches = needed_kernels(config, dtype, page_size, detect(device))
    with torch.cuda.device(device):
        build_kernels(launches, progress)
