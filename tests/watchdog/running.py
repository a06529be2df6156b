"""Starting `zerogap run` and `zerogap watch` as a user does, and ending whatever a failed test leaves behind."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

import zerogap

PROGRAMS = Path(__file__).parent / "programs"
SOURCE = str(Path(zerogap.__file__).parents[1])


def environment(**more):
    path = os.pathsep.join(part for part in (SOURCE, os.environ.get("PYTHONPATH", "")) if part)
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **more}


def zerogap_command(*arguments):
    return [sys.executable, "-m", "zerogap", *map(str, arguments)]


def program(name, *arguments):
    return [sys.executable, str(PROGRAMS / name), *map(str, arguments)]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Running:
    """A started `zerogap run`, its output in files, so that nobody waits for a pipe."""

    def __init__(self, folder, command, *options, env=None, verb="run"):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.run = self.folder / "run"
        self.out, self.err = self.folder / "out", self.folder / "err"
        line = zerogap_command(verb, "--dir", self.run, *options, *(["--", *command] if command else []))
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                line, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env or environment(), cwd=self.folder
            )

    def text(self):
        return self.out.read_text(errors="replace") + self.err.read_text(errors="replace")

    def wait_for(self, pattern, seconds=20.0):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = re.search(pattern, self.text())
            if found:
                return found
            if self.process.poll() is not None:
                found = re.search(pattern, self.text())
                if found:
                    return found
                break
            time.sleep(0.05)
        raise AssertionError(f"{pattern!r} did not appear in {seconds} s:\n{self.text()[-3000:]}")

    def wait(self, seconds=30.0):
        return self.process.wait(seconds)

    def incident(self):
        return json.loads((self.run / "incident.json").read_text())

    def identity(self):
        return json.loads((self.run / "run.json").read_text())["id"]

    def members(self):
        """Every living process that carries this run's mark, wherever it hangs."""
        mark = self.identity()
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("ZEROGAP_RUN") == mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def close(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(5)
        if (self.run / "run.json").exists():
            for process in self.members():
                process.kill()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()
