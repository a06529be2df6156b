"""Weights from and to Hugging Face folders (safetensors, single or sharded), and their digests."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from zerogap.errors import UsageError, nearest
from zerogap.files import write_atomic, write_text_atomic
from zerogap.models.config import ModelConfig
from zerogap.models.decoder import Decoder, WeightsFormat

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Buffers that older checkpoints carry and the decoder computes itself.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".self_attn.bias", ".self_attn.masked_bias")


def load_decoder(folder: Path, dtype: torch.dtype = torch.float32, weights: WeightsFormat = "float32") -> Decoder:
    """Load a Hugging Face model folder.

    Args:
        folder: holds config.json and model.safetensors, or shards with their index.
        dtype: weights are converted to it, to nearest even; float32, bfloat16, float16 or, for the oracle, float64.
        weights: what the forward computes with (``Decoder.compute_with``).

    Raises:
        UsageError: something is missing, truncated, of the wrong shape or not finite; it names the file and tensor.
    """
    decoder = Decoder(ModelConfig.from_folder(folder), dtype).compute_with(weights)
    wanted = dict(decoder.state_dict())
    missing = set(wanted)
    for path in _weight_files(folder):
        missing -= _load_file(path, wanted, tied=decoder.config.tie_embeddings)
    if missing:
        name = min(missing)
        raise UsageError(f"{folder}: {len(missing)} tensors are missing, the first is {name}; is the checkpoint whole?")
    return decoder


def _weight_files(folder: Path) -> list[Path]:
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        hint = "; convert *.bin to safetensors first" if any(folder.glob("*.bin")) else ""
        raise UsageError(f"{folder}: no {SINGLE} and no {INDEX}{hint}")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        paths = [folder / Path(name).name for name in names]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{index}: not a safetensors index ({error})") from None
    for path in paths:
        if not path.is_file():
            raise UsageError(f"{path}: no such file, but {INDEX} names it")
    return paths


def _load_file(path: Path, wanted: Mapping[str, Tensor], tied: bool) -> set[str]:
    """Copy one file's tensors into ``wanted``; return the names loaded."""
    loaded = set()
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                if name.endswith(_IGNORED_SUFFIXES) or (tied and name == "lm_head.weight"):
                    continue
                if name not in wanted:
                    raise UsageError(f"{path}: tensor {name} has no place in this model{nearest(name, wanted)}")
                _copy_tensor(path, name, file.get_tensor(name), wanted[name])
                loaded.add(name)
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path}: not readable as safetensors ({error}); is it truncated? Fetch it again") from None
    return loaded


def _copy_tensor(path: Path, name: str, value: Tensor, target: Tensor) -> None:
    if value.shape != target.shape:
        raise UsageError(f"{path}: {name} has shape {list(value.shape)}, config.json asks for {list(target.shape)}")
    if not value.is_floating_point():
        raise UsageError(f"{path}: {name} has dtype {value.dtype}; quantised weights are not supported")
    if not bool(torch.isfinite(value).all()):
        raise UsageError(f"{path}: {name} holds NaN or infinite weights")
    target.copy_(value)


def save_decoder(decoder: Decoder, folder: Path, source: Path) -> None:
    """Write ``decoder`` as a Hugging Face folder: its weights, and the configuration and tokenizer files of ``source``.

    ``folder`` is created if need be; each file is written whole or not at all. The configuration names the number
    format that is written: readers round the weights to the one it names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in side_files(source):
        write_atomic(folder / path.name, partial(shutil.copyfile, path))
    _name_format(folder / "config.json", str(decoder.dtype).removeprefix("torch."))
    tensors = {name: value.detach().contiguous() for name, value in decoder.state_dict().items()}
    write_atomic(folder / SINGLE, lambda temporary: save_file(tensors, temporary, metadata={"format": "pt"}))


def _name_format(path: Path, dtype: str) -> None:
    """Set ``dtype`` (its older name: ``torch_dtype``) in a ``config.json``."""
    values = json.loads(path.read_text(encoding="utf-8"))
    names = [name for name in ("dtype", "torch_dtype") if values.get(name) is not None] or ["torch_dtype"]
    if any(values.get(name) != dtype for name in names):
        write_text_atomic(path, json.dumps(values | dict.fromkeys(names, dtype), indent=2, ensure_ascii=False) + "\n")


def side_files(folder: Path) -> list[Path]:
    """Return the configuration and tokenizer files of a Hugging Face folder, in the order of their names."""
    suffixes = (".json", ".txt", ".model", ".jinja")
    return sorted(p for p in folder.iterdir() if p.is_file() and p.suffix in suffixes and p.name != INDEX)


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a SHA-256 over the names, dtypes, shapes and bytes of all tensors, in hex."""
    whole = hashlib.sha256()
    for name, digest in sorted(tensor_digests(tensors).items()):
        whole.update(f"{name} {digest}\n".encode())
    return whole.hexdigest()


def tensor_digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return a SHA-256 per tensor, in hex."""
    with ThreadPoolExecutor(max_workers=max(1, torch.get_num_threads())) as pool:
        return dict(zip(tensors, pool.map(_digest, tensors.values()), strict=True))


def _digest(tensor: Tensor) -> str:
    tensor = tensor.detach().contiguous()
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}\n".encode())
    digest.update(tensor.cpu().view(torch.uint8).reshape(-1).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()
