"""Models are found where they are, and what is not there is said in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zerogap.errors import UsageError
from zerogap.models.hub import check_folder, resolve_model


def make_model(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text("{}")
    return folder


def refused(path_or_name: str) -> str:
    with pytest.raises(UsageError) as caught:
        resolve_model(path_or_name)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_builtin_model_is_complete():
    folder = resolve_model("builtin:tiny-qwen3")
    names = {p.name for p in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"} <= names
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3"
    assert (folder / "model.safetensors").stat().st_size < 5_000_000


def test_unknown_builtin_names_the_nearest():
    assert "did you mean 'tiny-qwen3'" in refused("builtin:tiny-qwen")
    assert "builtin:tiny-qwen3" in refused("builtin:")
    assert "no built-in model" in refused("builtin:../data/tiny-qwen3")


def test_local_folder(tmp_path):
    folder = make_model(tmp_path / "model", "config.json", "model.safetensors")
    assert resolve_model(str(folder)) == folder
    sharded = make_model(tmp_path / "sharded", "config.json", "model.safetensors.index.json")
    assert resolve_model(str(sharded)) == sharded


def test_missing_folder_names_the_nearest(tmp_path):
    make_model(tmp_path / "qwen3-small", "config.json")
    assert "did you mean 'qwen3-small'" in refused(str(tmp_path / "qwen3-smal"))
    assert "does not exist either" in refused(str(tmp_path / "no" / "such"))


def test_mistyped_relative_path_does_not_go_to_the_hub(tmp_path, monkeypatch):
    make_model(tmp_path / "models" / "qwen3", "config.json")
    monkeypatch.chdir(tmp_path)
    assert "did you mean 'qwen3'" in refused("models/qwen")


def test_incomplete_folders_are_refused(tmp_path):
    assert "no config.json; did you mean 'config.jsn'" in refused(str(make_model(tmp_path / "a", "config.jsn")))
    no_weights = make_model(tmp_path / "b", "config.json", "pytorch_model.bin")
    assert "it holds pytorch_model.bin" in refused(str(no_weights))
    assert "is a file" in refused(str(no_weights / "config.json"))


def test_check_folder_returns_its_folder(tmp_path):
    folder = make_model(tmp_path / "m", "config.json", "model.safetensors")
    assert check_folder(folder) is folder


def test_hub_name_offline_is_one_line(tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert "could not be fetched from the hub" in refused("zerogap-tests/no-such-model")


def test_malformed_hub_name_is_one_line():
    assert "not a valid hub name" in refused("owner/bad..name--")
