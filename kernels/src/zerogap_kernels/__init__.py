"""CPU kernels that keep the row law; `zerogap.ops.native` is what calls them.

Arrays come in by DLPack (torch or numpy, on the CPU); results are written into arrays of the caller.
"""

from zerogap_kernels._kernels import (
    Packed,
    adamw_step,
    add_rms_norm,
    choose_path,
    embedding,
    embedding_backward,
    exp,
    kept_ids,
    linear,
    log,
    pack,
    path,
    paths_here,
    rms_norm,
    rms_norm_backward,
    sample,
    silu_mul,
    silu_mul_backward,
    sum_of_squares,
    token_logprobs,
    token_logprobs_backward,
    uniform,
)

__all__ = [
    "Packed",
    "adamw_step",
    "add_rms_norm",
    "choose_path",
    "embedding",
    "embedding_backward",
    "exp",
    "kept_ids",
    "linear",
    "log",
    "pack",
    "path",
    "paths_here",
    "rms_norm",
    "rms_norm_backward",
    "sample",
    "silu_mul",
    "silu_mul_backward",
    "sum_of_squares",
    "token_logprobs",
    "token_logprobs_backward",
    "uniform",
]
