"""The Triton backend: the row law on NVIDIA and AMD GPUs, in bfloat16, float16 and float32.

The names are those of ``zerogap.ops.portable``. Importing this package imports triton; nothing else does.
"""

from zerogap.ops.plan import Chunk
from zerogap.ops.portable.cache import KVMemory
from zerogap.ops.portable.linear import stale_copies
from zerogap.ops.triton.linear import linear, segment_count
from zerogap.ops.triton.logprob import TokenLogprobs, sample, token_logprobs
from zerogap.ops.triton.norm import add_rms_norm, rms_norm
from zerogap.ops.triton.paged import attention
from zerogap.ops.triton.plan import AttentionPlan
from zerogap.ops.triton.rotary import qk_norm_rotary, rotary
from zerogap.ops.triton.rowwise import embedding, silu_mul
from zerogap.ops.triton.sampling import LogDistribution, SamplerRows, draw, log_distribution, uniform
from zerogap.ops.triton.table import choices

__all__ = [
    "AttentionPlan",
    "Chunk",
    "KVMemory",
    "LogDistribution",
    "SamplerRows",
    "TokenLogprobs",
    "add_rms_norm",
    "attention",
    "choices",
    "draw",
    "embedding",
    "linear",
    "log_distribution",
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
