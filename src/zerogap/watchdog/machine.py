"""What the machine says: the kernel's OOM counters, GPU activity, faults and memory holders."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

CGROUP = Path("/sys/fs/cgroup")


def oom_files(pid: int, root: Path = CGROUP, proc: Path = Path("/proc")) -> list[tuple[Path, str]]:
    """Return the counters (file, key) of kills by the kernel for the cgroup of ``pid``, v2 and v1, inner ones first."""
    found: list[tuple[Path, str]] = []
    try:
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        inner = path.lstrip("/")
        if not controllers:
            found += [(root / inner / "memory.events", "oom_kill"), (root / "memory.events", "oom_kill")]
        elif controllers == "memory":
            found += [(root / "memory" / inner / "memory.oom_control", "oom_kill")]
            found += [(root / "memory/memory.oom_control", "oom_kill")]
    return [(file, key) for file, key in dict.fromkeys(found) if file.is_file()][:1]


def read_counter(file: Path, key: str) -> int | None:
    """Return the number after ``key`` in a file of ``key number`` lines."""
    try:
        for line in file.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == key:
                return int(value)
    except (OSError, ValueError):
        pass
    return None


class OomCounter:
    """Counts what the kernel's OOM killer did to the run's cgroup since watching began."""

    def __init__(self, pid: int, root: Path = CGROUP, proc: Path = Path("/proc")) -> None:
        self._files = oom_files(pid, root, proc)
        self._last = {file: read_counter(file, key) for file, key in self._files}

    @property
    def known(self) -> bool:
        """Whether there is a counter to look at."""
        return any(value is not None for value in self._last.values())

    def new(self) -> list[tuple[str, int]]:
        """Return (file, kills since the last call) for counters that went up."""
        risen = []
        for file, key in self._files:
            now, before = read_counter(file, key), self._last[file]
            if now is not None and before is not None and now > before:
                risen.append((str(file), now - before))
            if now is not None:
                self._last[file] = now
        return risen


class Gpus:
    """NVIDIA GPUs through NVML; without the library or a GPU it knows nothing and says so."""

    def __init__(self, nvml: Any = None) -> None:
        self.handles: list[Any] = []
        self._events: Any = None
        self._ecc: dict[int, int] = {}
        try:
            if nvml is None:
                import pynvml as nvml  # type: ignore[no-redef]
            self._nvml = nvml
            nvml.nvmlInit()
            self.handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        except Exception:
            return  # no driver, no GPU, or a driver that does not answer
        try:
            self._events = nvml.nvmlEventSetCreate()
            for handle in self.handles:
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)
        except Exception:
            self._events = None  # some virtual GPUs have no events

    def _ask(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._nvml, name)(*arguments)
        except Exception:
            return None  # NVML refuses single questions on many boards (GB10: memory is unified)

    def activity(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return utilisation and memory-controller utilisation per GPU in percent."""
        rates = [self._ask("nvmlDeviceGetUtilizationRates", handle) for handle in self.handles]
        known = [rate for rate in rates if rate is not None]
        return tuple(float(rate.gpu) for rate in known), tuple(float(rate.memory) for rate in known)

    def faults(self) -> list[str]:
        """Return the XID errors and new uncorrected ECC errors since the last call."""
        found = []
        while self._events is not None:
            event = self._ask("nvmlEventSetWait_v2", self._events, 0)
            if event is None:
                break
            found.append(f"Xid {event.eventData}")
        for index, handle in enumerate(self.handles):
            errors = self._ask("nvmlDeviceGetTotalEccErrors", handle, 1, 0)
            if errors is None:
                continue
            if errors > self._ecc.get(index, errors):
                found.append(f"GPU {index}: uncorrectable ECC error ({errors} since the driver loaded)")
            self._ecc[index] = errors
        return found

    def holders(self) -> list[dict[str, Any]]:
        """Return who holds GPU memory: GPU index, pid, bytes (None on unified memory)."""
        found = []
        for index, handle in enumerate(self.handles):
            for item in self._ask("nvmlDeviceGetComputeRunningProcesses", handle) or []:
                found.append({"gpu": index, "pid": item.pid, "bytes": getattr(item, "usedGpuMemory", None)})
        return found

    def names(self) -> list[str]:
        """Return the names of the GPUs."""
        found = []
        for handle in self.handles:
            name = self._ask("nvmlDeviceGetName", handle)
            found.append(name.decode() if isinstance(name, bytes) else str(name))
        return found


def facts(gpus: Gpus) -> dict[str, Any]:
    """Return what an incident should say about the machine."""
    memory: dict[str, int] = {}
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("MemTotal", "MemAvailable"):
                memory[name] = int(value.split()[0]) * 1024
    except (OSError, ValueError):
        pass
    disk = os.statvfs(".")
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "host": platform.node(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "memory_bytes": memory.get("MemTotal"),
        "memory_available_bytes": memory.get("MemAvailable"),
        "disk_free_bytes": disk.f_bavail * disk.f_frsize,
        "shm_free_bytes": shm.f_bavail * shm.f_frsize if shm else None,
        "gpus": gpus.names(),
    }


def scheduler() -> str:
    """Return ``"slurm"`` or ``"kubernetes"`` when this process runs under one, else an empty text."""
    if os.environ.get("SLURM_JOB_ID"):
        return "slurm"
    return "kubernetes" if os.environ.get("KUBERNETES_SERVICE_HOST") else ""
