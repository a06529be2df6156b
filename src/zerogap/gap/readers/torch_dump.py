"""Dumps written by ``torch.save``, read without torch and without running anything they hold.

A pickle is a program. This reader knows a handful of harmless building blocks (tensors, arrays, plain containers) and
maps each to a function of its own; any other name in the file ends the reading. It works in a child process with
memory and time limits, since even harmless blocks can ask for any amount of memory.
"""

from __future__ import annotations

import collections
import io
import json
import pickle
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from zerogap.errors import UsageError

SECONDS = 120
MEMORY_FACTOR, MEMORY_BASE = 12, 2 << 30  # bytes of address space: base + factor x file size

_STORAGES = {
    "FloatStorage": "<f4", "DoubleStorage": "<f8", "HalfStorage": "<f2", "BFloat16Storage": "bf16",
    "LongStorage": "<i8", "IntStorage": "<i4", "ShortStorage": "<i2", "CharStorage": "i1", "ByteStorage": "u1",
    "BoolStorage": "?",
}  # fmt: skip


class RefusedError(Exception):
    """The file holds something that is not plain data."""


class _Storage(str):
    """The dtype of a storage class named in the file."""


class _Reader(pickle.Unpickler):
    """An unpickler whose every global is one of ours."""

    def __init__(self, data: bytes, archive: zipfile.ZipFile, prefix: str) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8", errors="replace")
        self._archive, self._prefix = archive, prefix

    def find_class(self, module: str, name: str) -> Any:
        if module == "collections" and name in ("OrderedDict", "defaultdict"):
            return collections.OrderedDict if name == "OrderedDict" else _default_dict
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _Storage(_STORAGES[name])
        if module == "torch._utils" and name == "_rebuild_tensor_v2":
            return _rebuild_tensor
        if module == "torch._utils" and name == "_rebuild_parameter":
            return _first_argument
        if module == "numpy" and name in ("ndarray", "dtype"):
            return _dtype if name == "dtype" else _NdArray
        if module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            if name == "_reconstruct":
                return _NdArray
            if name == "scalar":
                return _numpy_scalar
        if (module, name) in (("_codecs", "encode"), ("builtins", "set"), ("builtins", "list"), ("builtins", "dict")):
            return {"encode": _encode, "set": set, "list": list, "dict": dict}[name]
        raise RefusedError(f"it asks for {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        if not (isinstance(pid, tuple) and len(pid) >= 5 and pid[0] == "storage" and isinstance(pid[1], _Storage)):
            raise RefusedError("it holds an unknown kind of stored object")
        data = self._archive.read(f"{self._prefix}/data/{pid[2]}")
        if pid[1] == "bf16":
            words = np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16
            return words.view(np.float32)
        return np.frombuffer(data, dtype=str(pid[1]))


def _rebuild_tensor(storage: Any, offset: int, size: Any, stride: Any, *_: Any) -> Any:
    span = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if size and min(size) > 0 else 0
    if min((offset, *size, *stride), default=0) < 0 or offset + span > len(storage):
        raise RefusedError("a tensor reaches outside its storage")
    steps = [s * storage.itemsize for s in stride]
    return np.lib.stride_tricks.as_strided(storage[offset:], shape=tuple(size), strides=steps).copy()


def _first_argument(value: Any, *_: Any) -> Any:
    return value


def _default_dict(*_: Any) -> dict[Any, Any]:
    return {}


def _encode(text: str, encoding: str = "latin1") -> bytes:
    return text.encode("latin1" if encoding == "latin1" else "utf-8")


class _Dtype:
    def __init__(self, name: str) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None:
        pass


def _dtype(name: str, *_: Any) -> _Dtype:
    if not isinstance(name, str) or name[:1] not in "fiub" or not name[1:].isdigit():
        raise RefusedError(f"an array of type {name!r}")
    return _Dtype(name)


class _NdArray:
    """A numpy array as its pickle describes it."""

    def __init__(self, *_: Any) -> None:
        self.values: Any = np.zeros(0)

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        values = np.frombuffer(data, dtype=dtype.name)
        self.values = values.reshape(shape, order="F" if fortran else "C")


def _numpy_scalar(dtype: _Dtype, data: bytes) -> Any:
    return np.frombuffer(data, dtype=dtype.name)[0].item()


def load_archive(path: Path) -> Any:
    """Return the plain data of a ``torch.save`` file.

    Raises:
        RefusedError: it holds anything else.
    """
    with zipfile.ZipFile(path) as archive:
        name = next((n for n in archive.namelist() if n.endswith("/data.pkl") or n == "data.pkl"), None)
        if name is None:
            raise RefusedError("it is a zip file without data.pkl")
        return _Reader(archive.read(name), archive, name.rpartition("/")[0]).load()


def _plain(value: Any) -> Any:
    if isinstance(value, _NdArray):
        value = value.values
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    return value


def records_of(dump: Any) -> Iterator[dict[str, Any]]:
    """Yield one record for each sample of a rollout dump, a train dump, or a dictionary of lists."""
    if isinstance(dump, Mapping) and isinstance(dump.get("samples"), list):
        for sample in dump["samples"]:
            if isinstance(sample, Mapping):
                yield {"__kind": "rollout", "step": dump.get("rollout_id"), **_rollout(sample)}
        return
    if isinstance(dump, Mapping) and isinstance(dump.get("rollout_data"), Mapping):
        data = {key: _plain(value) for key, value in dump["rollout_data"].items()}
        cp_size = int(_plain(dump.get("cp_size", 1)) or 1)
        common = {"__kind": "train", "step": dump.get("rollout_id"), "rank": dump.get("rank")}
        for record in _columns(data, common):
            if cp_size > 1:  # slices, to be joined with those of the other ranks
                if dump.get("cp_rank") is None:
                    raise RefusedError(
                        "it is one rank's slices of context parallelism and does not say which (cp_rank); "
                        "dump with context parallelism off"
                    )
                padded = record.get("max_seq_lens") if dump.get("qkv_format") == "bshd" else 0
                record["__cp"] = [int(_plain(dump["cp_rank"])), cp_size, int(padded or 0)]
            yield record
        return
    if isinstance(dump, Mapping):
        yield from _columns({key: _plain(value) for key, value in dump.items()}, {"__kind": "samples"})
        return
    if isinstance(dump, list):
        for item in dump:
            if isinstance(item, Mapping):
                yield {"__kind": "samples", **{str(key): _listed(value) for key, value in item.items()}}
        return
    raise RefusedError(f"a {type(dump).__name__} is neither a rollout nor a train dump")


def _rollout(sample: Mapping[str, Any]) -> dict[str, Any]:
    keep = ("index", "tokens", "response_length", "rollout_log_probs", "loss_mask", "reward", "status", "response")
    record = {key: _listed(sample[key]) for key in keep if sample.get(key) is not None}
    versions = _listed(sample.get("weight_versions") or [])
    if versions and all(str(v).isdigit() for v in versions):
        record["weight_version"] = int(versions[-1])
    return record


def _columns(data: Mapping[str, Any], common: dict[str, Any]) -> Iterator[dict[str, Any]]:
    lists = {key: value for key, value in data.items() if isinstance(value, list | tuple) and len(value)}
    sides = [key for key in lists if key in ("log_probs", "rollout_log_probs") or "logp" in key or "log_prob" in key]
    if not sides:
        raise RefusedError(f"no log-probs in it (it has {', '.join(map(str, list(data)[:12]))})")
    count = len(lists[sides[0]])
    for row in range(count):
        record = dict(common)
        for key, value in lists.items():
            if len(value) == count:
                record[str(key)] = _listed(value[row])
        if "sample_indices" not in record:
            record["sample_indices"] = row
        yield record


def _listed(value: Any) -> Any:
    value = _plain(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool) or value is None else None


def read_dump(path: Path) -> list[dict[str, Any]]:
    """Return the sample records of a ``torch.save`` file, read in a limited child process.

    Raises:
        UsageError: the file was refused, is damaged, or needs more than the limits.
    """
    with tempfile.TemporaryDirectory(prefix="zerogap-dump-") as folder:
        out = Path(folder) / "records.jsonl"
        command = [sys.executable, "-m", "zerogap.gap.readers.torch_dump", str(path), str(out)]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=_child_environment())
        except subprocess.TimeoutExpired:
            raise UsageError(f"{path}: refused: reading took over {SECONDS} s; export it as Parquet") from None
        if ended.returncode != 0:
            reason = (ended.stderr.strip().splitlines() or ["the reading process died"])[-1]
            raise UsageError(f"{path}: refused: {reason}; export it as Parquet or JSONL (see docs/gap.md)")
        with out.open(encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]


def _child_environment() -> dict[str, str]:
    import os

    import zerogap

    root = str(Path(zerogap.__file__).parent.parent)
    # One thread: the stacks of idle ones count as address space.
    return {
        **os.environ,
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
    }


def _child(path: Path, out: Path) -> int:
    import resource

    limit = MEMORY_BASE + MEMORY_FACTOR * path.stat().st_size
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    try:
        with out.open("w", encoding="utf-8") as file:
            for record in records_of(load_archive(path)):
                file.write(json.dumps(record) + "\n")
    except RefusedError as error:
        print(error, file=sys.stderr)
        return 1
    except MemoryError:
        print(f"it needs more than {limit >> 20} MiB", file=sys.stderr)
        return 1
    except Exception as error:
        print(f"damaged file ({type(error).__name__}: {error})".replace("\n", " ")[:200], file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_child(Path(sys.argv[1]), Path(sys.argv[2])))
