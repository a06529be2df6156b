"""CPU kernels that keep the row law; `zerogap.ops.native` is what calls them.

Arrays come in by DLPack (torch or numpy, on the CPU); results are written into arrays of the caller.
"""

from zerogap_kernels._kernels import (
    Cache,
    Packed,
    Plan,
    attention,
    attention_backward,
    attention_packed,
    choose_path,
    linear,
    pack,
    path,
    paths_here,
    rotary,
    rotary_cache,
)

__all__ = [
    "Cache",
    "Packed",
    "Plan",
    "attention",
    "attention_backward",
    "attention_packed",
    "choose_path",
    "linear",
    "pack",
    "path",
    "paths_here",
    "rotary",
    "rotary_cache",
]
