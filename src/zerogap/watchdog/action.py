"""What is done about a verdict: stacks, stop or warn or a command of the user, the incident, a message."""

from __future__ import annotations

import json
import os
import subprocess
import time
from typing import Any

from zerogap.console import printable
from zerogap.errors import ZerogapError
from zerogap.files import write_text_atomic
from zerogap.watchdog import machine
from zerogap.watchdog.collect import Collector
from zerogap.watchdog.events import Exit, Verdict
from zerogap.watchdog.incident import check_launch, write_incident
from zerogap.watchdog.notify import notify
from zerogap.watchdog.redact import redact_argv
from zerogap.watchdog.stop import Stopped, label, stacks, stop_tree


class Action:
    """Acts for one session."""

    def __init__(self, session: Collector) -> None:
        self.session = session
        self._stacks: dict[str, str] = {}

    def on_verdict(self, verdict: Verdict) -> bool:
        """Act on a run that goes on; True when it was stopped."""
        session = self.session
        choice = session.options["on_failure"]
        session.say(f"zerogap: {verdict.name} ({verdict.cause}): {verdict.summary}")
        can_stop = bool(session.tracker.living()) or session.ray_job is not None
        if choice == "stop" and can_stop:
            if session.pump:
                write_text_atomic(
                    session.folder / "stopping.json", json.dumps({"verdict": verdict.name, "at": time.time()})
                )
            self.take_stacks()
            done = self.stop()
            self._write(verdict, "the run was stopped", done)
            left = f"; still alive: {', '.join(done.left)}" if done.left else ""
            session.say(f"zerogap: stopped the run{left}. Incident: {session.folder / 'incident.md'}")
            return True
        self.take_stacks()
        taken = {"warn": "none: only a warning was asked for", "exec": "the command given with --exec was started"}
        self._write(verdict, taken.get(choice, "none: no process of the run can be reached from here"))
        session.say(f"zerogap: the run goes on. Incident: {session.folder / 'incident.md'}")
        if choice == "exec":
            self._execute()
        return bool(choice == "stop")  # nothing to stop, nothing left to watch for

    def on_end(self, verdict: Verdict | None, end: Exit) -> None:
        """Act on a run that ended by itself."""
        session = self.session
        living = session.tracker.living()
        interrupted = session.seen.interrupted is not None
        if verdict is None and not interrupted:
            if living:
                names = "; ".join(label(item) for item in living[:5])
                session.say(f"zerogap: the command ended; it left {len(living)} process(es) alive: {names}")
            return
        done = Stopped(left=[label(item) for item in living])
        if session.options["on_failure"] == "stop":
            done = self.stop()
        if verdict is not None:
            self._write(verdict, "the run ended by itself; what it had left alive was ended", done)
            session.say(f"zerogap: {verdict.name} ({verdict.cause}): {verdict.summary}")
            session.say(f"zerogap: incident: {session.folder / 'incident.md'}")
        if session.options["on_failure"] == "exec" and verdict is not None:
            self._execute()

    def take_stacks(self) -> None:
        """Read the stacks of the run's processes while they are there."""
        self._stacks |= stacks(self.session.tracker.living())

    def stop(self) -> Stopped:
        """Stop the Ray job, if there is one, and every process of the run."""
        session = self.session
        grace = float(session.options["grace"])
        if session.ray is not None and session.ray_job is not None and session.ray.stop(session.ray_job):
            deadline = time.monotonic() + grace
            while time.monotonic() < deadline:
                try:
                    if session.ray.job(session.ray_job).ended:
                        break
                except ZerogapError:
                    break
                time.sleep(0.2)
        return stop_tree(session.tracker, grace)

    def _execute(self) -> None:
        session = self.session
        environment = {**os.environ, "ZEROGAP_INCIDENT": str(session.folder / "incident.json")}
        try:
            subprocess.Popen(session.options["exec"], env=environment, stdin=subprocess.DEVNULL, stdout=2)
        except OSError as error:
            session.say(f"zerogap: cannot start {session.options['exec'][0]!r}: {error.strerror}")

    def _write(self, verdict: Verdict, taken: str, done: Stopped | None = None) -> None:
        session = self.session
        done = done or Stopped()
        launch = [session.seen.info["launch"]] if "launch" in session.seen.info else session.run.get("argv", [])
        if len(launch) == 1 and " " in launch[0]:
            launch = launch[0].split()
        incident: dict[str, Any] = {
            "verdict": verdict.table(),
            "action": {
                "asked": session.options["on_failure"],
                "taken": taken,
                "terminated": done.terminated,
                "killed": done.killed,
                "left": done.left,
            },
            "command": redact_argv(session.run.get("argv", [])),
            "phases": [{"phase": span.phase, "since": span.since} for span in session.seen.phases.history],
            "last_progress": dict(session.seen.clocks),
            "machine": machine.facts(session.gpus),
            "gpu_memory_holders": session.gpus.holders(),
            "orphans": session.orphans,
            "stacks": self._stacks,
            "log": {
                "lines": session.scanner.lines,
                "matched": session.scanner.known,
                "skipped": session.scanner.skipped,
                "unread_bytes": sum(item.unread for item in session.intakes.values()),
            },
            "check": check_launch(launch) if verdict.check else None,
        }
        if verdict.check:
            incident["verdict"]["check_command"] = "zerogap check -- " + " ".join(redact_argv(launch))
        try:
            write_incident(session.folder, incident)
        except OSError as error:
            session.say(f"zerogap: cannot write the incident to {session.folder}: {error.strerror}")
        if not notify(
            session.options["notify"], f"zerogap: {verdict.name} ({verdict.cause})", printable(verdict.summary)
        ):
            session.say("zerogap: a --notify address did not accept the message")
