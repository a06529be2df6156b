"""The Triton backend: the row law on NVIDIA and AMD GPUs, in bfloat16, float16 and float32.

The names are those of ``zerogap.ops.portable``. Importing this package imports triton; nothing else does.
"""
