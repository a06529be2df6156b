"""The Triton backend: the row law on NVIDIA and AMD GPUs, in bfloat16, float16 and float32.

The names are those of ``zerogap.ops.portable``. Importing this package imports triton; nothing else does.
"""

from zerogap.ops.triton.attention import AttentionPlan, Chunk, attention
from zerogap.ops.triton.linear import linear, segment_count
from zerogap.ops.triton.table import choices

__all__ = ["AttentionPlan", "Chunk", "attention", "choices", "linear", "segment_count"]
