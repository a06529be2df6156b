"""Checkpoints that are whole or absent, and refused if a single byte changed.

A checkpoint is a folder ``<run>/checkpoints/step-000012``:

    model/                              a Hugging Face folder, also readable without zerogap
    optimiser-00001-of-00003.safetensors
    state.json                          step, updates, digests, numerics fingerprint, the caller's own state
    manifest.json                       size and SHA-256 of every other file

It is written under a hidden temporary name, flushed to the disk and renamed, so that an interrupted save leaves the
earlier checkpoints as they were. There is no pickle: reading a checkpoint runs no code from it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from zerogap.errors import UsageError
from zerogap.files import fsync, umask
from zerogap.models.decoder import Decoder
from zerogap.models.weights import load_decoder, save_decoder, weights_digest
from zerogap.trainer.optimiser import Optimiser

SCHEMA = "zerogap.checkpoint"
SCHEMA_VERSION = 1

# Serialising copies what it writes, so the optimiser's state goes out in parts of bounded size.
_SHARD_BYTES = 256 << 20
_TEMPORARY = ".tmp-"
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True)
class RunState:
    """What a run must know to go on, besides weights and moments.

    Attributes:
        step: rollout steps done; also names the checkpoint's folder.
        updates: optimiser updates done; the schedule's place.
        config_digest: of the resolved configuration.
        weights_digest: of the model's weights.
        numerics: what the bits depend on (torch version, CPU path, threads, …), JSON values.
        extra: the caller's own state, JSON values.
    """

    step: int
    updates: int
    config_digest: str
    weights_digest: str
    numerics: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on the disk whose files have been checked against its manifest."""

    folder: Path
    state: RunState

    @property
    def model_folder(self) -> Path:
        """The Hugging Face folder of the weights."""
        return self.folder / "model"


def save_checkpoint(
    run_dir: Path, state: RunState, decoder: Decoder, source_folder: Path, optimiser: Optimiser, keep: int
) -> Path:
    """Write ``<run_dir>/checkpoints/step-…`` and drop all but the newest ``keep``.

    A checkpoint of the same step is replaced. Those of later steps go: the run went back to an older one, and their
    steps come again.

    Args:
        run_dir: the run's folder.
        state: goes into state.json; its ``weights_digest`` must be the decoder's.
        decoder: the model.
        source_folder: Hugging Face folder whose configuration and tokenizer files are copied.
        optimiser: its moments and counts are written.
        keep: number of checkpoints that stay, at least 1.

    Returns:
        The checkpoint's folder.

    Raises:
        UsageError: the disk is full or cannot be written; the earlier checkpoints are untouched.
    """
    assert keep >= 1, "a run keeps at least its newest checkpoint"
    root = run_dir / "checkpoints"
    target = root / f"step-{state.step:06d}"

    def write(folder: Path) -> None:
        save_decoder(decoder, folder / "model", source_folder)
        _save_optimiser(optimiser, folder)
        (folder / "state.json").write_text(_dump(asdict(state)), encoding="utf-8")

    try:
        root.mkdir(parents=True, exist_ok=True)
        fsync(run_dir)
        _sweep(root)
        _write_folder(target, write)
    except Exception as error:
        if not _is_io_failure(error):
            raise
        reason = "the disk is full" if _is_full(error) else _one_line(error)
        raise UsageError(
            f"cannot save checkpoint {target}: {reason}; nothing of it was kept and earlier checkpoints are unchanged; "
            "free space or set another run.dir, then --resume auto"
        ) from error
    found = checkpoints(run_dir)
    place = found.index(target)
    for other in [*found[: max(0, place + 1 - keep)], *found[place + 1 :]]:
        shutil.rmtree(_set_aside(other))
    return target


def checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoint folders of a run, oldest step first."""
    folders = [folder for folder in (run_dir / "checkpoints").glob("step-*") if _step_of(folder) is not None]
    return sorted(folders, key=lambda folder: int(folder.name[5:]))


def _step_of(folder: Path) -> int | None:
    digits = folder.name.removeprefix("step-")
    return int(digits) if digits.isascii() and digits.isdigit() else None


def latest(run_dir: Path) -> Path | None:
    """Return the newest checkpoint folder of a run, or None. It is not checked here."""
    return next(reversed(checkpoints(run_dir)), None)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Check every file of a checkpoint against its manifest and read its state.

    Raises:
        UsageError: no checkpoint there, or a file that is missing, added, truncated or altered, by name.
    """
    manifest = _read_json(folder / "manifest.json", folder)
    listed = manifest.get("files")
    if manifest.get("schema") != SCHEMA or manifest.get("schema_version") != SCHEMA_VERSION or type(listed) is not dict:
        raise UsageError(f"{folder / 'manifest.json'} is not a {SCHEMA} of version {SCHEMA_VERSION}{_older(folder)}")
    present = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if not path.is_dir()}
    del present["manifest.json"]
    if set(present) != set(listed):
        name = min(set(present) ^ set(listed))
        what = "is missing" if name in listed else "is not in its manifest"
        raise UsageError(f"checkpoint file {folder / name} {what}{_older(folder)}")
    for name, path in sorted(present.items()):
        found = _fingerprint(path)
        if found != listed[name]:
            raise UsageError(
                f"checkpoint file {path} was truncated or altered: {found['bytes']} bytes with SHA-256 "
                f"{found['sha256'][:12]}…, its manifest says otherwise{_older(folder)}"
            )
    values = _read_json(folder / "state.json", folder)
    known = {entry.name for entry in fields(RunState)}
    if set(values) != known:
        raise UsageError(f"{folder / 'state.json'} must hold {sorted(known)}, not {sorted(values)}")
    return Checkpoint(folder, RunState(**values))


def load_weights(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> Decoder:
    """Load the model of a checkpoint.

    Raises:
        UsageError: its weights are not those that the run's state speaks of.
    """
    decoder = load_decoder(checkpoint.model_folder, dtype=dtype)
    if weights_digest(decoder.state_dict()) != checkpoint.state.weights_digest:
        raise UsageError(f"the weights in {checkpoint.model_folder} are not those of its state.json (other digest)")
    return decoder


def restore_optimiser(checkpoint: Checkpoint, optimiser: Optimiser) -> None:
    """Give an optimiser the moments and counts of a checkpoint, bit for bit.

    Raises:
        UsageError: the state fits no parameter of the optimiser's model.
    """
    optimiser.restore(checkpoint.state.updates, _read_tensors(checkpoint.folder))


def numerics_differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return ``"name: saved … , now …"`` for everything that differs between two numerics fingerprints."""
    absent = "absent"
    return [
        f"{name}: saved {saved.get(name, absent)}, now {now.get(name, absent)}"
        for name in sorted({*saved, *now})
        if saved.get(name, absent) != now.get(name, absent)
    ]


def _save_optimiser(optimiser: Optimiser, folder: Path) -> None:
    shards: list[dict[str, Tensor]] = []
    room = 0
    for name, tensor in optimiser.state_tensors().items():
        if not shards or tensor.nbytes > room:
            shards.append({})
            room = _SHARD_BYTES
        shards[-1][name] = tensor.contiguous()
        room -= tensor.nbytes
    for index, shard in enumerate(shards, 1):
        save_file(shard, folder / f"optimiser-{index:05d}-of-{len(shards):05d}.safetensors")


def _read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for path in sorted(folder.glob("optimiser-*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                # A copy of its own: moments must not live in a mapping of the file.
                yield name, file.get_tensor(name).clone()


def _write_folder(target: Path, write: Callable[[Path], None]) -> None:
    temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=f"{_TEMPORARY}{target.name}-"))
    try:
        os.chmod(temporary, 0o777 & ~umask())
        write(temporary)
        files = sorted(path for path in temporary.rglob("*") if not path.is_dir())
        listed = {path.relative_to(temporary).as_posix(): _fingerprint(path) for path in files}
        manifest = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "files": listed}
        (temporary / "manifest.json").write_text(_dump(manifest), encoding="utf-8")
        for path in [*temporary.rglob("*"), temporary]:
            fsync(path)
        replaced = _set_aside(target) if target.exists() else None
        os.rename(temporary, target)
        fsync(target.parent)
        if replaced is not None:
            shutil.rmtree(replaced)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _set_aside(folder: Path) -> Path:
    """Rename a checkpoint that is to go: a deletion cut short must not leave half of one under its name."""
    doomed = folder.with_name(f"{_TEMPORARY}old-{folder.name}-{os.getpid()}")
    os.rename(folder, doomed)
    return doomed


def _sweep(root: Path) -> None:
    """Remove what killed saves left behind."""
    for leftover in root.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(leftover)


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _dump(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False, separators=(",", ":"))


def _read_json(path: Path, folder: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"no checkpoint in {folder}: {path.name}: {error.strerror}{_older(folder)}") from error
    except ValueError as error:
        raise UsageError(f"checkpoint file {path} is not JSON ({_one_line(error)}){_older(folder)}") from error
    if not isinstance(value, dict):
        raise UsageError(f"checkpoint file {path} does not hold a JSON object{_older(folder)}")
    return value


def _older(folder: Path) -> str:
    """Return what to do instead: the next older checkpoint, if there is one."""
    step = _step_of(folder)
    if step is None:
        return ""
    older = [other for other in checkpoints(folder.parent.parent) if int(other.name[5:]) < step]
    return f"; an older one can be tried: --resume {older[-1]}" if older else ""


def _is_full(error: BaseException) -> bool:
    # safetensors wraps the system's error in its own, with the number in its text.
    return (isinstance(error, OSError) and error.errno in _NO_SPACE) or "os error 28" in str(error)


def _is_io_failure(error: BaseException) -> bool:
    return isinstance(error, OSError) or "os error" in str(error)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
