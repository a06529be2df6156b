"""How many threads this process may use, and the environment that OpenMP must see before it loads."""

from __future__ import annotations

import os
from pathlib import Path


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the CPUs that the cgroup (v2 or v1) grants, or None without a limit."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        micros = int((root / "cpu/cpu.cfs_quota_us").read_text())
        return None if micros <= 0 else micros / int((root / "cpu/cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None


def thread_count() -> int:
    """Return the thread count to use: OMP_NUM_THREADS if set, else affinity limited by the cgroup quota."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return max(1, affinity if quota is None else min(affinity, round(quota)))


def prepare_environment() -> None:
    """Set what must stand in the environment before torch loads its OpenMP library.

    Idle OpenMP threads that spin ruin a shared machine, so they wait passively.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("OMP_NUM_THREADS", str(thread_count()))
