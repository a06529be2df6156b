"""These tests run the kernels on the CPU; Triton must be told before it loads, so they get a process of their own.

``tests/ops/triton/test_interpreter.py`` starts it. By hand: ``TRITON_INTERPRET=1 pytest tests/ops/triton/interpreted``.

On a machine with a GPU they run on it instead, without the interpreter (``tests/ops/triton/test_gpu.py``).
"""

from __future__ import annotations

import os

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _has_gpu() -> bool:
    try:
        import torch
        import triton  # noqa: F401
    except ImportError:
        return False
    return torch.cuda.is_available()


collect_ignore_glob = [] if INTERPRETED or _has_gpu() else ["*"]

if INTERPRETED:
    import numpy as np

    from zerogap.ops.triton.interpreter import use_interpreter

    use_interpreter()
    np.seterr(invalid="ignore", over="ignore")
