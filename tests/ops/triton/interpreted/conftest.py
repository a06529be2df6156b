"""These tests run the kernels on the CPU; Triton must be told before it loads, so they get a process of their own.

``tests/ops/triton/test_interpreter.py`` starts it. By hand: ``TRITON_INTERPRET=1 pytest tests/ops/triton/interpreted``.

The interpreter hands a product to a BLAS, whose bits may depend on the place of a row (the very fault that the kernels
exist to avoid), and multiplies the words of bfloat16 as integers. Here it is a chain of float32 additions in ascending
order of K, as the definition of the op has it.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETED else ["*"]


def _float32(x: Any) -> np.ndarray:
    from triton import language as tl

    if x.dtype.scalar == tl.bfloat16:
        return (x.data.astype(np.uint32) << 16).view(np.float32)
    return x.data.astype(np.float32)


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    from triton.runtime.interpreter import TensorHandle

    left, right, total = _float32(a), _float32(b), d.data.astype(np.float32)
    for k in range(left.shape[-1]):
        total = total + left[:, k, None] * right[None, k, :]
    return TensorHandle(total.astype(d.data.dtype), d.dtype.scalar)


if INTERPRETED:
    from triton.runtime import interpreter

    interpreter.InterpreterBuilder.create_dot = _dot
    _patch_lang_tensor = interpreter._patch_lang_tensor

    def _patch(tensor: Any, scope: Any) -> None:
        """Triton below 3.8 turns arrays of one element into integers as NumPy from 2.4 on refuses to."""
        _patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch
    np.seterr(invalid="ignore", over="ignore")
