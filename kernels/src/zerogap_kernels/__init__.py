"""CPU kernels that keep the row law; `zerogap.ops.native` is what calls them.

Arrays come in by DLPack (torch or numpy, on the CPU); results are written into arrays of the caller.
"""

from zerogap_kernels._kernels import (
    Cache,
    Packed,
    Plan,
    add_rms_norm,
    attention,
    attention_backward,
    attention_packed,
    choose_path,
    embedding,
    embedding_backward,
    exp,
    linear,
    log,
    pack,
    path,
    paths_here,
    rms_norm,
    rms_norm_backward,
    silu_mul,
    silu_mul_backward,
)

__all__ = [
    "Cache",
    "Packed",
    "Plan",
    "add_rms_norm",
    "attention",
    "attention_backward",
    "attention_packed",
    "choose_path",
    "embedding",
    "embedding_backward",
    "exp",
    "linear",
    "log",
    "pack",
    "path",
    "paths_here",
    "rms_norm",
    "rms_norm_backward",
    "silu_mul",
    "silu_mul_backward",
]
