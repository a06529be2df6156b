"""Models of known shapes with random weights, their layers, and torch's own ops in the place of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from zerogap import ops
from zerogap.models.config import ModelConfig
from zerogap.models.decoder import Decoder
from zerogap.models.tokenizer import Tokenizer, load_tokenizer
from zerogap.ops.portable.sampling import Sampled

TINY = Path(__file__).resolve().parent.parent / "src" / "zerogap" / "data" / "tiny-qwen3"
# Sizes of the published models' config.json (Qwen3-0.6B and Qwen3-4B).
_SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}
_QWEN3 = {
    "model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "max_position_embeddings": 40960, "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip


def config_of(shape: str) -> ModelConfig:
    """Return the sizes of ``0.6b``, ``4b``, or of the small model that ships (``tiny``)."""
    if shape == "tiny":
        return ModelConfig.from_folder(TINY)
    return ModelConfig.from_dict({**_QWEN3, **_SHAPES[shape]}, f"Qwen3-{shape}")


def random_model(
    shape: str, device: str, dtype: torch.dtype | None = None, layers: int | None = None
) -> tuple[Decoder, Tokenizer]:
    """Return a decoder with random weights, bfloat16 on a GPU, and the small tokenizer, whose ids all have."""
    dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
    config = config_of(shape)
    with torch.device(device):
        decoder = Decoder(config if layers is None else replace(config, num_layers=layers), dtype)
    generator = torch.Generator(device).manual_seed(11)
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            scale = 0.1 if weight.dim() == 1 else weight.shape[-1] ** -0.5
            weight.normal_(1.0 if name.endswith("norm.weight") else 0.0, scale, generator=generator)
    return decoder, load_tokenizer(TINY)


def layers(shape: str) -> list[tuple[str, int, int, int]]:
    """Return (name, outputs, inputs, unit of segments or 0) of a model's linear layers."""
    config = config_of(shape)
    hidden, inner, width = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    return [
        ("q_proj", width, hidden, 0),
        ("k_proj", config.num_kv_heads * config.head_dim, hidden, 0),
        ("o_proj", hidden, width, config.head_dim),
        ("gate_proj", inner, hidden, 0),
        ("down_proj", hidden, inner, 64),
        ("lm_head", config.vocab_size, hidden, 0),
    ]


@contextmanager
def torch_ops() -> Iterator[None]:
    """Put torch's own ops in the place of ours within the body, attention apart: the same engine, not exact."""
    ours = {name: getattr(ops, name) for name in _TORCH}
    try:
        for name, op in _TORCH.items():
            setattr(ops, name, op)
        yield
    finally:
        for name, op in ours.items():
            setattr(ops, name, op)


def _linear(x_RK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, segments: int = 1) -> Tensor:
    return functional.linear(x_RK, weight_NK, bias_N)


def _rms_norm(x: Tensor, weight_K: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, weight_K.shape, weight_K, eps)


def _rotary(x_RHD: Tensor, cos_RD: Tensor, sin_RD: Tensor) -> Tensor:
    first, second = x_RHD.chunk(2, dim=-1)
    cos, sin = cos_RD.unsqueeze(1), sin_RD.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _silu_mul(gate_RI: Tensor, up_RI: Tensor) -> Tensor:
    return functional.silu(gate_RI) * up_RI


def _embedding(ids_R: Tensor, weight_VK: Tensor) -> Tensor:
    return functional.embedding(ids_R, weight_VK)


def _sample(
    hidden_RK: Tensor, lm_head_VK: Tensor, settings: ops.SamplerRows, uniform_R: Tensor, top: list[int] | None = None
) -> Sampled:
    temperature_R = settings.temperature_R.to(hidden_RK.device, torch.float32)
    logprob_RV = torch.log_softmax(functional.linear(hidden_RK, lm_head_VK).float() / temperature_R.unsqueeze(1), -1)
    token_R1 = torch.multinomial(logprob_RV.exp(), 1)
    return Sampled(token_R1.squeeze(1), logprob_RV.gather(1, token_R1).squeeze(1))


_TORCH: dict[str, Any] = {
    "linear": _linear,
    "rms_norm": _rms_norm,
    "rotary": _rotary,
    "silu_mul": _silu_mul,
    "embedding": _embedding,
    "sample": _sample,
}
