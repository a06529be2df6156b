"""Which kernels the stages of ``bench/gpu.sh`` launch, and building them by many processes.

``gpu_noting.py`` finds them, a process for each case. Triton's cache on disk is keyed by source, constants, switches
and architecture, so what was built here is found by the stages.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

Spec = dict[str, Any]
CASES = ("certify", "qwen3", "linear", "attention", "decode", "quickstart")
NOTING = Path(__file__).with_name("gpu_noting.py")


def build(spec: Spec, architecture: str) -> float:
    """Compile one kernel into Triton's cache; return the seconds that it took."""
    import triton
    from triton.compiler import ASTSource

    from zerogap.ops.triton.targets import TARGETS, pinned

    began = time.monotonic()
    target = TARGETS[architecture]
    module, _, name = spec["kernel"].partition(":")
    kernel = getattr(importlib.import_module(module), name)
    places = {argument: i for i, argument in enumerate(kernel.arg_names)}
    constexprs = {(places[argument],): value for argument, value in spec["constexprs"].items()}
    attributes = {(i,): [["tt.divisibility", 16]] for i in spec["aligned"]}
    source = ASTSource(kernel, spec["signature"], constexprs, attributes)
    triton.compile(source, target=target.gpu_target(), options={**spec["options"], **pinned(target)})
    return time.monotonic() - began


def kernels_of(cases: Sequence[str], architecture: str, seconds: float) -> dict[str, list[Spec] | str]:
    """Return each case's kernels, or in one line why they are not known; the cases run beside each other."""
    end = time.monotonic() + seconds
    found: dict[str, list[Spec] | str] = {}
    with tempfile.TemporaryDirectory() as folder:
        running = {}
        for case in cases:
            command = [sys.executable, NOTING, architecture, case, f"{folder}/{case}.json"]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            running[case] = subprocess.Popen(
                command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
        for case, process in running.items():
            try:
                _, errors = process.communicate(timeout=max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                found[case] = "out of time"
                continue
            if process.returncode:
                found[case] = (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1][:300]
            else:
                found[case] = json.loads(Path(f"{folder}/{case}.json").read_text())
    return found


def build_all(specs: Sequence[Spec], architecture: str, workers: int) -> Iterator[tuple[Spec, float | str]]:
    """Build kernels in so many processes; yield each with its seconds, or why it failed, as they finish."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        running = {pool.submit(build, spec, architecture): spec for spec in specs}
        for future in as_completed(running):
            error = future.exception()
            why = f"{type(error).__name__}: {error}".splitlines()[0][:300] if error else ""
            yield running[future], why or future.result()
