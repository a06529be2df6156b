"""Triton's interpreter, so that kernels run on a CPU: it proves indexing, masks and order, not a GPU's bits.

It must be switched on before Triton is imported, since ``triton.jit`` decides as it decorates.
"""

from __future__ import annotations

import os
import sys
from typing import Any


def use_interpreter() -> None:
    """Switch the interpreter on for this process and those it starts, and mend four things in it.

    It cuts the low bits of a float32 off that becomes a bfloat16, and may lose a carry; GPUs round to nearest even. It
    hands ``tl.dot`` to a library, whose order depends on the tile's shape, and takes a bfloat16 there for an integer:
    here the inner dimension is walked in ascending order. It makes a loop's bound an integer as numpy 2.4 refuses. And
    ``fma`` rounds once from Triton 3.9 on: here a product and a sum, as before and as in the portable backend.
    """
    assert "triton" not in sys.modules or os.environ.get("TRITON_INTERPRET") == "1", "Triton was imported before"
    os.environ["TRITON_INTERPRET"] = "1"

    import numpy as np
    import torch
    from triton import language as tl
    from triton.runtime import interpreter

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            wide = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32))
            return wide.bfloat16().view(torch.int16).numpy().view(np.uint16).reshape(data.shape)
        if source == tl.bfloat16 and target == tl.float32:
            return (np.ascontiguousarray(data).view(np.uint16).astype(np.uint32) << 16).reshape(data.shape)
        return original(data, source, target, rounding)

    if not getattr(interpreter, "_rounds_to_even", False):
        original = interpreter._convert_float
        interpreter._convert_float = convert

        def wide(operand: Any) -> Any:
            if operand.dtype.scalar == tl.bfloat16:
                return convert(operand.data, tl.bfloat16, tl.float32, None).view(np.float32)
            return operand.data.astype(np.float32)

        def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
            a_MK, b_KN, total_MN = wide(a), wide(b), d.data.astype(np.float32)
            for k in range(a_MK.shape[-1]):
                total_MN += a_MK[..., :, k, None] * b_KN[..., None, k, :]
            return interpreter.TensorHandle(total_MN.astype(d.data.dtype), d.dtype.scalar)

        def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
            return interpreter.TensorHandle(x.data * y.data + z.data, z.dtype.scalar)

        interpreter.InterpreterBuilder.create_dot = dot
        interpreter.InterpreterBuilder.create_fma = fma
        patch_tensor = interpreter._patch_lang_tensor

        def patch(tensor: Any, scope: Any) -> None:
            patch_tensor(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        interpreter._patch_lang_tensor = patch
        interpreter._rounds_to_even = True
