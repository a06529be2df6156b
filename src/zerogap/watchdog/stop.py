"""Ending a run: stacks first, SIGTERM, SIGKILL after a grace, and a look whether anything is left.

Only processes that are known to belong to the run get a signal, each through a pidfd that was checked against the
process's start time, never by name.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from zerogap.watchdog.processes import Process, Tracker, read_stat

KILL_S = 10.0  # after SIGKILL only the kernel can hold a process back
MOST_STACKS = 16
STACK_S = 8.0
STACKS_S = 20.0  # all stacks together: a stop must not wait for them


@dataclass
class Stopped:
    """What a stop did."""

    terminated: list[str] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def send(process: Process, number: int) -> bool:
    """Send a signal to this very process; False when it is gone or not ours to signal."""
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        stat = read_stat(process.pid)
        if stat is None or stat.started != process.started:
            return False
        signal.pidfd_send_signal(handle, number)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


def label(process: Process) -> str:
    """Return pid, role and command of a process."""
    return f"pid {process.pid} ({process.role}): {process.command[:160]}"


def stop_tree(tracker: Tracker, grace_s: float) -> Stopped:
    """End every process of the run: SIGTERM, then SIGKILL for those that are there after ``grace_s``."""
    done = Stopped()
    for number, limit, names in ((signal.SIGTERM, grace_s, done.terminated), (signal.SIGKILL, KILL_S, done.killed)):
        told: set[tuple[int, int]] = set()
        deadline = time.monotonic() + limit
        while True:
            tracker.poll(time.time())
            living = tracker.living()
            for process in living:
                if process.key not in told:
                    told.add(process.key)
                    if send(process, number):
                        names.append(label(process))
                    if number == signal.SIGTERM:
                        send(process, signal.SIGCONT)  # a stopped process cannot act on SIGTERM
            if not living or time.monotonic() >= deadline:
                break
            time.sleep(0.05)
        if not living:
            return done
    done.left = [label(process) for process in tracker.living()]
    return done


def py_spy() -> str | None:
    """Return the path of py-spy, if it is installed beside us or on the PATH."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.exists() else shutil.which("py-spy")


def stacks(processes: Iterable[Process]) -> dict[str, str]:
    """Return the Python stacks of the run's processes, engines and trainers first; the kernel's view without py-spy."""
    order = {"engine": 0, "router": 1, "trainer": 2, "other": 3}
    chosen = sorted((item for item in processes if item.role in order), key=lambda item: order[item.role])[:MOST_STACKS]
    tool, found = py_spy(), {}
    deadline = time.monotonic() + STACKS_S
    for process in chosen:
        text = ""
        if tool is not None and "python" in process.command and time.monotonic() < deadline:
            text = _dump(tool, process.pid)
        found[label(process)] = text or _kernel_view(process.pid, tool is not None)
    return found


def _dump(tool: str, pid: int) -> str:
    try:
        done = subprocess.run(
            [tool, "dump", "--nonblocking", "--pid", str(pid)],
            stdin=subprocess.DEVNULL, capture_output=True, timeout=STACK_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace")[:20000] if done.returncode == 0 else ""


def _kernel_view(pid: int, has_tool: bool) -> str:
    lines = []
    for name in ("wchan", "syscall"):
        try:
            lines.append(f"{name}: {(Path('/proc') / str(pid) / name).read_text().strip()[:200]}")
        except OSError:
            continue
    stat = read_stat(pid)
    lines.append(f"state: {stat.state}" if stat else "gone")
    if not has_tool:
        lines.append("no Python stack: py-spy is not installed (pip install py-spy)")
    return "\n".join(lines)
