"""What the bits of a run depend on beside its configuration, so that a resume elsewhere is allowed or refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from zerogap.models.config import ModelConfig
from zerogap.models.decoder import Decoder
from zerogap.models.rows import PackedCache, Rows
from zerogap.models.weights import weights_digest
from zerogap.numerics import NUMERICS_VERSION
from zerogap.ops import ambient
from zerogap.ops import portable as ops
from zerogap.trainer.optimiser import Optimiser, OptimiserSettings

_LENGTHS = (61, 1, 130)  # rows of the probe's sequences: no multiple of any tile or block


def environment() -> dict[str, Any]:
    """Return what may change bits: numerics version, torch version, CPU path, thread count."""
    return {
        "numerics_version": NUMERICS_VERSION,
        "backend": "portable",
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def fingerprint(config: ModelConfig) -> str:
    """Return a digest of the weights after one update of a single random layer of this model's shapes.

    Two environments that give the same digest computed the same forward, backward and optimiser bits there. It is a
    measurement on these shapes, no proof for all inputs.
    """
    decoder = Decoder(replace(config, num_layers=1))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in decoder.parameters():
            weight.normal_(0.0, 0.1, generator=generator)
    sequences = [torch.randint(config.vocab_size, (n,), generator=generator).tolist() for n in _LENGTHS]
    targets_R = torch.randint(config.vocab_size, (sum(_LENGTHS),), generator=generator)
    optimiser = Optimiser(decoder.named_parameters(), OptimiserSettings(learning_rate=1e-3))
    with ambient.guard():
        hidden_RK = decoder.hidden(Rows.packed(sequences), PackedCache())
        settings = ops.SamplerRows.uniform_settings(len(targets_R))
        ops.token_logprobs(hidden_RK, decoder.lm_head_weight, targets_R, settings).logprob_R.mean().backward()
        optimiser.apply()
    return weights_digest(decoder.state_dict())
