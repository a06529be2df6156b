"""The kernel tests on a GPU: the files that the CPU runs under the interpreter, without it.

There the bits are the GPU's own: row law, ties, order and repeatability are tested as they stand, equality with the
portable backend only where no ``fma`` is part of the definition.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NAMES = ("test_elementwise", "test_norm", "test_sampling", "test_logprob", "test_whole", "test_decode")


def _has_gpu() -> bool:
    torch = pytest.importorskip("torch")
    return bool(torch.cuda.is_available())


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_on_the_gpu(name: str) -> None:
    if not _has_gpu():
        pytest.skip("no GPU that PyTorch can use")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command.append(f"tests/ops/triton/interpreted/{name}.py")
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
