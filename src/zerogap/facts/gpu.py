"""GPUs: the ones of this machine (NVML, AMD sysfs, Apple) and planned ones, by a table of known names."""

from __future__ import annotations

import os
import platform
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from zerogap.errors import UsageError, nearest
from zerogap.facts.fact import EachOf, Fact, Facts, Value

ROLES = ("engine", "trainer")


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU; ``None`` is unknown.

    Attributes:
        vendor: nvidia, amd, apple, intel or none.
        capability: CUDA compute capability, such as "12.1".
        gfx: AMD architecture, such as "gfx942".
        memory_gib: memory of one GPU, GiB.
    """

    name: str
    vendor: str
    capability: str | None = None
    gfx: str | None = None
    memory_gib: float | None = None
    unified_memory: bool = False
    mig: bool = False

    @property
    def architecture(self) -> str | None:
        """The compiler's name of it, such as "sm_121" or "gfx942"."""
        return self.gfx if self.capability is None else f"sm_{self.capability.replace('.', '')}"


@cache
def _file() -> dict[str, Any]:
    return tomllib.loads((files("zerogap.facts") / "gpus.toml").read_text(encoding="utf-8"))


@cache
def compiled_architectures() -> frozenset[str]:
    """Return the architectures that our own GPU kernels are built for."""
    return frozenset(_file()["compiled"])


@cache
def _table() -> tuple[tuple[re.Pattern[str], Gpu], ...]:
    rows = _file()["gpu"]
    return tuple((re.compile(row["match"]), Gpu(**{key: row[key] for key in row if key != "match"})) for row in rows)


def known_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs of the table."""
    return tuple(gpu for _, gpu in _table())


def find(name: str) -> Gpu | None:
    """Return the known GPU that a product name stands for, or None."""
    plain = re.sub(r"[^a-z0-9]+", " ", name.lower()).strip()
    return next((gpu for pattern, gpu in _table() if pattern.search(plain)), None)


def plan(text: str) -> tuple[tuple[str, ...], Gpu, int | None]:
    """Read a ``--gpu`` value: ``GB10``, ``8xH100``, ``engine=H20``, ``sm_121`` or ``gfx942``.

    Returns:
        the roles it is for, the GPU, and how many (None when not said).

    Raises:
        UsageError: the name is not known; the nearest known ones are named.
    """
    found = re.fullmatch(r"\s*(?:(engine|trainer)\s*=\s*)?(?:(\d{1,6})\s*[xX*]\s*)?(.{1,80}?)\s*", text)
    if not found or found[2] == "0":
        raise UsageError(f"--gpu {text[:80]!r}: write a name such as GB10, 8xH100 or engine=H20")
    roles = (found[1],) if found[1] else ROLES
    count = int(found[2]) if found[2] else None
    name = found[3]
    if exact := re.fullmatch(r"(?:sm_?)?(\d{1,2})(?:\.|(?<=\d))(\d)[af]?", name, re.IGNORECASE):
        return roles, Gpu(f"sm_{exact[1]}{exact[2]}", "nvidia", capability=f"{exact[1]}.{exact[2]}"), count
    if re.fullmatch(r"gfx[0-9a-f]{3,5}", name, re.IGNORECASE):
        return roles, Gpu(name.lower(), "amd", gfx=name.lower()), count
    gpu = find(name)
    if gpu is None:
        names = [known.name for known in known_gpus()]
        close = nearest(name.upper(), names) or f"; known are {', '.join(names)}"
        raise UsageError(f"--gpu {name!r} is not a known GPU{close}; or give its capability, such as sm_121")
    return roles, replace(gpu, name=name), count


def planned_facts(texts: list[str]) -> Facts:
    """Return the facts of planned GPUs; several for one role stand side by side."""
    by_role: dict[str, list[tuple[Gpu, int | None]]] = {role: [] for role in ROLES}
    for text in texts:
        roles, gpu, count = plan(text)
        for role in roles:
            by_role[role].append((gpu, count))
    known: dict[str, Fact] = {}
    for role, found in by_role.items():
        if found:
            counts = [count for _, count in found if count is not None]
            known.update(_facts(role, [gpu for gpu, _ in found], sum(counts) if counts else None, "--gpu", True))
    return Facts(known)


def detected_facts() -> Facts:
    """Return the facts of this machine's GPUs; no GPU is a fact too, an unreadable driver is not."""
    known: dict[str, Fact] = {}
    unknown: dict[str, str] = {}
    gpus, source, driver = _nvidia()
    if not gpus and source:
        unknown = {f"gpu.{role}.{field}": source for role in ROLES for field in ("vendor", "capability", "name")}
        return Facts({}, unknown)
    if not gpus:
        gpus, source = _amd()
    if not gpus:
        gpus, source = _apple()
    if not gpus:
        gpus, source = [Gpu("no GPU", "none")], "no NVIDIA, AMD or Apple GPU was found"
    for role in ROLES:
        known.update(_facts(role, gpus, 0 if gpus[0].vendor == "none" else len(gpus), source, False))
    return Facts({**known, **driver}, unknown)


def _facts(role: str, gpus: list[Gpu], count: int | None, source: str, assumed: bool) -> dict[str, Fact]:
    known: dict[str, Fact] = {}
    detail = f"{source}: {', '.join(dict.fromkeys(gpu.name for gpu in gpus))}"
    fields: dict[str, Iterable[Value | None]] = {
        "vendor": (gpu.vendor for gpu in gpus),
        "name": (gpu.name for gpu in gpus),
        "capability": (gpu.capability or ("absent" if gpu.vendor != "nvidia" else None) for gpu in gpus),
        "gfx": (gpu.gfx or ("absent" if gpu.vendor != "amd" else None) for gpu in gpus),
        "memory_gib": (gpu.memory_gib for gpu in gpus),
        "unified_memory": (gpu.unified_memory for gpu in gpus),
        "mig": (gpu.mig for gpu in gpus),
    }
    for field, values in fields.items():
        distinct = tuple(dict.fromkeys(values))
        if None not in distinct and not (field == "mig" and assumed):
            settled = tuple(value for value in distinct if value is not None)
            value = settled[0] if len(settled) == 1 else EachOf(settled)
            known[f"gpu.{role}.{field}"] = Fact(value, detail, assumed)
    if count is not None:
        known[f"gpu.{role}.count"] = Fact(count, detail, assumed)
    return known


def _nvidia() -> tuple[list[Gpu], str, dict[str, Fact]]:
    """Return NVIDIA GPUs by NVML; a driver that is there but cannot be read gives a reason and no GPU."""
    try:
        import pynvml as nvml
    except ImportError:
        return [], "", {}
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        missing = isinstance(error, nvml.NVMLError_LibraryNotFound | nvml.NVMLError_DriverNotLoaded)
        return [], "" if missing else f"NVML cannot be read ({error}); run nvidia-smi", {}
    try:
        gpus = [_nvml_gpu(nvml, index) for index in _visible(nvml)]
        cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
        driver = {
            "gpu.driver": Fact(str(nvml.nvmlSystemGetDriverVersion()), "NVML"),
            "gpu.cuda_driver": Fact(f"{cuda // 1000}.{cuda % 1000 // 10}", "NVML"),
        }
        return gpus, "NVML", driver
    except nvml.NVMLError as error:
        return [], f"NVML cannot be read ({error}); run nvidia-smi", {}
    finally:
        nvml.nvmlShutdown()


def _visible(nvml: object) -> list[int]:
    """Return the device indices that CUDA_VISIBLE_DEVICES leaves (names by UUID are resolved by prefix)."""
    every = list(range(nvml.nvmlDeviceGetCount()))  # type: ignore[attr-defined]
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is None or asked.startswith("MIG-"):
        return every
    chosen: list[int] = []
    for part in filter(None, (item.strip() for item in asked.split(","))):
        if part.isdigit() and int(part) in every:
            chosen.append(int(part))
            continue
        same = [
            index
            for index in every
            if str(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index))).startswith(part)  # type: ignore[attr-defined]
        ]
        if len(same) != 1:
            break  # CUDA, too, stops at the first entry that names no device
        chosen.append(same[0])
    return chosen


def _nvml_gpu(nvml: object, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)  # type: ignore[attr-defined]
    name = str(nvml.nvmlDeviceGetName(handle))  # type: ignore[attr-defined]
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)  # type: ignore[attr-defined]
    known = find(name)
    try:
        memory: float | None = round(nvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30, 1)  # type: ignore[attr-defined]
    except nvml.NVMLError:  # type: ignore[attr-defined]
        memory = known.memory_gib if known else None  # GPUs with unified memory report none of their own
    try:
        mig = nvml.nvmlDeviceGetMigMode(handle)[0] == 1  # type: ignore[attr-defined]
    except nvml.NVMLError:  # type: ignore[attr-defined]
        mig = False
    unified = known.unified_memory if known else False
    return Gpu(name, "nvidia", f"{major}.{minor}", None, memory, unified, mig)


def _amd(root: Path = Path("/sys/class/kfd/kfd/topology/nodes")) -> tuple[list[Gpu], str]:
    """Return AMD GPUs by amdsmi where it is installed, else from the kernel's compute topology."""
    if found := _amdsmi():
        return found, "amdsmi"
    gpus: list[Gpu] = []
    try:
        nodes = sorted(root.iterdir(), key=lambda node: (len(node.name), node.name))
    except OSError:
        return [], ""
    for node in nodes:
        try:
            pairs = dict(
                line.split(maxsplit=1) for line in (node / "properties").read_text().splitlines() if " " in line
            )
            version = int(pairs.get("gfx_target_version", "0"))
        except (OSError, ValueError):
            continue
        if version <= 0:
            continue  # a CPU node
        # 90402 is gfx942: major in decimal, minor and stepping in hexadecimal.
        gfx = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
        gpus.append(Gpu(gfx, "amd", gfx=gfx, memory_gib=_amd_memory(node)))
    return gpus, str(root)


def _amdsmi() -> list[Gpu]:
    try:
        import amdsmi
    except (ImportError, OSError, KeyError):
        return []  # without ROCm its import fails in several ways
    try:
        amdsmi.amdsmi_init()
    except amdsmi.AmdSmiException:
        return []
    try:
        gpus = []
        for handle in amdsmi.amdsmi_get_processor_handles():
            asic = amdsmi.amdsmi_get_gpu_asic_info(handle)
            memory = amdsmi.amdsmi_get_gpu_vram_info(handle).get("vram_size")
            gfx = str(asic.get("target_graphics_version", ""))
            name = str(asic.get("market_name") or gfx)
            gigabytes = round(memory / 1024, 1) if isinstance(memory, int) else None
            gpus.append(Gpu(name, "amd", gfx=gfx if gfx.startswith("gfx") else None, memory_gib=gigabytes))
        return gpus
    except amdsmi.AmdSmiException:
        return []
    finally:
        amdsmi.amdsmi_shut_down()


def _amd_memory(node: Path) -> float | None:
    total = 0
    for bank in sorted(node.glob("mem_banks/*/properties")):
        try:
            text = bank.read_text()
        except OSError:
            return None
        found = re.search(r"size_in_bytes (\d+)", text)
        total += int(found[1]) if found else 0
    return round(total / 2**30, 1) if total else None


def _apple() -> tuple[list[Gpu], str]:
    if platform.system() != "Darwin" or platform.machine() != "arm64":
        return [], ""
    return [Gpu("Apple silicon", "apple", unified_memory=True)], "macOS on arm64"
