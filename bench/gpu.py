"""Runs the stages of ``bench/gpu.sh``, each in a process of its own with a time limit, and gathers what they wrote.

    python bench/gpu.py [--device cuda:0] [--out DIR] [--only STAGE ...] [--seconds 450] [--dry]

A stage is a function of ``gpu_stages``. It writes its record after every line it measures, whole or not at all, so one
that is cut short leaves what it has. The results are gathered again after each stage: ``results.json`` and
``results.txt``; SIGTERM and Ctrl-C end the stage that runs and gather what it has too. Exit code: 0 every stage held, 1
one did not, failed or ran out of time. ``--dry`` runs every stage on the CPU in tiny shapes: it proves the script, not
a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerogap.files import write_text_atomic


@dataclass(frozen=True)
class Stage:
    """One step: its name is that of its function, ``seconds`` what it may take."""

    name: str
    seconds: int
    says: str


# In the order of their worth, should time run out. Together under 8 minutes.
STAGES = (
    Stage("machine", 30, "GPU, driver, versions, memory bandwidth"),
    Stage("kernels", 75, "the kernels of the other stages, built by all cores at once"),
    Stage("certify", 60, "zerogap certify --quick on the device"),
    Stage("qwen3", 60, "Qwen3-0.6B shapes, random weights: engine against trainer"),
    Stage("linear", 40, "exact linear against the library's, Qwen3-4B shapes, by rows"),
    Stage("attention", 25, "decode attention's share of memory bandwidth at 1k, 8k and 32k"),
    Stage("decode", 60, "decode tokens per second, exact ops against torch's own"),
    Stage("quickstart", 45, "configs/quickstart.toml on the device, tokens that differ"),
    Stage("conformance", 75, "the kernel tests on the device"),
)
BUDGET = 450
_DRY = 6  # times as long: the CPU is slow, and its times mean nothing


class _End:
    """Whether the run is to end now, and the stage that runs; a signal can come at any instruction."""

    asked = False
    running: subprocess.Popen[bytes] | None = None

    @classmethod
    def ask(cls, number: int, frame: Any) -> None:
        """Handle a signal: end the stage that runs, and let what follows be written whole."""
        for ours in (signal.SIGTERM, signal.SIGINT):
            signal.signal(ours, signal.SIG_IGN)
        cls.asked = True
        if cls.running is not None:
            _kill(cls.running)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def main(arguments: list[str]) -> int:
    """Run the stages that were asked for; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0", help="the GPU to measure, such as cuda:1")
    parser.add_argument("--out", type=Path, default=Path("runs") / f"gpu-{time.strftime('%Y%m%d-%H%M%S')}")
    parser.add_argument("--only", nargs="+", choices=[stage.name for stage in STAGES], metavar="STAGE")
    parser.add_argument("--seconds", type=int, help=f"time for all stages together ({BUDGET}; dry {_DRY * BUDGET})")
    parser.add_argument("--dry", action="store_true", help="on the CPU in tiny shapes")
    options = parser.parse_args(arguments)
    device = "cpu" if options.dry else options.device
    began = time.monotonic()
    if not options.dry:
        _require_gpu(parser, device)
    try:
        (options.out / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {options.out}: {error.strerror}; name a folder that can be written")
    _End.asked = False
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _End.ask)
    seconds = options.seconds or BUDGET * (_DRY if options.dry else 1)
    end = began + seconds
    outcomes: dict[str, dict[str, Any]] = {}
    for stage in STAGES:
        if options.only and stage.name not in options.only:
            continue
        left = end - time.monotonic()
        limit = min(stage.seconds * (_DRY if options.dry else 1), left)
        print(f"{stage.name:<12} {stage.says} ...", flush=True)
        if _End.asked:
            outcomes[stage.name] = {"status": "not started", "seconds": 0.0, "why": "the run was ended before"}
        elif left > 1:
            outcomes[stage.name] = run_stage(stage.name, limit, device, options.dry, options.out)
        else:
            outcomes[stage.name] = {"status": "not started", "seconds": 0.0, "why": f"the {seconds} s were used up"}
        gather(options.out, device, outcomes)
        print(f"{'':<12} {outcomes[stage.name]['status']}, {outcomes[stage.name]['seconds']:.1f} s", flush=True)
    print((options.out / "results.txt").read_text())
    return 0 if all(outcome["status"] == "holds" for outcome in outcomes.values()) else 1


def _require_gpu(parser: argparse.ArgumentParser, device: str) -> None:
    """Refuse a device that PyTorch cannot use, in a process of its own: this one is to hold no GPU memory."""
    code = "import sys, torch; torch.cuda.get_device_properties(torch.device(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, device], capture_output=True, text=True, check=False)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["unknown"])[-1]
        parser.error(f"--device {device}: PyTorch cannot use it ({why}); --dry runs without a GPU")


def run_stage(name: str, seconds: float, device: str, dry: bool, out: Path) -> dict[str, Any]:
    """Run one stage in its own process group; return status, seconds, record and, if it went wrong, why."""
    record = out.resolve() / f"{name}.json"
    record.unlink(missing_ok=True)
    command = [sys.executable, str(Path(__file__).parent / "gpu_stages.py"), name, device, str(record)]
    command += ["--dry"] if dry else []
    began = time.monotonic()
    log = out / "logs" / f"{name}.txt"
    with log.open("wb") as file:
        process = _End.running = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        if _End.asked:  # while it was being started
            _kill(process)
        try:
            code = process.wait(timeout=seconds)
            status = {0: "holds", 1: "does not hold", 3: "skipped"}.get(code, "failed")
        except subprocess.TimeoutExpired:
            status = "out of time"
        finally:
            _kill(process)
            process.wait()
            _End.running = None
    if _End.asked:
        status = "cut short"
    outcome: dict[str, Any] = {"status": status, "seconds": round(time.monotonic() - began, 2)}
    if record.is_file():
        outcome["record"] = json.loads(record.read_text())
    if status == "out of time":
        outcome["why"] = f"it was ended after {seconds:.0f} s"
    elif status not in ("holds", "cut short"):
        outcome["why"] = " | ".join(log.read_text(errors="replace").strip().splitlines()[-3:])[-600:]
    return outcome


def gather(out: Path, device: str, outcomes: dict[str, dict[str, Any]]) -> None:
    """Write ``results.json`` and ``results.txt``."""
    body = {
        "schema": "zerogap.gpu_bench",
        "schema_version": 1,
        "when": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "device": device,
        "stages": outcomes,
    }
    write_text_atomic(out / "results.json", json.dumps(body, indent=1, sort_keys=True) + "\n")
    write_text_atomic(out / "results.txt", "\n".join(text(name, outcome) for name, outcome in outcomes.items()))


def text(name: str, outcome: dict[str, Any]) -> str:
    """Return a stage's outcome as lines: facts, then its table."""
    lines = [f"== {name}: {outcome['status']} ({outcome['seconds']:.1f} s)"]
    if "why" in outcome:
        lines.append(f"   {outcome['why']}")
    record = outcome.get("record", {})
    lines += [f"   {key}: {value}" for key, value in record.get("facts", {}).items()]
    rows = record.get("rows", [])
    if rows:
        titles = list(rows[0])
        cells = [titles, *([_cell(row.get(title)) for title in titles] for row in rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(titles))]
        padded = ([cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in cells)
        lines += ["   " + "  ".join(row) for row in padded]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
