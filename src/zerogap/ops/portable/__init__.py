"""The portable backend: plain torch on fixed tiles, float32 or float64.

Rows and weights in bfloat16 or float16 are widened, computed in float32 and rounded to nearest even at named points
(``docs/numerics.md``); gradients of weights stay float32. The same functions run in float64 as the oracle. Each forward
keeps the row law; each backward is an ordinary, repeatable one.
"""

from zerogap.ops.plan import AttentionPlan, Chunk
from zerogap.ops.portable.attention import attention, decode_plan
from zerogap.ops.portable.cache import KVMemory
from zerogap.ops.portable.linear import linear, segment_count, stale_copies
from zerogap.ops.portable.logprob import TokenLogprobs, sample, token_logprobs
from zerogap.ops.portable.norm import embedding, rms_norm, rotary, silu_mul
from zerogap.ops.portable.sampling import (
    LogDistribution,
    Sampled,
    SamplerRows,
    draw,
    log_distribution,
    uniform,
    uniform_rows,
)

__all__ = [
    "AttentionPlan",
    "Chunk",
    "KVMemory",
    "LogDistribution",
    "Sampled",
    "SamplerRows",
    "TokenLogprobs",
    "attention",
    "decode_plan",
    "draw",
    "embedding",
    "linear",
    "log_distribution",
    "rms_norm",
    "rotary",
    "sample",
    "segment_count",
    "silu_mul",
    "stale_copies",
    "token_logprobs",
    "uniform",
    "uniform_rows",
]
