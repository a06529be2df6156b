"""The pump: starts the command, passes its streams through byte for byte, and writes them to the run folder.

It is a process of its own that imports the standard library only and judges nothing, so that neither a slow nor a
dead judge can slow or end the run. It is a subreaper: children that leave their parents come to it and stay visible.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
import tty
from pathlib import Path
from typing import Any

CHUNK = 1 << 18  # bytes per read; a pipe is enlarged to hold four of them
PIPE_BYTES = 1 << 20
LOG_BYTES = 1 << 30  # a log file that reaches this is renamed to *.1 and begun anew, so a week of chatter fills no disk
DRAIN_S = 1.0  # how long leftover children may hold our pipes open after the command ended
JUDGE_WAIT_S = 90.0  # how long a judge that is writing an incident may keep us after the command ended
PR_SET_CHILD_SUBREAPER = 36
SI_KERNEL = 128  # the terminal itself sent the signal, so the whole foreground group has it already
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


class LogFile:
    """One stream's log: appended bytes, renamed to ``.1`` at a size limit, given up with one message when it fails."""

    def __init__(self, path: Path, limit: int = LOG_BYTES) -> None:
        self.path, self.limit, self.size = path, limit, 0
        self.handle: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    def write(self, data: bytes) -> None:
        """Append ``data``; a full disk ends the log, never the run."""
        if self.handle is None:
            return
        try:
            if self.size and self.size + len(data) > self.limit:
                self._rotate()
            write_all(self.handle, data)
            self.size += len(data)
        except OSError as error:
            os.close(self.handle)
            self.handle = None
            say(f"zerogap: the log {self.path} stops here ({error.strerror}); the run goes on without it")

    def _rotate(self) -> None:
        os.replace(self.path, self.path.with_name(self.path.name + ".1"))
        fresh = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        os.close(self.handle)  # type: ignore[arg-type]
        self.handle, self.size = fresh, 0


class Stream(threading.Thread):
    """Copies one of the command's streams to ours and to its log until it ends."""

    def __init__(self, source: int, sink: int, log: LogFile) -> None:
        super().__init__(daemon=True)
        self.source, self.sink, self.log = source, sink, log

    def run(self) -> None:
        """Copy until the command's end closes, or our reader is gone (the command then gets SIGPIPE as it would)."""
        sink_open = True
        while True:
            try:
                data = os.read(self.source, CHUNK)
            except OSError:  # a pty whose last writer is gone reports EIO
                data = b""
            if not data:
                break
            try:
                write_all(self.sink, data)
            except BrokenPipeError:
                sink_open = False
            except OSError as error:
                say(f"zerogap: cannot write the run's output: {error.strerror}")
                sink_open = False
            self.log.write(data)
            if not sink_open:
                break
        os.close(self.source)


def write_all(handle: int, data: bytes) -> None:
    """Write all of ``data``, also to a descriptor that someone else made non-blocking."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(handle, view) :]
        except BlockingIOError:
            select.select([], [handle], [], 1.0)


def say(text: str) -> None:
    """Print one line on stderr; in a raw terminal a line needs its carriage return."""
    ending = "\r\n" if os.isatty(2) else "\n"
    with contextlib.suppress(OSError):
        os.write(2, (text + ending).encode())


def create_time(pid: int) -> float | None:
    """Return when ``pid`` started, in clock ticks since boot, None when it is gone; the two name one process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] == b"Z" else float(fields[19])


class Pump:
    """One run: the command, its streams, the signals and the records that the judge reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run: dict[str, Any] = json.loads((folder / "run.json").read_text())
        self.interrupted: int | None = None
        self.command: subprocess.Popen[bytes] | None = None
        self.own_group = not os.isatty(0)
        self.streams: list[Stream] = []
        self.master: int | None = None
        self.saved_tty: list[Any] | None = None

    def start(self) -> None:
        """Start the command on a pty when our stdout is a terminal, on pipes otherwise."""
        environment = {**os.environ, **self.run["environment"]}
        stdout, stderr = self.folder / "stdout.log", self.folder / "stderr.log"
        if os.isatty(1):
            self.master, slave = pty.openpty()
            self._copy_window_size()
            stdin = slave if os.isatty(0) else 0
            # A stderr that leads elsewhere keeps leading there; one on the same terminal shares the pty.
            read_err, err = (None, slave) if os.isatty(2) else self._pipe()
            self.command = self._spawn(environment, stdin, slave, err, session=True)
            os.close(slave)
            self.streams.append(Stream(self.master, 1, LogFile(stdout)))
            if read_err is not None:
                os.close(err)
                self.streams.append(Stream(read_err, 2, LogFile(stderr)))
            if os.isatty(0):
                self.saved_tty = termios.tcgetattr(0)
                tty.setraw(0)
                threading.Thread(target=self._pass_keys, daemon=True).start()
        else:
            (read_out, out), (read_err, err) = self._pipe(), self._pipe()
            self.command = self._spawn(environment, 0, out, err, session=False)
            os.close(out)
            os.close(err)
            self.streams += [Stream(read_out, 1, LogFile(stdout)), Stream(read_err, 2, LogFile(stderr))]
        for stream in self.streams:
            stream.start()
        self._record("pump.json", {"pump": self._identity(os.getpid()), "command": self._identity(self.command.pid)})

    def _spawn(
        self, environment: dict[str, str], stdin: int, out: int, err: int, session: bool
    ) -> subprocess.Popen[bytes]:
        def enter() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            for number in (*FORWARDED, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            if session:
                os.setsid()
                fcntl.ioctl(out, termios.TIOCSCTTY, 0)
            elif self.own_group:
                os.setpgid(0, 0)

        return subprocess.Popen(
            self.run["argv"], env=environment, stdin=stdin, stdout=out, stderr=err, preexec_fn=enter, bufsize=0
        )

    def _pipe(self) -> tuple[int, int]:
        read, write = os.pipe()
        with contextlib.suppress(OSError):  # an unprivileged user may be over the pipe quota
            fcntl.fcntl(read, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        return read, write

    def start_judge(self) -> subprocess.Popen[bytes]:
        """Start the judge beside us, in a session of its own so that Ctrl-C leaves it time to write the incident."""
        command = [sys.executable, "-P", "-m", "zerogap.watchdog.session", str(self.folder)]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True)

    def _pass_keys(self) -> None:
        while True:
            data = os.read(0, 4096)
            if not data or self.master is None:
                return
            if b"\x03" in data:  # the pty turns it into SIGINT; we only note that someone asked
                self._note_interrupt(signal.SIGINT)
            try:
                write_all(self.master, data)
            except OSError:
                return

    def _copy_window_size(self) -> None:
        if self.master is not None:
            size = fcntl.ioctl(1, termios.TIOCGWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
            fcntl.ioctl(self.master, termios.TIOCSWINSZ, size)

    def _note_interrupt(self, number: int) -> None:
        self.interrupted = number
        self._record("interrupted.json", {"signal": number, "at": time.time()})

    def forward(self, number: int, code: int) -> None:
        """Give a signal to the command: to its group if the terminal sent it to ours, to the one process otherwise."""
        assert self.command is not None
        if number == signal.SIGWINCH:
            self._copy_window_size()
            return
        if number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            self._note_interrupt(number)
        try:
            if code != SI_KERNEL:
                os.kill(self.command.pid, number)
            elif self.own_group:
                os.killpg(self.command.pid, number)
        except ProcessLookupError:
            pass

    def supervise(self, judge: subprocess.Popen[bytes]) -> int:
        """Wait for the command while reaping orphans and forwarding signals; return the exit code to use."""
        assert self.command is not None
        watched = {*FORWARDED, signal.SIGWINCH, signal.SIGCHLD}
        status: int | None = None
        exits = (self.folder / "exits.jsonl").open("a", buffering=1)
        while status is None:
            # SIGCHLD signals merge, so children are collected before each wait and at least once a second.
            while True:
                try:
                    pid, raw = os.waitpid(-1, os.WNOHANG)
                except ChildProcessError:
                    pid, raw = 0, 0
                if not pid:
                    break
                code = os.waitstatus_to_exitcode(raw)
                if pid == judge.pid:
                    judge.returncode = code
                    if code:
                        say(f"zerogap: the judge ended ({code}); the run goes on. To watch again: "
                            f"zerogap watch --dir {self.folder}")  # fmt: skip
                else:
                    exits.write(json.dumps({"pid": pid, "status": code, "at": time.time()}) + "\n")
                if pid == self.command.pid:
                    status = self.command.returncode = code
            if status is None:
                info = signal.sigtimedwait(watched, 1.0)
                if info is not None and info.si_signo != signal.SIGCHLD:
                    self.forward(info.si_signo, info.si_code)
        deadline = time.monotonic() + DRAIN_S
        for stream in self.streams:
            stream.join(max(0.0, deadline - time.monotonic()))
        self._record("ended.json", {"status": status, "at": time.time(), "interrupted": self.interrupted})
        self._wait_for_judge(judge)
        if self.saved_tty is not None:
            termios.tcsetattr(0, termios.TCSADRAIN, self.saved_tty)
        if (self.folder / "stopping.json").exists():
            return 1
        return 128 - status if status < 0 else status

    def _wait_for_judge(self, judge: subprocess.Popen[bytes]) -> None:
        """Let the judge finish its incident, whichever judge that is by now; a second Ctrl-C cuts this short."""
        deadline = time.monotonic() + JUDGE_WAIT_S
        while time.monotonic() < deadline:
            try:
                pid, _ = os.waitpid(judge.pid, os.WNOHANG)
                ours_runs = pid == 0
            except ChildProcessError:
                ours_runs = False
            if not ours_runs and not self._other_judge_runs():
                return
            info = signal.sigtimedwait(set(FORWARDED), 0.05)
            if info is not None and info.si_signo in (signal.SIGINT, signal.SIGQUIT):
                return

    def _other_judge_runs(self) -> bool:
        try:
            identity = json.loads((self.folder / "judge.json").read_text())
        except (OSError, ValueError):
            return False
        return bool(create_time(identity["pid"]) == identity["started"])

    def _identity(self, pid: int) -> dict[str, Any]:
        return {"pid": pid, "started": create_time(pid)}

    def _record(self, name: str, body: dict[str, Any]) -> None:
        temporary = self.folder / f".{name}.tmp"
        try:
            temporary.write_text(json.dumps(body))
            os.replace(temporary, self.folder / name)
        except OSError as error:
            say(f"zerogap: cannot write {self.folder / name}: {error.strerror}")


def main() -> int:
    """Pump the run of the folder named on the command line and return its exit code."""
    folder = Path(sys.argv[1])
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, {*FORWARDED, signal.SIGWINCH, signal.SIGCHLD})
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    pump = Pump(folder)
    try:
        pump.start()
    except OSError as error:
        say(f"zerogap: error: cannot start {pump.run['argv'][0]!r}: {error.strerror}; check the command after --")
        (folder / "failed.json").write_text(json.dumps({"error": str(error)}))
        return 2
    return pump.supervise(pump.start_judge())


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
