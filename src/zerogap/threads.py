"""How many threads this process may use, and the environment that OpenMP must see before it loads."""

from __future__ import annotations

import os
from pathlib import Path

from zerogap.errors import UsageError

MOST_THREADS = 1024


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
    """Return the thread count to use: OMP_NUM_THREADS if set, else affinity limited by the cgroup quota.

    Raises:
        UsageError: OMP_NUM_THREADS is no thread count.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.strip():
        outer = asked.split(",")[0].strip()  # OpenMP allows a list, one count per level of nesting
        count = int(outer) if outer.isascii() and outer.isdigit() and len(outer) < 10 else 0
        if not 1 <= count <= MOST_THREADS:
            raise UsageError(f"OMP_NUM_THREADS='{asked}': must be a whole number from 1 to {MOST_THREADS}, or unset")
        return count
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return max(1, affinity if quota is None else min(affinity, round(quota)))


def prepare_environment() -> None:
    """Set what must stand in the environment before torch loads its OpenMP library.

    Idle OpenMP threads that spin ruin a shared machine, so they wait passively.

    Raises:
        UsageError: OMP_NUM_THREADS is no thread count, or the current folder was deleted (MKL does not load there).
    """
    try:
        os.getcwd()
    except OSError:
        raise UsageError("the current folder no longer exists; change into one that does") from None
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    count = str(thread_count())
    if not os.environ.get("OMP_NUM_THREADS", "").strip():
        os.environ["OMP_NUM_THREADS"] = count
