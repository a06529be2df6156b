"""Models of known shapes with random weights, their layers, and torch's own ops in the place of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import inexact
import torch
from torch import Tensor

from zerogap import ops
from zerogap.models.config import ModelConfig
from zerogap.models.decoder import Decoder
from zerogap.models.tokenizer import Tokenizer, load_tokenizer

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


def _add_rms_norm(x_RK: Tensor, residual_RK: Tensor, weight_K: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    sum_RK = x_RK + residual_RK
    return sum_RK, inexact.rms_norm(sum_RK, weight_K, eps)


def _qk_norm_rotary(
    q_RHD: Tensor, k_RGD: Tensor, weights: tuple[Tensor, Tensor], eps: float, cos_RD: Tensor, sin_RD: Tensor
) -> tuple[Tensor, ...]:
    pairs = zip((q_RHD, k_RGD), weights, strict=True)
    return tuple(inexact.rotary(inexact.rms_norm(x, weight, eps), cos_RD, sin_RD) for x, weight in pairs)


# Fused ops count where the decoder calls them; attention has no counterpart over pages.
_TORCH: dict[str, Any] = {
    **{name: getattr(inexact, name) for name in ("linear", "rms_norm", "rotary", "silu_mul", "embedding", "sample")},
    **{f.__name__[1:]: f for f in (_add_rms_norm, _qk_norm_rotary) if hasattr(ops, f.__name__[1:])},
}
