"""What the bits of a run depend on beside its configuration, so that a resume elsewhere is allowed or refused."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from zerogap import ops
from zerogap.models.config import ModelConfig
from zerogap.models.decoder import Decoder, WeightsFormat
from zerogap.models.rows import PackedCache, Rows
from zerogap.models.weights import weights_digest
from zerogap.numerics import NUMERICS_VERSION, kernels_digest
from zerogap.ops import ambient, backend
from zerogap.trainer.optimiser import Optimiser, OptimiserSettings

_LENGTHS = (61, 1, 130, 1100)  # rows of the probe's sequences, where the context has room: no multiple of any tile
_ROWS = 1700  # in all: libraries and attention change their ways with the number of rows and positions
_EVERY = 9  # of so many rows one gets a log-prob: the LM head runs on chunks, however many rows there are


def environment() -> dict[str, Any]:
    """Return what may change bits: numerics version, backend, kernels, torch version, CPU path, thread count."""
    name = backend.cpu_backend()
    return {
        "numerics_version": NUMERICS_VERSION,
        "backend": name,
        "kernels": kernels_digest() if name == "native" else None,
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def describe_numerics(config: ModelConfig, weights: WeightsFormat = "float32") -> dict[str, Any]:
    """Return the environment, what is computed with, and the model's `fingerprint`.

    It is measured once per process, thread count and backend.
    """
    measured = _measured_once(config, weights, torch.get_num_threads(), backend.cpu_backend())
    return environment() | {"weights": weights, "fingerprint": measured}


@lru_cache(maxsize=8)
def _measured_once(config: ModelConfig, weights: WeightsFormat, threads: int, cpu_backend: str) -> str:
    return fingerprint(config, weights)


def probe_lengths(config: ModelConfig) -> list[int]:
    """Return the rows of each of the probe's sequences."""
    lengths = [min(length, config.max_positions) for length in _LENGTHS]
    while sum(lengths) < _ROWS:
        lengths.append(min(_ROWS - sum(lengths), config.max_positions))
    return lengths


def fingerprint(config: ModelConfig, weights: WeightsFormat = "float32") -> str:
    """Return a digest of the weights after one update of a single random layer of this model's shapes.

    About 1,700 rows, one sequence of up to 1,100 positions among them, as far as the model's context allows. Two
    environments that give the same digest computed the same forward, backward and optimiser bits there. It is a
    measurement on these shapes, no proof for all inputs.
    """
    decoder = Decoder(replace(config, num_layers=1)).compute_with(weights)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in decoder.parameters():
            weight.normal_(0.0, 0.1, generator=generator)
    sequences = [torch.randint(config.vocab_size, (n,), generator=generator).tolist() for n in probe_lengths(config)]
    scored_R = torch.arange(0, sum(map(len, sequences)), _EVERY)
    targets_R = torch.randint(config.vocab_size, scored_R.shape, generator=generator)
    optimiser = Optimiser(decoder.named_parameters(), OptimiserSettings(learning_rate=1e-3))
    with ambient.guard():
        hidden_RK = decoder.hidden(Rows.packed(sequences), PackedCache())
        settings = ops.SamplerRows.uniform_settings(len(targets_R))
        ops.token_logprobs(hidden_RK[scored_R], decoder.lm_head_weight, targets_R, settings).logprob_R.mean().backward()
        optimiser.apply()
    return weights_digest(decoder.state_dict())
