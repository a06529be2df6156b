"""CPU kernels that keep the row law; `zerogap.ops.native` is what calls them.

Arrays come in by DLPack (torch or numpy, on the CPU); results are written into arrays of the caller.
"""

from zerogap_kernels._kernels import Packed, choose_path, linear, pack, path, paths_here

__all__ = ["Packed", "choose_path", "linear", "pack", "path", "paths_here"]
