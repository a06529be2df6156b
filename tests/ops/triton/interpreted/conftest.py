"""These tests run the kernels on the CPU; Triton must be told before it loads, so they get a process of their own.

``tests/ops/triton/test_interpreter.py`` starts it. By hand: ``TRITON_INTERPRET=1 pytest tests/ops/triton/interpreted``.
"""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["*"]
