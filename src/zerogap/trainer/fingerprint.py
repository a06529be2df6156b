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
_CPU = torch.device("cpu")
_EVERY = 9  # of so many rows one gets a log-prob: the LM head runs on chunks, however many rows there are


def environment(device: torch.device = _CPU, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return what may change bits: numerics version, backend, kernels, torch version, device, CPU path, threads."""
    name = backend.name_of(dtype) if device.type == "cpu" else backend.name_on(device)
    return {
        "numerics_version": NUMERICS_VERSION,
        "backend": name,
        "kernels": kernels_digest() if name == "native" else None,
        **({} if device.type == "cpu" else {"gpu": torch.cuda.get_device_name(device)}),
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def describe_numerics(
    config: ModelConfig,
    device: torch.device = _CPU,
    weights: WeightsFormat = "float32",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Return the environment, what is computed with, and the model's `fingerprint`.

    It is measured once per process, thread count and backend.
    """
    name = backend.name_of(dtype) if device.type == "cpu" else backend.name_on(device)
    measured = _measured_once(config, weights, dtype, torch.get_num_threads(), device, name)
    plain = str(dtype).removeprefix("torch.")
    return environment(device, dtype) | {"dtype": plain, "weights": weights, "fingerprint": measured}


@lru_cache(maxsize=8)
def _measured_once(
    config: ModelConfig,
    weights: WeightsFormat,
    dtype: torch.dtype,
    threads: int,
    device: torch.device,
    backend_name: str,
) -> str:
    return fingerprint(config, device, dtype, weights)


def probe_lengths(config: ModelConfig) -> list[int]:
    """Return the rows of each of the probe's sequences."""
    lengths = [min(length, config.max_positions) for length in _LENGTHS]
    while sum(lengths) < _ROWS:
        lengths.append(min(_ROWS - sum(lengths), config.max_positions))
    return lengths


def fingerprint(
    config: ModelConfig,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    weights: WeightsFormat = "float32",
) -> str:
    """Return a digest of the weights (or masters) after one update of a single random layer of this model's shapes.

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
    decoder = decoder.to(device, dtype)
    decoder.dtype = dtype
    optimiser = Optimiser(decoder.named_parameters(), OptimiserSettings(learning_rate=1e-3))
    with ambient.guard():
        hidden_RK = decoder.hidden(Rows.packed(sequences), PackedCache())
        settings = ops.SamplerRows.uniform_settings(len(targets_R))
        hidden_SK, targets_R = hidden_RK[scored_R.to(device)], targets_R.to(device)
        ops.token_logprobs(hidden_SK, decoder.lm_head_weight, targets_R, settings).logprob_R.mean().backward()
        optimiser.apply()
    return weights_digest(optimiser.masters)  # the weights themselves, if they are wide: rounding hides bits
