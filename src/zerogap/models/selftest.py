"""The start-up proof of the row law for a model's own shapes."""

from __future__ import annotations

import torch

from zerogap.models.config import ModelConfig
from zerogap.ops import backend, segment_count
from zerogap.ops.ambient import require_subnormals
from zerogap.ops.portable.elementwise import wide_dtype
from zerogap.ops.portable.selftest import ProductShape, attention_shapes, linear_shape, prove_products, prove_scans


def product_shapes(config: ModelConfig) -> set[ProductShape]:
    """Return every matrix product that the decoder of ``config`` makes in a forward pass."""
    hidden, inner = config.hidden_size, config.intermediate_size
    width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        linear_shape("q_proj", hidden, width),
        linear_shape("k_proj, v_proj", hidden, kv_width),
        linear_shape("o_proj", width, hidden, segment_count(width, unit=config.head_dim)),
        linear_shape("gate_proj, up_proj", hidden, inner),
        linear_shape("down_proj", inner, hidden, segment_count(inner)),
        linear_shape("lm_head", hidden, config.vocab_size),
        *attention_shapes(config.num_heads, config.num_kv_heads, config.head_dim),
    }


def prove_row_law(config: ModelConfig, dtype: torch.dtype = torch.float32) -> int:
    """Prove the law for every library product of ``config`` at the current thread count; return how many there are.

    Raises:
        NotHeldError: one breaks it; the run must be refused.
        UsageError: a thread flushes subnormal numbers to zero.
    """
    require_subnormals()
    if backend.name_of(dtype) == "native":
        return 0  # no library product stands on its log-prob path
    shapes = product_shapes(config)
    prove_products(shapes, wide_dtype(dtype))
    prove_scans(config.vocab_size)
    return len(shapes)
