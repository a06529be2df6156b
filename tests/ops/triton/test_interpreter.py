"""The kernels under Triton's interpreter: indexing, masks and order; it proves nothing about a GPU's bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install 'zerogap[gpu]'")

FOLDER = Path(__file__).parent / "interpreted"
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("test_*.py")))
def test_in_its_own_process(name: str, pytestconfig: pytest.Config) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{FOLDER}/{name}.py"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
