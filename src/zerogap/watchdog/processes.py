"""The processes of a run: who they are, which of them ended and how, how busy they are.

Processes are known by pid and start time together, so a reused pid is never taken for an old friend.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from zerogap.watchdog.events import Exit
from zerogap.watchdog.rules import RuleBook

PROC = Path("/proc")
TICK = os.sysconf("SC_CLK_TCK")
STATE, PPID, UTIME, STIME, START, EXIT_CODE = 0, 1, 11, 12, 19, 49  # fields of /proc/PID/stat after the name


@dataclass
class Process:
    """One process of the run."""

    pid: int
    started: int  # clock ticks since boot
    parent: int
    name: str
    command: str
    role: str
    since: float  # when it was first seen or, if that is known, when it started
    cpu: float = 0.0  # seconds of CPU so far
    zombie: bool = False
    stopped: bool = False  # by SIGSTOP or a debugger
    status: int | None = None

    @property
    def key(self) -> tuple[int, int]:
        """What makes it this process and no other."""
        return self.pid, self.started


@dataclass(frozen=True)
class Stat:
    """What one line of /proc/PID/stat says."""

    parent: int
    started: int
    state: str
    cpu: float
    name: str
    status: int | None


def read_stat(pid: int) -> Stat | None:
    """Read one process, or None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            raw = file.read()
    except OSError:
        return None
    close = raw.rindex(b")")
    fields = raw[close + 2 :].split()
    state = fields[STATE].decode()
    status = os.waitstatus_to_exitcode(int(fields[EXIT_CODE])) if state == "Z" else None
    cpu = (int(fields[UTIME]) + int(fields[STIME])) / TICK
    name = raw[raw.index(b"(") + 1 : close].decode("utf-8", "replace")
    return Stat(int(fields[PPID]), int(fields[START]), state, cpu, name, status)


def snapshot() -> dict[int, Stat]:
    """Return every process of this host."""
    found = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (stat := read_stat(int(entry.name))) is not None:
            found[int(entry.name)] = stat
    return found


def command_line(pid: int) -> str:
    """Return the command line of a process, empty when it cannot be read."""
    try:
        return (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()[:4000]
    except OSError:
        return ""


def has_environment(pid: int, entries: Iterable[bytes]) -> bool:
    """Whether all ``NAME=value`` entries stand in the environment the process was started with."""
    try:
        environment = (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return all(entry in environment for entry in entries)


class Tracker:
    """Follows the tree below some roots, and whoever carries the run's mark in its environment.

    Args:
        roots: (pid, start time) of the run's own first processes.
        book: rules, for the roles.
        adopt: pid whose children belong to the run too (the pump, which is a subreaper), or None.
        ignore: pids under ``adopt`` that do not belong to the run (the judge).
        marks: ``NAME=value`` entries; a process that carries one of them belongs to the run wherever it hangs.
    """

    def __init__(
        self,
        roots: Iterable[tuple[int, int]],
        book: RuleBook,
        adopt: int | None = None,
        ignore: Iterable[int] = (),
        marks: Iterable[str] = (),
    ) -> None:
        self._roots, self._book, self._adopt, self._ignore = set(roots), book, adopt, set(ignore)
        self._marks = [mark.encode() for mark in marks]
        self._unmarked: set[tuple[int, int]] = set()
        self.alive: dict[tuple[int, int], Process] = {}
        self.statuses: dict[int, int] = {}  # pid -> exit status, as the pump reaped it
        self._ports: set[int] = set()
        self.cores: float | None = None
        self._cpu_at: tuple[float, dict[tuple[int, int], float]] | None = None
        self.cost_s = 0.0

    def add(self, root: tuple[int, int] | None = None, mark: str = "") -> None:
        """Take in another root or mark that became known later."""
        if root is not None:
            self._roots.add(root)
        if mark and mark.encode() not in self._marks:
            self._marks.append(mark.encode())
            self._unmarked.clear()

    def poll(self, now: float) -> tuple[list[Process], list[Exit]]:
        """Look again; return the processes that appeared and those that ended."""
        begun = time.perf_counter()
        table = snapshot()
        members = self._members(table)
        new, ends = [], []
        for key in members:
            stat = table[key[0]]
            known = self.alive.get(key)
            if known is None:
                known = self._meet(key, stat, now)
                self.alive[key] = known
                new.append(known)
            elif known.name != stat.name:  # setproctitle: Ray and SGLang name their workers late
                known.name, known.command = stat.name, command_line(key[0]) or known.command
                known.role = self._role(known.command or known.name, known.parent, key[0])
            known.cpu, known.parent, known.stopped = stat.cpu, stat.parent, stat.state in "Tt"
            if stat.state == "Z" and not known.zombie:
                known.zombie, known.status = True, stat.status
                ends.append(self._end(known, now))
        for key in [key for key in self.alive if key not in members]:
            gone = self.alive.pop(key)
            if not gone.zombie:
                ends.append(self._end(gone, now))
        self._measure(now)
        self.cost_s = time.perf_counter() - begun
        return new, ends

    def _members(self, table: dict[int, Stat]) -> set[tuple[int, int]]:
        children: dict[int, list[int]] = {}
        for pid, stat in table.items():
            children.setdefault(stat.parent, []).append(pid)
        ready = [
            pid for pid, started in self._roots | set(self.alive) if pid in table and table[pid].started == started
        ]
        if self._adopt is not None:
            ready += [pid for pid in children.get(self._adopt, ()) if pid not in self._ignore]
        if self._marks:
            ready += [pid for pid, stat in table.items() if self._marked(pid, stat)]
        members: set[tuple[int, int]] = set()
        while ready:
            pid = ready.pop()
            key = (pid, table[pid].started)
            if key in members or pid in self._ignore or pid == self._adopt:
                continue
            members.add(key)
            ready += children.get(pid, ())
        return members

    def _marked(self, pid: int, stat: Stat) -> bool:
        key = (pid, stat.started)
        if key in self.alive:
            return True
        if key in self._unmarked:
            return False
        if any(has_environment(pid, [mark]) for mark in self._marks):
            return True
        self._unmarked.add(key)
        return False

    def _meet(self, key: tuple[int, int], stat: Stat, now: float) -> Process:
        command = command_line(key[0]) or stat.name
        role = self._role(command, stat.parent, key[0])
        return Process(key[0], key[1], stat.parent, stat.name, command, role, now, stat.cpu)

    def _role(self, command: str, parent: int, pid: int) -> str:
        role = self._book.role(command)
        if role == "helper" or role == "ray":
            return role
        above = next((item for item in self.alive.values() if item.pid == parent), None)
        if pid in self._ports:
            return "engine"
        below = above is not None and above.role in ("engine", "engine-child")
        if below and role == "engine" and above is not None and above.command == command:
            return "engine-child"  # just forked: what it will be shows when it has called exec
        return "engine-child" if below and role == "other" else role

    def own_port(self, port: int) -> bool:
        """Mark the process that listens on ``port`` (and what it starts) as an engine; False if it is none of ours."""
        pid = listener(port)
        owner = next((item for item in self.alive.values() if item.pid == pid), None)
        if owner is None:
            return False
        if owner.role in ("other", "trainer"):
            self._ports.add(owner.pid)
            owner.role = "engine"
            for child in self.alive.values():
                if child.parent == pid and child.role == "other":
                    child.role = "engine-child"
        return True

    def _end(self, gone: Process, now: float) -> Exit:
        status = gone.status if gone.status is not None else self.statuses.get(gone.pid)
        words = gone.command.split()
        name = Path(words[0]).name if words else gone.name
        script = next((Path(word).name for word in words[1:] if word.endswith(".py")), "")
        label = f"{name} {script}".strip() if script else gone.name
        above = next((item for item in self.alive.values() if item.pid == gone.parent and not item.zombie), None)
        parent = f"{above.command[:80]} (pid {above.pid})" if above is not None else ""
        return Exit(now, gone.pid, label, gone.role, status, age_s=now - gone.since, parent=parent)

    def _measure(self, now: float) -> None:
        """CPU cores in use since the last poll, by the processes that were there both times."""
        used = {key: item.cpu for key, item in self.alive.items()}
        if self._cpu_at is not None and now > self._cpu_at[0]:
            before = self._cpu_at[1]
            spent = sum(cpu - before.get(key, 0.0) for key, cpu in used.items())
            self.cores = max(0.0, spent) / (now - self._cpu_at[0])
        if self._cpu_at is None or now - self._cpu_at[0] >= 1.0 or self.cores is None:
            self._cpu_at = (now, used)

    def living(self) -> list[Process]:
        """Return the processes that are not just waiting to be reaped."""
        return [item for item in self.alive.values() if not item.zombie]


def listener(port: int) -> int | None:
    """Return the pid that listens on a local TCP port, as far as it may be seen."""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
                return connection.pid
    except (psutil.Error, OSError):
        pass
    return None


# Worker processes that only ever run below a server; the server itself may rightly run without a parent (nohup).
_WORKER = re.compile(r"VLLM::|vLLM::|sglang::|SGLang::|EngineCore")


def orphan_engines(mine: Iterable[int]) -> list[tuple[int, str]]:
    """Return (pid, command) of engine workers of other runs whose parents are gone."""
    own = set(mine)
    found = []
    for pid, stat in snapshot().items():
        if stat.parent == 1 and pid not in own and stat.state != "Z":
            command = command_line(pid) or stat.name
            if _WORKER.search(command) and pid != os.getpid():
                found.append((pid, command[:120]))
    return found
