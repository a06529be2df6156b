"""Rotary position embedding: inverse frequencies of the default, linear, llama3 and yarn variants, and angle tables.

The tables are float32 in every dtype, as in the Hugging Face models, and are computed in fixed blocks of positions, so
that a position's angles never depend on how far a table reaches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from zerogap.errors import UsageError, nearest

TABLE_BLOCK = 1024  # positions computed at a time
_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
        "original_max_position_embeddings",
    },
}  # fmt: skip
_REQUIRED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}


@dataclass(frozen=True)
class Rope:
    """A variant of the rotary embedding: its inverse frequencies (float32 values) and the factor on cosine and sine."""

    variant: str
    inverse_frequencies: tuple[float, ...]
    scale: float
    max_positions: int

    def table(self, block: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [TABLE_BLOCK, D/2] of positions from ``block * TABLE_BLOCK``, float32."""
        return _table(self, block)

    def tables(self, blocks: int) -> tuple[Tensor, Tensor]:
        """Return the tables of the first ``blocks`` blocks as one, [blocks * TABLE_BLOCK, D/2]."""
        return _tables(self, blocks)


@lru_cache(maxsize=256)
def _table(rope: Rope, block: int) -> tuple[Tensor, Tensor]:
    position = torch.arange(block * TABLE_BLOCK, (block + 1) * TABLE_BLOCK, dtype=torch.float32)
    angle = position.unsqueeze(1) * torch.tensor(rope.inverse_frequencies, dtype=torch.float32)
    return angle.cos().mul_(rope.scale), angle.sin().mul_(rope.scale)


@lru_cache(maxsize=4)
def _tables(rope: Rope, blocks: int) -> tuple[Tensor, Tensor]:
    if blocks == 1:
        return _table(rope, 0)
    cos, sin = (torch.cat(parts) for parts in zip(*(_table(rope, block) for block in range(blocks)), strict=True))
    return cos, sin


def read_rope(values: dict[str, Any], head_dim: int, max_positions: int, where: str) -> Rope:
    """Read the rope settings of a ``config.json`` in the forms of transformers 4 and 5.

    Raises:
        UsageError: an unknown variant or key, or a value that is missing.
    """
    settings = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(settings, dict):
        raise UsageError(f"{where}: the rope settings must be a JSON object, not {settings!r}")
    settings = dict(settings)
    variant = settings.pop("rope_type", None) or settings.pop("type", None) or "default"
    settings.pop("type", None)
    theta = settings.pop("rope_theta", None)
    theta = values.get("rope_theta") if theta is None else theta
    theta = 10000.0 if theta is None else _above_zero(theta, "rope_theta", where)
    if settings.pop("partial_rotary_factor", 1.0) != 1.0:
        raise UsageError(f"{where}: partial_rotary_factor other than 1 is not supported")
    if not isinstance(variant, str) or variant not in _KEYS:
        raise UsageError(f"{where}: rope type {variant!r} is not supported{nearest(str(variant), _KEYS)}")
    unknown = sorted(set(settings) - _KEYS[variant])
    if unknown:
        raise UsageError(f"{where}: rope key {unknown[0]!r} is not known for type {variant!r}")
    for key in _REQUIRED.get(variant, ()):
        if settings.get(key) is None:
            raise UsageError(f"{where}: rope type {variant!r} needs {key}")
    original = settings.get("original_max_position_embeddings") or values.get("original_max_position_embeddings")
    for key, value in {**settings, "original_max_position_embeddings": original}.items():
        unset = value is None or (value == 0 and key.startswith("mscale"))
        if key != "truncate" and not unset:
            _above_zero(value, key, where)
    inverse = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    scale = 1.0
    if variant == "linear":
        inverse = inverse / settings["factor"]
    elif variant == "llama3":
        inverse = _llama3(inverse, settings)
    elif variant == "yarn":
        inverse, scale = _yarn(theta, head_dim, original or max_positions, settings)
    elif variant == "dynamic":
        # Beyond the original context its frequencies depend on the longest sequence of the batch, against the row law.
        max_positions = min(max_positions, original or max_positions)
    return Rope(variant, tuple(inverse.tolist()), scale, max_positions)


def _above_zero(value: Any, key: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UsageError(f"{where}: {key} must be a positive number, not {value!r}")
    return value


def _llama3(inverse: Tensor, settings: dict[str, Any]) -> Tensor:
    """Slow down low frequencies, keep high ones, blend between (Llama 3.1)."""
    factor, low, high = settings["factor"], settings["low_freq_factor"], settings["high_freq_factor"]
    context = settings["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inverse
    slowed = torch.where(wavelength > context / low, inverse / factor, inverse)
    share = (context / wavelength - low) / (high - low)
    blend = (1 - share) * slowed / factor + share * slowed
    between = ~(wavelength < context / high) & ~(wavelength > context / low)
    return torch.where(between, blend, slowed)


def _yarn(theta: float, head_dim: int, context: int, settings: dict[str, Any]) -> tuple[Tensor, float]:
    """Interpolate low frequencies and keep high ones, with a temperature on attention (YaRN, arXiv 2309.00071)."""
    factor = settings["factor"]
    fast, slow = settings.get("beta_fast") or 32, settings.get("beta_slow") or 1

    def dimension(rotations: float) -> float:
        return head_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(fast), dimension(slow)
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    frequencies = theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    kept = 1 - ramp
    inverse = 1.0 / (factor * frequencies) * (1 - kept) + 1.0 / frequencies * kept
    return inverse, _yarn_scale(factor, settings)


def _yarn_scale(factor: float, settings: dict[str, Any]) -> float:
    def magnitude(weight: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if settings.get("attention_factor") is not None:
        return float(settings["attention_factor"])
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        return magnitude(settings["mscale"]) / magnitude(settings["mscale_all_dim"])
    return magnitude()
