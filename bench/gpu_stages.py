"""The stages of ``bench/gpu.sh``: each measures one thing on one device and writes its record line by line.

    python bench/gpu_stages.py STAGE DEVICE RECORD [--dry]

Exit code: 0 what was to hold holds, 1 it does not, 3 it cannot run here.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import gpu_kernels
from zerogap.files import write_text_atomic

if TYPE_CHECKING:
    from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
HOLDS, BREAKS, SKIPPED = 0, 1, 3


class Record:
    """Facts and table rows of a stage, on disk after each addition."""

    def __init__(self, path: Path, device: str, dry: bool) -> None:
        self.path, self.device, self.dry = path, device, dry
        self.facts: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []

    def fact(self, **facts: Any) -> None:
        """Add facts."""
        self.facts.update(facts)
        self._write()

    def row(self, **row: Any) -> None:
        """Add a line to the table."""
        self.rows.append(row)
        self._write()

    def _write(self) -> None:
        body = {"facts": self.facts, "rows": self.rows}
        write_text_atomic(self.path, json.dumps(body, indent=1, sort_keys=False) + "\n")


def machine(record: Record) -> int:
    """Name device, driver and versions, and measure what memory gives: the yardstick of the shares below."""
    import torch

    import gpu_timing

    record.fact(python=sys.version.split()[0], torch=torch.__version__, cuda=torch.version.cuda, hip=torch.version.hip)
    record.fact(**{name: _version(name) for name in ("triton", "transformers", "numpy")})
    if record.device != "cpu":
        properties = torch.cuda.get_device_properties(record.device)
        record.fact(
            gpu=properties.name,
            capability=f"{properties.major}.{properties.minor}",
            memory_gib=round(properties.total_memory / 2**30, 1),
            driver=_driver(),
        )
    record.fact(copy_gb_per_s=round(gpu_timing.copy_bandwidth(record.device, record.dry) / 1e9, 1))
    return HOLDS


def kernels(record: Record) -> int:
    """Build the kernels of the other stages with all cores into Triton's cache, where those find them."""
    if _version("triton") == "not installed":
        print("Triton is not installed")
        return SKIPPED
    if record.dry:
        architecture, workers = "sm_90", 1
    else:
        import torch

        from zerogap.ops.triton.targets import detect

        architecture, workers = detect(torch.device(record.device)).name, max(1, min(16, len(os.sched_getaffinity(0))))
    record.fact(architecture=architecture, workers=workers)
    cases = ["attention"] if record.dry else list(gpu_kernels.CASES)
    wanted: dict[str, gpu_kernels.Spec] = {}
    for case, found in gpu_kernels.kernels_of(cases, architecture, 60.0 * (6 if record.dry else 1)).items():
        if isinstance(found, str):  # its kernels are built as it runs
            record.row(stage=case, kernels="unknown", why=found)
            continue
        record.row(stage=case, kernels=len(found), why="")
        wanted |= {json.dumps(spec, sort_keys=True): spec for spec in found}
    specs = list(wanted.values())[: 1 if record.dry else None]
    built, cpu_seconds, failed = 0, 0.0, []
    for spec, outcome in gpu_kernels.build_all(specs, architecture, workers):
        if isinstance(outcome, str):
            failed.append(f"{spec['kernel']}: {outcome}")
            print(failed[-1], flush=True)
        else:
            built, cpu_seconds = built + 1, cpu_seconds + outcome
        record.fact(kernels=len(specs), built=built, failed=len(failed), seconds_per_kernel=cpu_seconds / max(1, built))
    return BREAKS if failed else HOLDS


def certify(record: Record) -> int:
    """Run ``zerogap certify --quick`` and keep its certificate."""
    certificate = record.path.parent / "certificate.json"
    device = ["--backend", "portable"] if record.dry else ["--device", record.device]
    command = [*_zerogap(), "certify", "--quick", "--json", "--output", str(certificate), *device]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode not in (0, 1):
        print(done.stderr)
        return done.returncode
    body = json.loads(done.stdout)
    record.fact(certificate=certificate.name, holds=body["holds"])
    for test in body["tests"]:
        record.row(test=test["test"], compared=test["comparisons"], holds=test["holds"], detail=test["detail"][:120])
    return HOLDS if body["holds"] else BREAKS


def qwen3(record: Record) -> int:
    """Sample with the engine from a model of Qwen3-0.6B's shape with random weights, and score with the trainer."""
    import gpu_models
    from zerogap.certify import whole

    decoder, tokenizer = gpu_models.random_model("tiny" if record.dry else "0.6b", record.device)
    record.fact(parameters=sum(p.numel() for p in decoder.parameters()), dtype=str(decoder.dtype))
    holds = True
    for settings in whole._SAMPLERS:  # one at a time, so that what was compared is on disk
        with mock.patch.object(whole, "_SAMPLERS", (settings,)):
            (verdict,) = whole.check_end_to_end(decoder, tokenizer, full=False)
        holds &= verdict.holds
        record.row(test=verdict.name, tokens=verdict.comparisons, holds=verdict.holds, detail=verdict.detail)
    return HOLDS if holds else BREAKS


def linear(record: Record) -> int:
    """Time the exact linear layer beside the library's on the layers of Qwen3-4B, by rows, with cold weights.

    Rows must have the bits there that they have alone; whether the library's do is told, too.
    """
    import torch
    from torch.nn import functional

    import gpu_models
    import gpu_timing
    from zerogap import ops

    dtype = torch.float32 if record.dry else torch.bfloat16
    peak = gpu_timing.copy_bandwidth(record.device, record.dry)
    shares: dict[str, list[float]] = {"of_library_from_512_rows": [], "of_bandwidth_1_to_16_rows": []}
    for name, out_features, in_features, unit in gpu_models.layers("tiny" if record.dry else "4b"):
        segments = ops.segment_count(in_features, unit) if unit else 1
        weights = gpu_timing.cold_weights(out_features, in_features, dtype, record.device, record.dry)
        for rows in (1, 16) if record.dry else (1, 4, 16, 64, 512, 4096):
            x = torch.randn(rows, in_features, device=record.device, dtype=dtype)

            def exact(weights: list[torch.Tensor] = weights, x: torch.Tensor = x, segments: int = segments) -> None:
                for weight in weights:
                    ops.linear(x, weight, None, segments)

            def library(weights: list[torch.Tensor] = weights, x: torch.Tensor = x) -> None:
                for weight in weights:
                    functional.linear(x, weight)

            ours, theirs = (gpu_timing.seconds(call, record.device) / len(weights) for call in (exact, library))
            size = dtype.itemsize * (out_features * in_features + rows * (in_features + out_features))
            row = {
                "layer": name, "out": out_features, "in": in_features, "segments": segments, "rows": rows,
                "exact_us": ours * 1e6, "library_us": theirs * 1e6, "of_library": theirs / ours,
                "of_bandwidth": size / ours / peak, "tflop_per_s": 2e-12 * rows * in_features * out_features / ours,
                "row_law": _row_law(lambda x: ops.linear(x, weights[0], None, segments), x),  # noqa: B023
                "library_row_law": _row_law(lambda x: functional.linear(x, weights[0]), x),  # noqa: B023
            }  # fmt: skip
            record.row(**row)
            if rows >= 512:
                shares["of_library_from_512_rows"].append(row["of_library"])
            if rows <= 16:
                shares["of_bandwidth_1_to_16_rows"].append(row["of_bandwidth"])
            record.fact(**{key: round(_geometric_mean(values), 3) for key, values in shares.items() if values})
    return HOLDS if all(row["row_law"] for row in record.rows) else BREAKS


def attention(record: Record) -> int:
    """Time one decode step of Qwen3-4B's attention and state its share of memory bandwidth.

    A row must have the bits that it has alone, and that it has as the last one of a prefill.
    """
    import torch

    import gpu_timing
    from zerogap import ops

    heads, groups, size, page = (4, 2, 16, 16) if record.dry else (32, 8, 128, 16)
    dtype = torch.float32 if record.dry else torch.bfloat16
    peak = gpu_timing.copy_bandwidth(record.device, record.dry)
    cases = ((64, 2),) if record.dry else ((1024, 1), (1024, 64), (8192, 1), (8192, 16), (32768, 1), (32768, 8))
    for context, sequences in cases:
        pages = torch.randperm(sequences * context // page, generator=torch.Generator().manual_seed(0))
        tables = pages.view(sequences, -1).tolist()
        plan = ops.AttentionPlan.build([ops.Chunk(context - 1, 1, table) for table in tables], page)
        shape = (sequences * context, groups, size)
        keys, values = (torch.randn(shape, device=record.device, dtype=dtype) for _ in range(2))
        q = torch.randn(sequences, heads, size, device=record.device, dtype=dtype)
        took = gpu_timing.seconds(lambda q=q, k=keys, v=values, p=plan: ops.attention(q, k, v, p, 0.1), record.device)
        share = 2 * keys.numel() * dtype.itemsize / took / peak

        def last(start: int, count: int, keys=keys, values=values, table=tables[-1], row=q[-1:]) -> torch.Tensor:
            alone = ops.AttentionPlan.build([ops.Chunk(start, count, table)], page)
            return ops.attention(row.expand(count, -1, -1).contiguous(), keys, values, alone, 0.1)[-1:]

        here = ops.attention(q, keys, values, plan, 0.1)[-1:]
        holds = _same(here, last(context - 1, 1)) and _same(here, last(context - 40, 40))
        record.row(context=context, sequences=sequences, us=took * 1e6, of_bandwidth=share, row_law=holds)
    return HOLDS if all(row["row_law"] for row in record.rows) else BREAKS


def decode(record: Record) -> int:
    """Count the engine's tokens per second with the exact ops and with torch's own in their place, in turn."""
    import gpu_models
    import gpu_timing

    decoder, tokenizer = gpu_models.random_model("tiny" if record.dry else "4b", record.device)
    for sequences in (2,) if record.dry else gpu_timing.SEQUENCES:
        rates: dict[str, list[float]] = {"exact": [], "torch": []}
        for _ in range(1 if record.dry else 2):
            rates["exact"].append(gpu_timing.tokens_per_second(decoder, tokenizer, sequences, record.dry))
            with gpu_models.torch_ops():
                rates["torch"].append(gpu_timing.tokens_per_second(decoder, tokenizer, sequences, record.dry))
        exact, torch_rate = (max(rates[side]) for side in ("exact", "torch"))
        record.row(sequences=sequences, exact_tok_s=exact, torch_tok_s=torch_rate, of_torch=exact / torch_rate)
    record.fact(note="attention is the exact one on both sides; everything else is swapped")
    return HOLDS


def quickstart(record: Record) -> int:
    """Train configs/quickstart.toml for some steps on the device and count the tokens that differ."""
    folder = record.path.parent / "quickstart"
    settings = [f"run.dir={folder}", f"run.steps={1 if record.dry else 10}", "eval.prompts=50"]
    settings += ["rollout.prompts_per_step=4"] if record.dry else [f"model.device={record.device}"]
    command = [*_zerogap(), "train", str(ROOT / "configs" / "quickstart.toml"), *settings]
    done = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    if done.returncode not in (0, 1):
        return done.returncode
    body = json.loads(done.stdout)
    names = ("steps", "tokens_compared", "tokens_different", "tokens_not_compared", "gap_max", "generated_tokens_per_s")
    record.fact(**{name: body[name] for name in names})
    return HOLDS if body["tokens_compared"] and not body["tokens_different"] and done.returncode == 0 else BREAKS


def conformance(record: Record) -> int:
    """Run the kernel tests on the GPU; dry, one file of them under the interpreter."""
    if _version("triton") == "not installed":
        print("Triton is not installed")
        return SKIPPED
    environment = dict(os.environ)
    folder = "tests/ops/triton/interpreted"
    if record.dry:
        what = [f"{folder}/test_elementwise.py", "-k", "rounding"]
        environment["TRITON_INTERPRET"] = "1"
    else:
        # Without the interpreter these files run on the GPU. Much of it is compiling, so they share the cores.
        sys.path.insert(0, str(ROOT))
        from tests.ops.triton.test_gpu import NAMES

        what = [f"{folder}/{name}.py" for name in NAMES]
        environment.pop("TRITON_INTERPRET", None)
    if _version("pytest-xdist") != "not installed":
        what += ["-n", str(max(1, min(1 if record.dry else 12, len(os.sched_getaffinity(0)))))]
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *what]
    counts = dict.fromkeys(("PASSED", "FAILED", "ERROR", "SKIPPED"), 0)
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            ended = re.search(rf"\b({'|'.join(counts)})\b", line) if "%]" in line and "::" in line else None
            if ended:
                counts[ended[1]] += 1
                record.fact(**{name.lower(): count for name, count in counts.items()})
    record.fact(exit_code=process.returncode)
    return {0: HOLDS, 1: BREAKS}.get(process.returncode, 2)


def _zerogap() -> list[str]:
    return [sys.executable, "-m", "zerogap"]


def _version(name: str) -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def _row_law(op: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Return whether the first, middle and last row have the bits that they have alone."""
    together = op(x)
    return all(_same(together[i : i + 1], op(x[i : i + 1])) for i in (0, len(x) // 2, len(x) - 1))


def _same(one: Tensor, other: Tensor) -> bool:
    import torch

    integer = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return torch.equal(one.contiguous().view(integer), other.contiguous().view(integer))


def _geometric_mean(values: list[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))


STAGES: dict[str, Callable[[Record], int]] = {
    stage.__name__: stage
    for stage in (machine, kernels, certify, qwen3, linear, attention, decode, quickstart, conformance)
}

if __name__ == "__main__":
    stage, device, path = sys.argv[1:4]
    try:
        code = STAGES[stage](Record(Path(path), device, "--dry" in sys.argv[4:]))
    except Exception:
        traceback.print_exc()
        code = 2  # not 1: it did not get so far as to hold or not
    sys.exit(code)
