"""The native backend: the CPU kernels of the package ``zerogap-kernels``, float32.

The same functions as ``zerogap.ops.portable``. Forwards are the kernels', and keep the row law by construction; the
matrix products of backwards are the library's.
"""

from zerogap.ops.native.attention import KVMemory, attention
from zerogap.ops.native.linear import linear
from zerogap.ops.native.logprob import sample, token_logprobs
from zerogap.ops.native.norm import add_rms_norm, embedding, rms_norm, silu_mul
from zerogap.ops.native.packed import stale_copies
from zerogap.ops.native.philox import uniform
from zerogap.ops.native.rotary import rotary

__all__ = [
    "KVMemory",
    "add_rms_norm",
    "attention",
    "embedding",
    "linear",
    "rms_norm",
    "rotary",
    "sample",
    "silu_mul",
    "stale_copies",
    "token_logprobs",
    "uniform",
]
