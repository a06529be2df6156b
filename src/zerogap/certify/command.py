"""``zerogap certify``: runs every proof, shows a table, writes the certificate."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from zerogap import __version__
from zerogap.certify.attention import check_attention
from zerogap.certify.paths import check_paths
from zerogap.certify.rows import THREADS, RowVerdict, check_rows
from zerogap.certify.subjects import CPU, Place, control_subject, our_subjects, torch_subjects
from zerogap.certify.whole import (
    WholeVerdict,
    check_end_to_end,
    check_gradients,
    check_repeatability,
    random_decoder,
)
from zerogap.console import counted, message, out, print_json
from zerogap.engine import EngineConfig
from zerogap.engine.kernels import prepare_gpu
from zerogap.errors import ExitCode, UsageError, nearest
from zerogap.facts.certificate import canonical, certificate_folder, cpu_identity, sealed, write_certificate
from zerogap.files import check_writable
from zerogap.models.config import ModelConfig
from zerogap.models.hub import resolve_model
from zerogap.models.tokenizer import load_tokenizer
from zerogap.models.weights import load_decoder
from zerogap.numerics import NUMERICS_VERSION, code_digest, kernels_digest
from zerogap.ops import ambient, backend
from zerogap.threads import thread_count

SCHEMA, SCHEMA_VERSION = "zerogap.certify", 1


@dataclass(frozen=True)
class Line:
    """One row of the table: a test, how much it compared, and how it ended."""

    test: str
    comparisons: int
    holds: bool
    detail: str

    @staticmethod
    def of_rows(verdict: RowVerdict) -> Line:
        """Return the line of an op's row law."""
        detail = "" if verdict.broken is None else str(verdict.broken)
        return Line(f"row law: {verdict.name}", verdict.comparisons, verdict.broken is None, detail)

    @staticmethod
    def of_whole(verdict: WholeVerdict) -> Line:
        """Return the line of a test of the whole."""
        return Line(verdict.name, verdict.comparisons, verdict.holds, verdict.detail)


def certify_command(
    model: str,
    ops: str,
    backend_name: str,
    full: bool,
    as_json: bool,
    output: Path | None,
    device: str = "cpu",
    dtype: str = "auto",
) -> int:
    """Run ``zerogap certify``; return its exit code.

    Args:
        model: folder, hub name or ``builtin:tiny-qwen3``.
        ops: ``zerogap`` certifies ours; ``torch`` shows which of torch's own ops break the row law.
        backend_name: which backend to certify; ``auto`` is the one that a run would use.
        full: more shapes and sequences.
        as_json: one JSON object on stdout.
        output: where the certificate goes; None = the certificate folder.
        device: ``cpu`` or a GPU by number, such as ``cuda:0``; never guessed.
        dtype: ``float32``, ``bfloat16``, ``float16``, or ``auto``: bfloat16 on a GPU, float32 on the CPU.

    Raises:
        UsageError: the model cannot be read, backend, device or dtype is not here, or ``output`` cannot be written.
    """
    torch.set_num_threads(thread_count())
    place = place_of(device, dtype)
    if place.device.type != "cpu" and (ops == "torch" or backend_name != "auto"):
        raise UsageError(f"--device {device}: --backend and --ops torch are for the CPU; a GPU has one backend")
    if backend_name != "auto":
        backend.choose(backend_name, "--backend")
    folder = resolve_model(model)
    config = ModelConfig.from_folder(folder)
    if output is not None and ops == "zerogap":
        _require_writable(output)
    show: Callable[[str], None] = (lambda text: None) if as_json else message
    if ops == "zerogap":
        show(f"backend: {backend.describe()}")
    with ambient.guard():
        lines = _torch_lines(config, full, show) if ops == "torch" else _lines(folder, config, full, show, place)
    holds = all(line.holds for line in lines)
    record = None if ops == "torch" else _certificate(model, config, lines, full, place)
    path = None
    if record is not None:
        path = output or certificate_folder() / _file_name(record)
        write_certificate(record, path)
    _print(lines, holds, path, f"{model} on {device}" if device != "cpu" else model, ops, as_json)
    return int(ExitCode.HOLDS if holds else ExitCode.DOES_NOT_HOLD)


def _require_writable(output: Path) -> None:
    try:
        check_writable(output)
    except OSError as error:
        raise UsageError(f"--output {output}: cannot be written ({error.strerror}); give another file") from None


def place_of(device: str, dtype: str) -> Place:
    """Return where to certify.

    Raises:
        UsageError: the device is not here or not named by number, or the dtype is none that it computes in.
    """
    try:
        found = torch.device(device)
    except RuntimeError:
        raise UsageError(f"--device {device!r}: must be cpu or a GPU by number, such as cuda:0") from None
    if found.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {device}: must be cpu or a GPU by number, such as cuda:0 (AMD ones too)")
    if found.type == "cuda":
        count = torch.cuda.device_count()
        if found.index is None:
            raise UsageError(f"--device {device}: which of {count} GPUs? name one by number, such as cuda:0")
        if found.index >= count:
            raise UsageError(f"--device {device}: PyTorch {torch.__version__} can use {count} GPUs of this machine")
    dtypes = {"float32": torch.float32} | (
        {} if found.type == "cpu" else {"bfloat16": torch.bfloat16, "float16": torch.float16}
    )
    name = ("float32" if found.type == "cpu" else "bfloat16") if dtype == "auto" else dtype
    if name not in dtypes:
        raise UsageError(f"--dtype {dtype}: on {device} one of {', '.join(dtypes)}{nearest(dtype, dtypes)}")
    return Place(found, dtypes[name])


def _lines(
    folder: Path, config: ModelConfig, full: bool, show: Callable[[str], None], place: Place = CPU
) -> list[Line]:
    if place.device.type != "cpu":
        with contextlib.ExitStack() as stack:
            told = stack.enter_context(counted("building kernels")) if show is message else lambda *_: None
            prepare_gpu(config, place.dtype, EngineConfig(num_pages=1).page_size, place.device, told)
    threads = THREADS if place.device.type == "cpu" else (1,)  # host threads are no company on a GPU
    control = check_rows(control_subject(config, place), full, threads)
    found = control.broken is not None
    detail = f"found: {control.broken}" if found else "an op made to break the law passed: these tests prove nothing"
    lines = [Line("negative control: K split by row count", control.comparisons, found, detail)]
    for subject in our_subjects(config, place):
        show(f"row law of {subject.name} ...")
        lines.append(Line.of_rows(check_rows(subject, full, threads)))
    show("row law of attention ...")
    lines.append(Line.of_rows(check_attention(config, full, threads, place)))
    if place.device.type == "cpu" and backend.cpu_backend() == "native":
        show("every CPU path ...")
        lines.append(Line.of_whole(check_paths(config, full)))
    show("gradients and repeatability ...")
    found_backward = (*check_gradients(config, place), check_repeatability(config, place))
    lines += [Line.of_whole(verdict) for verdict in found_backward]
    show("engine against trainer ...")
    decoder = load_decoder(folder) if any(folder.glob("*.safetensors*")) else random_decoder(config)
    decoder.dtype = place.dtype
    decoder.to(place.device, place.dtype)
    tokenizer = load_tokenizer(folder)
    lines += [Line.of_whole(verdict) for verdict in check_end_to_end(decoder, tokenizer, full)]
    if full and place.device.type == "cpu" and backend.cpu_backend() == "native":
        show("engine against trainer, weights in bfloat16 ...")
        decoder.compute_with("bfloat16")
        lines += [Line.of_whole(verdict) for verdict in check_end_to_end(decoder, tokenizer, full)]
    return lines


def _torch_lines(config: ModelConfig, full: bool, show: Callable[[str], None]) -> list[Line]:
    lines = []
    for subject in torch_subjects(config):
        show(f"row law of torch's {subject.name} ...")
        lines.append(Line.of_rows(check_rows(subject, full)))
    return lines


def _certificate(model: str, config: ModelConfig, lines: list[Line], full: bool, place: Place) -> dict[str, Any]:
    results = [vars(line) for line in lines]
    name = backend.cpu_backend() if place.device.type == "cpu" else backend.name_on(place.device)
    return sealed(
        {
            "issued": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "nature": "self-issued: the digest is a checksum, no signature",
            "holds": all(line.holds for line in lines),
            "device": _device(place.device),
            "software": {
                "zerogap": __version__,
                "numerics_version": NUMERICS_VERSION,
                "backend": backend.name_on(place.device),
                "kernels_digest": kernels_digest() if name == "native" else None,
                "cpu_path": backend.cpu_path() if name == "native" else None,
                **_gpu_software(place.device),
                "cpu_paths": list(backend.cpu_paths()) if name == "native" else None,
                "code_digest": code_digest(),
                "torch": torch.__version__,
                "cpu_capability": torch.backends.cpu.get_cpu_capability(),
                "compiler": _compiler(),
                "python": platform.python_version(),
            },
            "threads": list(THREADS) if place.device.type == "cpu" else [],
            "model": {"name": model, **_shape(config)},
            "dtype": str(place.dtype).removeprefix("torch."),
            "extent": "full" if full else "quick",
            "tests": results,
            "results_digest": hashlib.sha256(canonical({"tests": results}).encode()).hexdigest(),
        }
    )


def _shape(config: ModelConfig) -> dict[str, Any]:
    """Return the sizes that ``zerogap check`` compares with the model asked about."""
    return {
        "family": config.family,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "tied_embeddings": config.tie_embeddings,
        "rope": config.rope.variant,
    }


def _device(device: torch.device) -> dict[str, str]:
    """Return what tells one kind of device from another."""
    if device.type == "cpu":
        return {"kind": "cpu", **cpu_identity()}
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        architecture = properties.gcnArchName.split(":")[0]
    else:
        architecture = f"sm_{properties.major}{properties.minor}"
    return {"kind": "gpu", "model": properties.name, "architecture": architecture}


def _gpu_software(device: torch.device) -> dict[str, Any]:
    """Return driver, CUDA or ROCm, Triton, and what the kernel table chose in this process."""
    if device.type == "cpu":
        return {}
    import triton

    from zerogap.ops.triton.table import choices
    from zerogap.ops.triton.targets import detect, pinned

    return {
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "triton": triton.__version__,
        "kernels": choices(),
        "switches": pinned(detect(device)),
    }


def _driver() -> str:
    """Return the driver's version, or ``unknown``."""
    if torch.version.hip:
        path = Path("/sys/module/amdgpu/version")
        return path.read_text().strip() if path.is_file() else "unknown"
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # any failure of the driver's library, which is not needed for more
        return "unknown"


def _compiler() -> str:
    """Return the switches that torch was built with and that can change bits."""
    text = torch.__config__.show()
    found = re.findall(r"(?:Intel\(R\) oneAPI Math Kernel Library Version \S+|MKL-DNN v\S+|-ffast-math|GCC \S+)", text)
    return ", ".join(dict.fromkeys(found))


def _file_name(record: dict[str, Any]) -> str:
    plain = re.sub(r"[^A-Za-z0-9.-]+", "-", record["model"]["name"]).strip("-")
    return f"{plain}-{record['digest'][:12]}.json"


def _print(lines: list[Line], holds: bool, path: Path | None, model: str, ops: str, as_json: bool) -> None:
    first = next((line for line in lines if not line.holds), None)
    if as_json:
        body = {
            "model": model,
            "ops": ops,
            "backend": None if ops == "torch" else backend.describe(),
            "holds": holds,
            "first_break": None if first is None else vars(first),
            "tests": [vars(line) for line in lines],
            "certificate": None if path is None else str(path),
        }
        print_json(SCHEMA, SCHEMA_VERSION, json.loads(json.dumps(body)))
        return
    table = Table("test", "compared", "", "detail", header_style="bold")
    for line in lines:
        table.add_row(line.test, f"{line.comparisons:,}", "holds" if line.holds else "BREAKS", line.detail)
    console = out()
    console.print(table)
    if ops == "torch":
        broken = sum(not line.holds for line in lines)
        console.print(f"{broken} of {len(lines)} of torch's own ops break the row law at the shapes of {model} here")
    elif first is not None:
        console.print(f"does not hold: {first.test}: {first.detail}")
    else:
        console.print(f"holds: engine and trainer agree bit for bit on this device for {model}")
    if path is not None:
        console.print(f"certificate: {path}", soft_wrap=True)
