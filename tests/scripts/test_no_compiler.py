"""Without a C++ compiler: the set-up says what is left out, and a run says what serves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.rl.small_run import arguments

ROOT = Path(__file__).parents[2]


def command(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=280, check=False
    )


def test_make_leaves_the_kernels_out_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / ".installed").touch()  # newer than pyproject.toml: the environment itself is not the subject
    done = command("make", "kernels", f"VENV={tmp_path}/venv", "CXX=/nowhere/g++")
    assert done.returncode == 0, done.stderr
    assert (
        "no C++ compiler (/nowhere/g++): the native CPU kernels are left out, the portable backend serves"
        in done.stdout
    )
    assert not (tmp_path / "venv" / ".kernels").exists()  # a compiler that comes later is found


@pytest.mark.slow
def test_a_run_without_the_kernels_says_so(tmp_path: Path) -> None:
    # As if the package were not installed, whatever this environment holds.
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['zerogap_kernels'] = None\n")
    path = os.pathsep.join([str(tmp_path), *(entry for entry in sys.path if entry)])
    settings = {"PYTHONPATH": path, "ZEROGAP_BACKEND": "", "XDG_DATA_HOME": str(tmp_path / "data")}
    zerogap = (sys.executable, "-m", "zerogap")
    trained = command(*zerogap, *arguments(tmp_path / "run"), **settings)
    assert trained.returncode == 0, trained.stderr
    words = trained.stdout + trained.stderr
    assert "portable (the package zerogap-kernels is not installed) backend" in words
    assert " 0 different" in words
    refused = command(*zerogap, *arguments(tmp_path / "other", "model.backend=native"), **settings)
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "the package zerogap-kernels is not installed; pip install ./kernels, or use portable" in refused.stderr
