"""Everything that is known about a run's machine, put together; and facts as a file, to check a node from elsewhere."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerogap.errors import UsageError
from zerogap.facts import gpu, models
from zerogap.facts.fact import EachOf, Fact, Facts, Value, convert

FACTS_SCHEMA, FACTS_VERSION = "zerogap.facts", 1
_FILE_LIMIT = 16 * 2**20
_SCHEMAS = (FACTS_SCHEMA, "zerogap.check", "zerogap.probe")
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16", "i8mm")


@dataclass(frozen=True)
class Question:
    """What is asked about: this machine unless something says otherwise.

    Attributes:
        gpus: planned GPUs (``--gpu``); with them nothing of this machine's software counts.
        python: the interpreter of the environment that the run will use.
        launch: facts of a launch, or None.
        stack: facts of a known set of software, or None.
        file: facts collected elsewhere, or None; with them nothing of this machine counts.
        assumed: facts that were stated one by one.
    """

    model: str | None = None
    gpus: tuple[str, ...] = ()
    python: Path | None = None
    launch: Facts | None = None
    stack: Facts | None = None
    file: Facts | None = None
    assumed: Facts | None = None

    @property
    def planned(self) -> bool:
        """Whether it is about another machine than this one."""
        return bool(self.gpus) or self.file is not None


def gather(question: Question) -> Facts:
    """Return the facts that a question is about; what is stated goes before what is read."""
    here = not question.planned
    layers = [question.assumed, question.launch]
    if question.model is not None:
        layers.append(models.model_facts(question.model))
    elif question.launch is not None and (served := question.launch.get("engine.model")):
        layers.append(models.model_facts(str(served.value), served.source, must_exist=False))
    elif question.launch is not None and (why := question.launch.unknown.get("engine.model")):
        layers.append(Facts({}, {f"model.{field}": why for field in ("name", *models.ASKED)}))
    if question.gpus:
        layers.append(gpu.planned_facts(list(question.gpus)))
    if question.python is not None or (here and question.stack is None):
        layers.append(_software(question.python))
    layers += [question.stack, question.file]
    if here:
        layers += [gpu.detected_facts(), host_facts(), environment_facts()]
    facts = Facts()
    for layer in reversed([layer for layer in layers if layer is not None]):
        facts = layer.over(facts)
    if here:
        from zerogap.facts.certified import certificate_facts

        facts = facts.over(certificate_facts(facts))
    return _with_launch_given(facts)


def _software(python: Path | None) -> Facts:
    from zerogap.facts.software import software_facts  # not needed, and not loaded, for a planned machine

    return software_facts(python)


def _with_launch_given(facts: Facts) -> Facts:
    """A setting of engine or trainer that was stated counts as a launch, of which the rest is unknown."""
    if "launch.given" in facts:
        return facts
    stated = [name for name in facts if name.startswith(("engine.", "trainer.", "rollout.", "launch.", "eval_engine."))]
    if stated:
        fact = facts[stated[0]]
        return Facts({"launch.given": Fact(True, f"{stated[0]} was given", fact.assumed)}).over(facts)
    return Facts({"launch.given": Fact(False, "no launch was given")}).over(facts)


def host_facts() -> Facts:
    """Return operating system, processor and its vector extensions."""
    known = {
        "host.os": Fact(platform.system(), "uname"),
        "host.machine": Fact(platform.machine(), "uname"),
    }
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(errors="replace")[:65536]
        if found := re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE):
            words = set(found[1].split())
            known["host.cpu_flags"] = Fact(tuple(flag for flag in _CPU_FLAGS if flag in words), "/proc/cpuinfo")
    return Facts(known)


def environment_facts() -> Facts:
    """Return the environment variables of this process that matter."""
    from zerogap.facts import flags

    return Facts(
        {
            f"env.{name}": Fact(os.environ[name][:200], "environment of this process")
            for name in flags.table()["environment"]
            if os.environ.get(name)
        }
    )


def collect(python: Path | None) -> Facts:
    """Return all facts of this machine, with the slow ones: the kernels that sgl-kernel holds."""
    facts = gather(Question(python=python)).without("launch.given")
    return kernel_facts(python).over(facts)


def kernel_facts(python: Path | None) -> Facts:
    """Return the architectures of sgl-kernel's compiled kernels, if ``cuobjdump`` is here to list them."""
    from zerogap.facts.elf import cubins
    from zerogap.facts.software import site_folders

    tool = shutil.which("cuobjdump") or shutil.which("cuobjdump", path="/usr/local/cuda/bin")
    folders, _ = site_folders(python)
    packages = [folder / "sgl_kernel" for folder in folders if (folder / "sgl_kernel").is_dir()]
    if not packages:
        return Facts()
    wanted = {
        "software.sgl_kernel_fa3_cubins": ("flash_ops*.so", "--list-elf"),
        "software.sgl_kernel_cubins": ("common_ops*.so", "--list-elf"),
        "software.sgl_kernel_ptx": ("common_ops*.so", "--list-ptx"),
    }
    if tool is None:
        return Facts({}, dict.fromkeys(wanted, "cuobjdump is not here; it comes with the CUDA toolkit"))
    known: dict[str, Fact] = {}
    unknown: dict[str, str] = {}
    for name, (pattern, option) in wanted.items():
        files = sorted(packages[0].rglob(pattern))
        if not files:
            continue
        archs: dict[str, None] = {}
        for file in files:
            try:
                run = subprocess.run(
                    [tool, option, str(file)], capture_output=True, text=True, timeout=120, check=False
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                unknown[name] = f"cuobjdump {option} {file} failed ({type(error).__name__})"
                break
            archs.update(dict.fromkeys(cubins(run.stdout)))
        if name not in unknown:
            known[name] = Fact(tuple(archs), f"cuobjdump {option} {files[0]}")
    return Facts(known, unknown)


def to_file(facts: Facts) -> dict[str, Any]:
    """Return the facts as the body of a facts file."""
    return {
        "facts": {name: facts[name].to_json() for name in sorted(facts)},
        "unknown": dict(sorted(facts.unknown.items())),
    }


def read_file(path: Path) -> Facts:
    """Return the facts of a file that ``zerogap check --collect`` (or ``--json``) wrote.

    Raises:
        UsageError: it cannot be read, is of another kind or version, or holds a wrong fact.
    """
    try:
        if path.stat().st_size > _FILE_LIMIT:
            raise UsageError(f"--facts {path}: larger than {_FILE_LIMIT // 2**20} MiB")
        body = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--facts {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"--facts {path}: not JSON; write it with: zerogap check --collect > FILE") from None
    if not isinstance(body, dict) or body.get("schema") not in _SCHEMAS or not isinstance(body.get("facts"), dict):
        raise UsageError(f"--facts {path}: no facts file; write it with: zerogap check --collect > FILE")
    if body.get("schema_version") != FACTS_VERSION:
        raise UsageError(
            f"--facts {path}: schema_version is {body.get('schema_version')!r}, and {FACTS_VERSION} is read"
        )
    known: dict[str, Fact] = {}
    for name, row in body["facts"].items():
        where = f"--facts {path}"
        if not isinstance(row, dict) or "value" not in row or not isinstance(row.get("source", ""), str):
            raise UsageError(f"{where}: {name} is a table with value and source")
        assumed = row.get("assumed") is True
        source = f"{path.name}: {str(row.get('source', ''))[:500] or 'no source given'}"
        known[name] = Fact(_value(name, row["value"], where), source, assumed)
    reasons = body.get("unknown")
    unknown = reasons if isinstance(reasons, dict) else {}
    return Facts(known, {str(name): str(why)[:500] for name, why in unknown.items()})


def _value(name: str, raw: object, where: str) -> Value | EachOf:
    if isinstance(raw, dict):
        several = raw.get("each_of")
        if not isinstance(several, list) or not several or len(raw) != 1:
            raise UsageError(f"{where}: {name} has no value that can be read")
        return EachOf(tuple(convert(name, item, where) for item in several))
    return convert(name, raw, where)
