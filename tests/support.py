"""What several tests build: small random decoders and bit comparison."""

from __future__ import annotations

import torch
from torch import Tensor

from zerogap.models.config import ModelConfig
from zerogap.models.decoder import Decoder

FAMILY_VALUES = {
    "qwen3": {"head_dim": 32},
    "qwen2": {},
    "llama": {},
}


def config_values(family: str = "qwen3", **changes: object) -> dict[str, object]:
    """Values of a small ``config.json``."""
    return {
        "model_type": family,
        "vocab_size": 50,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        **FAMILY_VALUES[family],
        **changes,
    }


def random_decoder(
    family: str = "qwen3", seed: int = 0, dtype: torch.dtype = torch.float32, **changes: object
) -> Decoder:
    """A small decoder with random weights that give distributions neither flat nor peaked."""
    decoder = Decoder(ModelConfig.from_dict(config_values(family, **changes)), dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            value = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.1 * value if name.endswith("norm.weight") else 0.15 * value)
    return decoder


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two float32 or float64 tensors hold the same words."""
    integer = {torch.float32: torch.int32, torch.float64: torch.int64}
    return first.dtype == second.dtype and torch.equal(
        first.contiguous().view(integer[first.dtype]), second.contiguous().view(integer[second.dtype])
    )
