"""The verbs ``zerogap run`` and ``zerogap watch``: options in, run folder and processes out."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from zerogap.console import message, print_json
from zerogap.errors import ExitCode, UsageError
from zerogap.watchdog.options import Options


def _folder(asked: Path | None, verb: str) -> Path:
    folder = asked or Path(f"zerogap-{verb}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "run.json").exists():
            raise UsageError(f"--dir {folder}: holds an earlier run; give another folder")
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(f"--dir {folder}: {error.strerror}; give a folder that can be written") from None
    return folder.absolute()


def run_command(command: Sequence[str], options: Options, folder: Path | None) -> int:
    """Become the pump of a supervised run (this process is replaced and keeps its pid)."""
    if not command:
        raise UsageError("no command; write it after --, as in: zerogap run -- python train.py")
    table = options.table()
    if shutil.which(command[0]) is None:
        raise UsageError(f"cannot start {command[0]!r}: no such command; check the spelling and the PATH")
    folder = _folder(folder, "run")
    identity = uuid.uuid4().hex
    run = {
        "id": identity,
        "argv": list(command),
        "environment": {"ZEROGAP_RUN": identity},
        "started_at": time.time(),
        "options": table,
    }
    _write_private(folder / "run.json", json.dumps(run, indent=1))
    os.execv(sys.executable, [sys.executable, "-P", "-m", "zerogap.watchdog.pump", str(folder)])


def _write_private(path: Path, text: str) -> None:
    """Write a file that only its owner may read: a command line can hold secrets."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; give another folder with --dir") from None


def watch_command(
    options: Options,
    *,
    pid: int | None,
    folder: Path | None,
    once: bool,
    as_json: bool,
) -> int:
    """Attach to a run: to a run folder whose judge is gone, or to a pid, logs, engines, a Ray job."""
    from zerogap.watchdog.processes import read_stat
    from zerogap.watchdog.session import Session, open_run

    if once:
        from zerogap.watchdog.review import review

        return review(options, as_json)
    attached = pid is not None or options.logs or options.engines or options.ray_job
    if folder is not None and not attached and (folder / "run.json").exists():
        session = open_run(folder.absolute())
    else:
        if not attached:
            raise UsageError(
                "nothing to watch; give --pid, --log, --engine or --ray-job, "
                "or --dir FOLDER of a `zerogap run` whose judge is gone"
            )
        table = options.table()
        for name, path in table["logs"]:
            if not Path(path).parent.is_dir():
                raise UsageError(f"--log {name}: the folder {Path(path).parent} does not exist")
        roots = []
        if pid is not None:
            stat = read_stat(pid) if pid > 0 else None
            if stat is None:
                raise UsageError(f"--pid {pid}: no such process")
            if pid in (1, os.getpid(), os.getppid()):
                raise UsageError(f"--pid {pid}: that is not a training run (it is this shell, this command or init)")
            roots = [(pid, stat.started)]
        if options.ray_job:
            from zerogap.watchdog.ray_jobs import JobServer

            JobServer(table["ray_address"]).job(options.ray_job)  # refused before anything is written
        run = {"id": uuid.uuid4().hex, "argv": _argv(pid), "started_at": time.time(), "options": table, "roots": roots}
        place = _folder(folder, "watch")
        session = Session(place, run)
        _write_private(place / "run.json", json.dumps(run, indent=1))
    session.start()
    session.catch_up()
    message(f"zerogap: watching; records in {session.folder}")
    verdict = session.loop()
    end = session.end
    if as_json:
        body = verdict.table() if verdict else {"verdict": None, "ended": end.how() if end else None}
        print_json("zerogap.watch", 1, {**body, "folder": str(session.folder)})
    if verdict is not None:
        return int(ExitCode.DOES_NOT_HOLD)
    if end is not None and end.status is None:
        message("zerogap: the watched process ended; its exit status cannot be seen from here")
        return int(ExitCode.UNKNOWN)
    return int(ExitCode.HOLDS)


def _argv(pid: int | None) -> list[str]:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes() if pid else b""
    except OSError:
        raw = b""
    return [word.decode("utf-8", "replace") for word in raw.split(b"\0") if word]
