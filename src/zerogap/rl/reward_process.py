"""The child processes in which rewards are called, and what of the environment they get to see.

The workers are plain child processes that speak JSON lines over a socket, and not a process pool of a library, for
three reasons: their environment is free of secrets from the start (a cleaned ``os.environ`` leaves them readable in
/proc), each is killed with everything that the reward started, and one round trip is cheap enough (tens of
microseconds) to give every reward its own, so that a hang costs one reward only.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SECRET_NAME = re.compile(
    r"(?:^|_)(?:KEYS?|AUTH|PAT|DSN|COOKIES?|PWD|PASS)(?:_|$)"
    r"|(?:TOKEN|SECRET|PASSW(?:OR)?D|PASSPHRASE|CREDENTIAL|APIKEY|ACCESSKEY)S?(?:_|$)",
    re.IGNORECASE,
)
# A URL with a password in it, or the beginning of a well-known kind of token.
_SECRET_VALUE = re.compile(
    r"://[^/\s:@]*:[^/\s@]+@|^(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|AKIA|ASIA|npm_|pypi-|eyJ)[\w.\-]{8,}"
)
_HARMLESS = frozenset({"PWD", "OLDPWD"})
START_LIMIT_S = 120.0


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without variables that look like secrets, by their name or their value."""
    return {
        name: value
        for name, value in environment.items()
        if name in _HARMLESS or not (_SECRET_NAME.search(name) or _SECRET_VALUE.search(value))
    }


class Worker:
    """One child process and what it is doing."""

    def __init__(self, function: str, log: Path | None) -> None:
        self.channel, other = socket.socketpair()
        environment = clean_environment(os.environ)
        # One thread, and the same order of sets in every worker; it finds the modules that this process finds.
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        with other:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-P", "-m", "zerogap.rl.reward_worker", str(other.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                pass_fds=[other.fileno()],
                start_new_session=True,
            )
        self.end = weakref.finalize(self, _end, self.process, self.channel)  # also when the interpreter exits
        self.buffer = b""
        self.ready = False
        self.job: int | None = None
        self.since = time.monotonic()
        self.send({"function": function, "python_path": os.environ.get("PYTHONPATH"), "log": _text(log)})

    def send(self, record: Mapping[str, Any] | str, limit_s: float = START_LIMIT_S) -> None:
        """Send one line; a worker that is gone or does not read is found out by its missing answer."""
        self.channel.settimeout(limit_s)
        self.since = time.monotonic()
        with contextlib.suppress(OSError):
            self.channel.sendall((record if isinstance(record, str) else json.dumps(record)).encode() + b"\n")
        self.channel.setblocking(False)

    def receive(self) -> tuple[dict[str, Any] | None, bool]:
        """Return (answer if complete, whether the other end has closed)."""
        try:
            data = self.channel.recv(65536)
        except BlockingIOError:
            # Nothing to read: either still at work, or ended while a grandchild holds the socket open.
            return None, self.process.poll() is not None
        except OSError:
            data = b""
        self.buffer += data
        line, newline, rest = self.buffer.partition(b"\n")
        if not newline:
            return None, not data
        self.buffer = rest
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        return (answer, False) if isinstance(answer, dict) else (None, True)

    @property
    def seconds(self) -> float:
        """Time since the last line was sent."""
        return time.monotonic() - self.since


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())


def _end(process: subprocess.Popen[bytes], channel: socket.socket) -> None:
    channel.close()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
