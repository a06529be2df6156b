"""CPU kernels that keep the row law; `zerogap.ops.native` is what calls them.

Arrays come in by DLPack (torch or numpy, on the CPU); results are written into arrays of the caller.
"""

import json
from functools import cache
from importlib.resources import files

from zerogap_kernels._kernels import (
    Cache,
    Packed,
    Plan,
    Program,
    ProgramBuilder,
    adamw_step,
    add_rms_norm,
    attention,
    attention_backward,
    attention_packed,
    choose_path,
    embedding,
    embedding_backward,
    empty,
    exp,
    kept_ids,
    linear,
    log,
    pack,
    path,
    paths_here,
    pool_bytes,
    rms_norm,
    rms_norm_backward,
    rotary,
    rotary_cache,
    sample,
    silu_mul,
    silu_mul_backward,
    sum_of_squares,
    token_logprobs,
    token_logprobs_backward,
    trim_pool,
    uniform,
)

__all__ = [
    "Cache",
    "Packed",
    "Plan",
    "Program",
    "ProgramBuilder",
    "adamw_step",
    "add_rms_norm",
    "attention",
    "attention_backward",
    "attention_packed",
    "build_info",
    "choose_path",
    "embedding",
    "embedding_backward",
    "empty",
    "exp",
    "kept_ids",
    "linear",
    "log",
    "pack",
    "path",
    "paths_here",
    "pool_bytes",
    "rms_norm",
    "rms_norm_backward",
    "rotary",
    "rotary_cache",
    "sample",
    "silu_mul",
    "silu_mul_backward",
    "sum_of_squares",
    "token_logprobs",
    "token_logprobs_backward",
    "trim_pool",
    "uniform",
]


@cache
def build_info() -> dict[str, str]:
    """Return what the bits depend on: digest of sources and switches, compiler, switches, paths that were built."""
    return json.loads((files(__package__) / "build.json").read_text(encoding="utf-8"))
