"""The judge process: collects evidence, judges, acts. ``python -m zerogap.watchdog.session RUN_FOLDER``."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from zerogap.errors import UsageError, ZerogapError
from zerogap.files import write_text_atomic
from zerogap.watchdog import ending, judge
from zerogap.watchdog.action import Action
from zerogap.watchdog.collect import Collector
from zerogap.watchdog.events import Verdict
from zerogap.watchdog.machine import scheduler
from zerogap.watchdog.processes import read_stat
from zerogap.watchdog.run_files import alive, load
from zerogap.watchdog.scan import number

TICK_S = 0.2
MOST_FAILURES = 50  # turns in a row that may fail before the judge gives up


class Session(Collector):
    """One watched run: what is collected is judged, and a verdict is acted on."""

    def __init__(self, folder: Path, run: dict[str, Any], pump: tuple[int, int] | None = None) -> None:
        super().__init__(folder, run, pump)
        self.result: Verdict | None = None
        self.action = Action(self)
        self._told: set[tuple[str, str]] = set()
        self._stacked = False

    def loop(self) -> Verdict | None:
        """Watch until the run ends or is stopped; return the verdict, None for a run that ended well."""
        failures = 0
        while True:
            try:
                self.turn()
                failures = 0
            except Exception as error:  # one line or one process that we misread must not end the watch
                failures += 1
                self.record("judge-error", f"{type(error).__name__}: {error}")
                if failures >= MOST_FAILURES:
                    raise
            now = time.time()
            if self.end is not None:
                return self._finish()
            verdict = judge.check(self.seen, now)
            if verdict is not None or self.alarmed:
                # Something looks wrong: now every line counts.
                self.alarmed = False
                self._read(now, everything=True)
                verdict = judge.check(self.seen, now)
            if verdict is not None and (verdict.name, verdict.cause) not in self._told:
                self._told.add((verdict.name, verdict.cause))
                self.record("verdict", f"{verdict.name}: {verdict.cause}")
                self.result = verdict
                if self.action.on_verdict(verdict):
                    return verdict
            self._stacks_before_suicide(now)
            time.sleep(TICK_S)

    def _finish(self) -> Verdict | None:
        """The run ended by itself: read what is left of its log, judge, and clean up after a failure."""
        assert self.end is not None
        self._read(time.time(), everything=True)
        for name in self.sources:
            for raw in self.scanner.finish(name):
                for hit in self.scanner.match(name, raw, time.time()):
                    self._take(hit)
            for hit in self.scanner.flush(name, time.time()):
                self._take(hit)
        self._look_at_processes(time.time())
        self._look_at_machine(time.time())
        now, seen = time.time(), self.seen
        seen.ended = self.end
        if self.end.role == "pump":
            verdict: Verdict | None = ending.pump_killed(seen, now)
        elif seen.interrupted and seen.interrupted[0] == signal.SIGTERM and scheduler() and self.end.status != 0:
            verdict = ending.preempted(seen, now, scheduler())
        else:
            verdict = ending.ended(seen, now)
        self.record("end", f"{self.end.name} ended {self.end.how()}")
        self.action.on_end(verdict, self.end)
        return verdict or (self.result if self.options["on_failure"] != "stop" else None)

    def _stacks_before_suicide(self, now: float) -> None:
        """Take the stacks at 80 % of the engine's own watchdog time, after which there is nothing left to look at."""
        limit = number(self.seen.info.get("watchdog_timeout"))
        quiet = now - max(self.seen.hard_at, self.seen.talked_at)
        if limit and quiet >= 0.8 * limit and not self._stacked and self.seen.phases.needs_engine:
            self._stacked = True
            self.action.take_stacks()


def open_run(folder: Path, first: bool = False) -> Session:
    """Return a session for the run of ``folder``, registered as its judge.

    The ``first`` judge, which the pump itself starts, also takes a command that has ended meanwhile.

    Raises:
        UsageError: when the folder is none of a run, the run is over, or another judge watches it.
    """
    run = load(folder / "run.json")
    pump = load(folder / "pump.json").get("pump")
    if not run or not pump:
        raise UsageError(f"{folder}: not the folder of a run; give the one that `zerogap run` named (--dir)")
    if (not first and (folder / "ended.json").exists()) or not alive((pump["pid"], int(pump["started"]))):
        raise UsageError(f"{folder}: this run is over; its record is in {folder}/incident.md if anything went wrong")
    other = load(folder / "judge.json")
    if other and other["pid"] != os.getpid() and alive((other["pid"], int(other["started"]))):
        raise UsageError(f"{folder}: the judge with pid {other['pid']} already watches this run")
    stat = read_stat(os.getpid())
    assert stat is not None
    write_text_atomic(folder / "judge.json", json.dumps({"pid": os.getpid(), "started": stat.started}))
    return Session(folder, run, (pump["pid"], int(pump["started"])))


def main() -> int:
    """Judge the run of the folder named on the command line."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # A scheduler signals every process of the job; the judge stays to write down what happened and ends with the
        # run. A handler, not SIG_IGN, which the programs that the judge starts would inherit.
        signal.signal(signum, lambda *_: None)
    try:
        session = open_run(Path(sys.argv[1]), first=True)
    except ZerogapError as error:
        os.write(2, f"zerogap: error: {error}\n".encode())
        return int(error.exit_code)
    session.start()
    return 1 if session.loop() is not None else 0


if __name__ == "__main__":
    # Probe threads may hang in a request; an exit must not wait for them.
    code = 3
    try:
        code = main()
        if code == 1:
            code = 0  # for the pump a judge that did its work ended well, whatever it found
    except KeyboardInterrupt:
        code = 0
    except Exception as error:
        os.write(2, f"zerogap: the judge failed: {type(error).__name__}: {error}\r\n".encode())
        if os.environ.get("ZEROGAP_DEBUG"):
            raise
    finally:
        sys.stderr.flush()
        os._exit(code)
