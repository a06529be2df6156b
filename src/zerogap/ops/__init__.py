"""Ops that keep the row law: the bits of a row depend on that row alone, never on its company.

One interface, several backends: ``zerogap.ops.portable`` is plain torch and runs wherever torch runs,
``zerogap.ops.native`` calls the CPU kernels of the package ``zerogap-kernels``. ``zerogap.ops.backend`` says which
serves; both sides of a run call these functions and so get the same one. See `zerogap.ops.portable` for what each
function takes and returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from zerogap.ops import backend
from zerogap.ops.plan import AttentionPlan, Chunk
from zerogap.ops.portable.linear import segment_count
from zerogap.ops.portable.logprob import TokenLogprobs
from zerogap.ops.portable.sampling import Sampled, SamplerRows
from zerogap.ops.record import CacheLayer, Symbol

__all__ = [
    "AttentionPlan",
    "Chunk",
    "Sampled",
    "SamplerRows",
    "TokenLogprobs",
    "add_rms_norm",
    "attention",
    "embedding",
    "linear",
    "qk_norm_rotary",
    "rms_norm",
    "rotary",
    "sample",
    "segment_count",
    "silu_mul",
    "stale_copies",
    "token_logprobs",
    "uniform",
]


def linear(x_RK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, segments: int = 1) -> Tensor:
    """Return ``x_RK @ weight_NK.T + bias_N``."""
    return backend.of(x_RK).linear(x_RK, weight_NK, bias_N, segments)


def rms_norm(x: Tensor, weight_K: Tensor, eps: float) -> Tensor:
    """Return ``x / sqrt(mean(x^2) + eps) * weight_K`` over the last dimension."""
    return backend.of(x).rms_norm(x, weight_K, eps)


def rotary(x_RHD: Tensor, cos_RD: Tensor, sin_RD: Tensor) -> Tensor:
    """Rotate the halves of each head by its row's angles."""
    return backend.of(x_RHD).rotary(x_RHD, cos_RD, sin_RD)


def add_rms_norm(x_RK: Tensor, residual_RK: Tensor, weight_K: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return ``x + residual`` and its `rms_norm`: one pass where the backend has it, with the bits of the two ops."""
    fused = getattr(backend.of(x_RK), "add_rms_norm", None)
    if fused is not None:
        return fused(x_RK, residual_RK, weight_K, eps)
    sum_RK = x_RK + residual_RK
    return sum_RK, rms_norm(sum_RK, weight_K, eps)


def qk_norm_rotary(
    q_RHD: Tensor, k_RGD: Tensor, weights_D: tuple[Tensor, Tensor], eps: float, cos_RD: Tensor, sin_RD: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the `rotary` of the `rms_norm` of each head of queries and keys: with the bits of the ops, as above."""
    fused = getattr(backend.of(q_RHD), "qk_norm_rotary", None)
    if fused is not None:
        q_RHD, k_RGD = (fused(x, w, eps, cos_RD, sin_RD) for x, w in zip((q_RHD, k_RGD), weights_D, strict=True))
        return q_RHD, k_RGD
    q_RHD, k_RGD = rms_norm(q_RHD, weights_D[0], eps), rms_norm(k_RGD, weights_D[1], eps)
    return rotary(q_RHD, cos_RD, sin_RD), rotary(k_RGD, cos_RD, sin_RD)


def silu_mul(gate_RI: Tensor, up_RI: Tensor) -> Tensor:
    """Return ``silu(gate) * up``."""
    return backend.of(gate_RI).silu_mul(gate_RI, up_RI)


def embedding(ids_R: Tensor, weight_VK: Tensor) -> Tensor:
    """Return the rows of ``weight_VK`` that ``ids_R`` names."""
    whose = ids_R if isinstance(ids_R, Symbol) else weight_VK
    return backend.of(whose).embedding(ids_R, weight_VK)


def attention(q_RHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """Return causal attention of each row over its own sequence's keys, which lie in slots.

    Keys and values are rows by slot [S, G, D], or what a ``KVMemory`` returned in their place.
    """
    if isinstance(k_SGD, Tensor | CacheLayer):
        return backend.of(q_RHD).attention(q_RHD, k_SGD, v_SGD, plan, scale)
    return k_SGD.attention(q_RHD, plan, scale)


def token_logprobs(
    hidden_RK: Tensor, lm_head_VK: Tensor, target_R: Tensor, settings: SamplerRows, want_kept: bool = False
) -> TokenLogprobs:
    """Return the log-prob of ``target_R`` under each row's distribution, as the engine would have recorded it."""
    return backend.of(hidden_RK).token_logprobs(hidden_RK, lm_head_VK, target_R, settings, want_kept)


def sample(
    hidden_RK: Tensor, lm_head_VK: Tensor, settings: SamplerRows, uniform_R: Tensor, top: list[int] | None = None
) -> Sampled:
    """Draw each row's next token, with its log-prob and the ``top`` most probable tokens."""
    return backend.of(hidden_RK).sample(hidden_RK, lm_head_VK, settings, uniform_R, top)


def uniform(seed: int, keys: Sequence[tuple[int, int, int, int]]) -> Tensor:
    """Return one number in [0, 1) per key (step, prompt, sample, position), float64 [R]; every backend has the same."""
    return backend.of_host().uniform(seed, keys)


def stale_copies(weights: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the weights of which the backend holds a copy with other values.

    Args:
        weights: parameters by name, all of one type.
    """
    return [] if not weights else backend.of(next(iter(weights.values()))).stale_copies(weights)
