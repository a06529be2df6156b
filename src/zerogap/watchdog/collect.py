"""Collecting the evidence of one run: its processes, its log lines, its engines, the machine, its Ray job."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from zerogap.console import printable
from zerogap.errors import UsageError, ZerogapError
from zerogap.watchdog.budgets import Budgets
from zerogap.watchdog.events import Activity, Exit, Probe
from zerogap.watchdog.follow import Follower
from zerogap.watchdog.gap_rule import GapRule
from zerogap.watchdog.intake import Intake
from zerogap.watchdog.lines import parse_line
from zerogap.watchdog.lint import lint, restarts_engines, works_elsewhere
from zerogap.watchdog.machine import Gpus, OomCounter
from zerogap.watchdog.probes import Counted, EngineWatch, is_own, parse_url
from zerogap.watchdog.processes import Tracker, command_line, orphan_engines, read_stat
from zerogap.watchdog.ray_jobs import JobServer, local_log
from zerogap.watchdog.redact import redact
from zerogap.watchdog.review import read_log
from zerogap.watchdog.rules import RuleBook, load_rules
from zerogap.watchdog.run_files import EventLog, alive, identity, load
from zerogap.watchdog.scan import Hit, Scanner
from zerogap.watchdog.seen import Seen
from zerogap.watchdog.verdicts import ENGINE_ROLES

REMEMBERED = 4096  # lines remembered to tell new words from repeated ones
ENGINE_PHASES = ("training", "weight update", "first sync", "checkpoint")  # an engine may rightly not generate in them
RECORDED = ("cause", "symptom", "phase", "timer", "wait", "exit", "notice", "info", "metric", "pair")


class Collector:
    """Everything that is seen of one run, fed into ``seen``.

    Args:
        folder: the run folder.
        run: the content of ``run.json``.
        pump: (pid, start time) of the pump, for a run that ``zerogap run`` started.
    """

    def __init__(self, folder: Path, run: dict[str, Any], pump: tuple[int, int] | None = None) -> None:
        self.folder, self.run, self.options = folder, run, run["options"]
        self.pump = pump
        now = time.time()
        budgets = Budgets().scaled(float(self.options["patience"]))
        self.book: RuleBook = load_rules(Path(path) for path in self.options["rules"])
        self.scanner = Scanner(self.book)
        self.sources: dict[str, Follower] = {}
        self._recent: dict[int, None] = {}
        self.gpus = Gpus()
        self.command = identity(folder, "command")
        roots = [self.command] if self.command else []
        roots += [(pid, started) for pid, started in run.get("roots", [])]
        self.ray = self._ray_server()
        self.ray_job: str | None = self.options["ray_job"]
        marks = [f"ZEROGAP_RUN={run['id']}"] if pump else []
        if self.ray is not None and self.ray_job:
            job = self.ray.job(self.ray_job)
            self.ray_job = job.submission_id
            marks += [f"RAY_JOB_ID={job.job_id}"] if job.job_id else []
            stat = read_stat(job.driver_pid) if job.driver_pid else None
            if job.driver_pid and stat is not None:
                roots.append((job.driver_pid, stat.started))
            log = local_log(job.submission_id)
            if log is not None:
                self.sources[log.name] = Follower(log)
        self.processes = bool(roots or marks or self.ray) and not works_elsewhere(run.get("argv", []))
        self.seen = Seen(
            self.book, now, budgets, processes=self.processes, fault_tolerant=restarts_engines(run.get("argv", []))
        )
        self.seen.gap = GapRule(self.options["gap"]) if self.options.get("gap") else None
        adopt = pump[0] if pump else None
        self.tracker = Tracker(roots, self.book, adopt, ignore=[os.getpid()], marks=marks)
        self.oom = OomCounter(roots[0][0]) if roots else None
        self.seen.oom_known = self.oom is not None and self.oom.known
        self.probes: SimpleQueue[Probe | Counted] = SimpleQueue()
        self.engines: dict[str, EngineWatch] = {}
        self._exits_read = 0
        self._next: dict[str, float] = {}
        self._ray_log_size = 0
        self.end: Exit | None = None
        self._events = EventLog(folder / "events.jsonl")
        self._linted: set[str] = set()
        self.orphans: list[str] = []
        self._last_at = 0.0
        self.alarmed = False
        self.intakes: dict[str, Intake] = {}

    # -- set-up ---------------------------------------------------------------------------------------------------

    def _ray_server(self) -> JobServer | None:
        return JobServer(self.options["ray_address"]) if self.options["ray_job"] else None

    def say(self, text: str) -> None:
        """Print a line on stderr, redacted and inert; a raw terminal needs the carriage return."""
        ending = "\r\n" if self.pump and os.isatty(2) else "\n"
        with contextlib.suppress(OSError):
            os.write(2, (printable(redact(text)) + ending).encode())

    def start(self) -> None:
        """Open the logs, start the probes, and say what can be said beforehand."""
        if self.pump:
            for name in ("stdout", "stderr"):
                self.sources[name] = Follower(self.folder / f"{name}.log")
        for name, path in self.options["logs"]:
            self.sources[name] = Follower(Path(path))
        for url in self.options["engines"]:
            self._watch_engine(url, trusted=True)
        self._lint(self.run.get("argv", []))
        self.tracker.poll(time.time())
        mine = [item.pid for item in self.tracker.living()]
        for pid, command in orphan_engines(mine):
            self.orphans.append(f"pid {pid}: {command}")
            self.say(f"zerogap: notice orphan-engine: pid {pid} ({command}) has no parent and may hold GPU memory")

    def catch_up(self) -> None:
        """Take in what the logs hold already, at the times their lines carry, and go on from there."""
        hits: list[Hit] = []
        for name, follower in self.sources.items():
            older = follower.path.with_name(follower.path.name + ".1")
            if self.pump and older.is_file():
                hits += read_log(self.scanner, name, older)
            if follower.path.is_file():
                follower.offset = follower.path.stat().st_size
                hits += read_log(self.scanner, name, follower.path, follower.offset)
        for hit in sorted(hits, key=lambda item: item.at):
            self._take(hit)

    def _lint(self, argv: list[str]) -> None:
        for warning in lint(argv):
            if warning not in self._linted:
                self._linted.add(warning)
                self.say(f"zerogap: warning {warning}")
                self.record("lint", warning)

    def _watch_engine(self, url: str, trusted: bool) -> None:
        if url not in self.engines:
            watch = EngineWatch(
                url, self.probes, interval_s=min(5.0, 5.0 * self.options["patience"]),
                timeout_s=self.options["probe_timeout"], trusted=trusted,
            )  # fmt: skip
            self.engines[url] = watch
            watch.start()

    # -- one turn -------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Collect everything that is new."""
        now = time.time()
        self._read(now)
        if self.pump:
            self._read_pump(now)
        while True:
            try:
                item = self.probes.get_nowait()
            except Empty:
                break
            if isinstance(item, Probe):
                if not self._ours(item):
                    continue
                self.seen.probe(item)
                if not item.ok:
                    self.alarmed = True
                    self._next["processes"] = 0.0  # whoever died is named before the probe is judged
                if item.ok:
                    port = int(item.url.rsplit(":", 1)[1])
                    if is_own(item.url) and self._due(f"port {port}", now, 30.0) and not self.tracker.own_port(port):
                        self._next[f"port {port}"] = now + 2.0  # its process may not be known yet
            else:
                self.seen.counted(item.at, item.tokens, item.requests)
        if self._due("processes", now, min(1.0, max(0.5, 150 * self.tracker.cost_s))):
            self._look_at_processes(now)
        if self._due("machine", now, 1.0):
            self._look_at_machine(now)
        if self.ray is not None and self._due("ray", now, 1.0):
            self._look_at_ray(now)
        # A run that trains or syncs may have taken the engine's memory; one that does nothing at all is asked anyway.
        idle = self.seen.quiet_for(now) >= 5 * self.seen.budgets.quiet_s
        resting = bool(self.seen.open_pairs) or (self.seen.phases.name in ENGINE_PHASES and not idle)
        for watch in self.engines.values():
            watch.may_generate = not resting

    def _ours(self, probe: Probe) -> bool:
        """Whether a probe tells something of this run: an address of a log must belong to one of its processes."""
        watch = self.engines[probe.url]
        if not watch.trusted and probe.ok and self.tracker.own_port(int(probe.url.rsplit(":", 1)[1])):
            watch.trusted = True
        return watch.trusted

    def _due(self, what: str, now: float, every: float) -> bool:
        if now < self._next.get(what, 0.0):
            return False
        self._next[what] = now + every
        return True

    def _read(self, now: float, everything: bool = False) -> None:
        for name, follower in list(self.sources.items()):
            intake = self.intakes.get(name)
            if intake is None:
                intake = self.intakes[name] = Intake(name, follower, self._digest, self.scanner.forget)
            if not intake.look(now, everything):
                for hit in self.scanner.flush(name, now):
                    self._take(hit)

    def _digest(self, name: str, data: bytes, now: float) -> None:
        for raw in self.scanner.feed(name, data):
            at = self._now(now) if now >= self._last_at - 1.0 else now
            for hit in self.scanner.match(name, raw, at):
                self._take(hit)
        # Whether the log says anything new is judged by a few of its lines: a flood repeats itself.
        for raw in data[-2000:].split(b"\n")[-5:-1]:
            line = parse_line(raw[:500])
            mark = hash(line.text)
            if mark not in self._recent:
                self._recent[mark] = None
                if len(self._recent) > REMEMBERED:
                    self._recent.pop(next(iter(self._recent)))
                if not any(rule.kind in ("symptom", "wait", "cause") for rule in self.scanner.matching(line)):
                    self.seen.talked(now)

    def _now(self, now: float) -> float:
        """Return a time for the next line that is later than that of the line before: order is evidence."""
        self._last_at = max(now, self._last_at + 1e-6)
        return self._last_at

    def _take(self, hit: Hit) -> None:
        self.seen.hit(hit)
        if hit.rule.kind in RECORDED:
            self.record(hit.rule.kind, hit.line.text[:1000], hit)
        if hit.rule.kind == "info":
            self._learn(hit)
        elif hit.rule.id == "engine-ready" and "url" in hit.fields:
            self._found_engine(hit.fields["url"])

    def _learn(self, hit: Hit) -> None:
        if "address" in hit.fields:
            self._found_engine(hit.fields["address"])
        launch = hit.fields.get("launch") or hit.fields.get("flags")
        if launch:
            self._lint([launch])
            self.seen.fault_tolerant |= restarts_engines([launch])
        address = self.seen.info.get("ray_address", self.options["ray_address"])
        # A model can write this line, too: only a living `ray job submit` of this run makes it ours.
        submits = any("job submit" in item.command for item in self.tracker.living())
        if "ray_job" in hit.fields and self.ray is None and self.pump and submits and is_own(address):
            self.ray, self.ray_job = JobServer(address, timeout_s=3.0), hit.fields["ray_job"]

    def _found_engine(self, address: str) -> None:
        """Probe an engine that the log names, if its address leads to this host and nowhere else."""
        if not self.options["engines"] and "<" not in address:
            try:
                url = parse_url(address.replace("0.0.0.0", "127.0.0.1"))
            except UsageError:
                return
            if is_own(url):
                self._watch_engine(url, trusted=False)

    def _look_at_processes(self, now: float) -> None:
        new, ends = self.tracker.poll(now)
        for process in new:
            if process.role == "engine":
                self.seen.engine_started(now)
        held = [item for item in self.tracker.living() if item.stopped and item.role in ("engine", "engine-child")]
        self.seen.stopped = [f"{item.name} (pid {item.pid})" for item in held]
        for item in ends:
            if self.command and item.pid == self.command[0]:
                continue  # its end is told by the pump
            self.seen.exit(item)
            self.record("exit", f"{item.name} pid {item.pid} ({item.role}) ended {item.how()}")
            if item.role in ENGINE_ROLES or item.abnormal:
                self.alarmed = True
                for watch in self.engines.values():
                    watch.now()
                self._next["machine"] = 0.0
        if self.run.get("roots") and not self.tracker.living() and not self.ray:
            roots = [item for item in ends if [item.pid] == [root[0] for root in self.run.get("roots", [])][:1]]
            status = roots[0].status if roots else None
            self.end = self.end or Exit(now, 0, "the watched process", "trainer", status)

    def _look_at_machine(self, now: float) -> None:
        cores = self.tracker.cores if self.processes else None
        self.seen.active_sample(Activity(now, cores, *self.gpus.activity()))
        for text in self.gpus.faults():
            self.seen.gpu_error(now, text)
        for source, kills in self.oom.new() if self.oom else ():
            self.seen.oom(now, kills, source)
            self.record("oom", f"{source}: {kills} kill(s)")
        if self.options["heartbeat"]:
            with contextlib.suppress(OSError):
                self.seen.heartbeat_at = os.stat(self.options["heartbeat"]).st_mtime

    def _look_at_ray(self, now: float) -> None:
        assert self.ray is not None
        assert self.ray_job is not None
        try:
            job = self.ray.job(self.ray_job)
            if not self.pump and not any(name.startswith("job-driver") for name in self.sources):
                text = self.ray.logs(self.ray_job).encode()
                self._digest("ray job log", text[self._ray_log_size :], now)
                self._ray_log_size = len(text)
        except ZerogapError:
            return  # the log and the processes still speak
        if job.job_id:  # known once the driver has connected
            self.tracker.add(mark=f"RAY_JOB_ID={job.job_id}")
        stat = read_stat(job.driver_pid) if job.driver_pid else None
        if job.driver_pid and stat is not None:
            self.tracker.add(root=(job.driver_pid, stat.started))
            for pid, name in self.ray.actors(job):
                actor = read_stat(pid)
                if actor is not None and command_line(pid).startswith(f"ray::{name.rsplit('.', 1)[-1]}"):
                    self.tracker.add(root=(pid, actor.started))  # on this host, and no other process of that pid
        if job.ended and not self.pump:
            status = {"SUCCEEDED": 0, "STOPPED": -15}.get(job.status, 1)
            name = f"Ray job {job.submission_id}"
            self.end = Exit(now, job.driver_pid or 0, name, "trainer", status, words=job.message)

    def _read_pump(self, now: float) -> None:
        try:
            with (self.folder / "exits.jsonl").open() as file:
                file.seek(self._exits_read)
                for line in iter(file.readline, ""):
                    if not line.endswith("\n"):
                        break
                    self._exits_read += len(line)
                    entry = json.loads(line)
                    self.tracker.statuses[entry["pid"]] = entry["status"]
        except (OSError, ValueError):
            pass
        interrupted = load(self.folder / "interrupted.json")
        if interrupted:
            self.seen.interrupted = (int(interrupted["signal"]), float(interrupted["at"]))
        ended = load(self.folder / "ended.json")
        if ended and self.end is None:
            pid = self.command[0] if self.command else 0
            age = ended["at"] - self.run["started_at"]
            self.end = Exit(ended["at"], pid, "the command", "trainer", ended["status"], age_s=age)
        elif self.end is None and self.pump and not alive(self.pump):
            self.end = Exit(now, self.pump[0], "the pump", "pump", -9)

    def record(self, kind: str, text: str, hit: Hit | None = None) -> None:
        """Append to events.jsonl, up to a limit."""
        self._events.add(kind, text, self.seen.phases.name, hit)
