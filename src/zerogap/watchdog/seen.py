"""What has been seen of a run so far. Only remembers; ``judge`` decides."""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import replace
from typing import Any

from zerogap.watchdog.answers import Engine
from zerogap.watchdog.budgets import Budgets
from zerogap.watchdog.events import Activity, Evidence, Exit, Probe
from zerogap.watchdog.gap_rule import GapRule
from zerogap.watchdog.metrics import backend_down, non_finite, parse_metrics
from zerogap.watchdog.phases import Phases
from zerogap.watchdog.rules import WORK, RuleBook
from zerogap.watchdog.scan import Hit, moment, number
from zerogap.watchdog.waits import group_edges

MOST_NAMES = 1000
KEPT = 500  # hits and exits remembered; the first of them are never dropped


class Seen:
    """The state of one run as far as it shows.

    Args:
        book: the rules in force.
        now: when watching began (seconds since the epoch).
        processes: whether the run's processes can be seen here, so that a quiet CPU means something.
        fault_tolerant: whether the run says that it restarts engines itself.
    """

    def __init__(
        self, book: RuleBook, now: float, budgets: Budgets, *, processes: bool = True, fault_tolerant: bool = False
    ) -> None:
        self.book, self.budgets, self.processes, self.fault_tolerant = book, budgets, processes, fault_tolerant
        self.began = now
        self.phases = Phases(book.phases, now, budgets.scale)
        self.clocks: dict[str, float] = {}  # last time each clock moved
        self._numbers: dict[tuple[str, str, str], str] = {}
        self.ready = False  # an engine has been up
        self.talked_at = now  # last line that said something new
        self.causes: list[Hit] = []
        self.symptoms: deque[Hit] = deque(maxlen=KEPT)
        self.notices: dict[str, Hit] = {}
        self.info: dict[str, str] = {}
        self._readings: dict[tuple[str, str], list[Hit]] = {}
        self._repeats: dict[tuple[str, str], int] = {}
        self._last_reading: Hit | None = None
        self.exits: list[Exit] = []
        self.engine_starts: list[float] = []
        self.stopped: list[str] = []  # engine processes that a signal or a debugger holds
        self.engines: dict[str, Engine] = {}
        self.activity: Activity | None = None
        self.quiet_since: float | None = None
        self.spinning_since: float | None = None
        self.startup = ""  # the long silent work that was announced last, with its progress
        self.startup_age = 0.0  # how long that line itself says it has taken
        self.busy_at = float("-inf")
        self.edges: dict[tuple[str, str], Hit] = {}
        self.open_pairs: dict[str, Hit] = {}
        self.pair_spans: dict[str, list[float]] = {}
        self.open_timers: dict[str, tuple[float, str]] = {}
        self.sides: dict[str, Hit] = {}
        self.bad_steps: list[Hit] = []
        self.backend: tuple[Hit, str, str] | None = None
        self.gap: GapRule | None = None
        self.gap_out: tuple[Hit, str] | None = None  # the step whose gap is out of range, and in which words
        self._metrics: dict[tuple[str, str], dict[str, float]] = {}
        self.heartbeat_at: float | None = None
        self.oom_kills = 0
        self.oom_known = False  # whether there is a counter of such kills to look at
        self.facts: list[Evidence] = []  # physical evidence: OOM kills, XID errors
        self.ended: Exit | None = None
        self.interrupted: tuple[int, float] | None = None  # a signal that someone sent to the run, and when

    # -- what happened when ---------------------------------------------------------------------------------------

    @property
    def work_at(self) -> float:
        """When real work (a token, request, step or sync) was last seen; minus infinity before the first."""
        return max((at for clock, at in self.clocks.items() if clock in WORK), default=float("-inf"))

    @property
    def worked(self) -> bool:
        """Whether any real work has been seen."""
        return any(clock in WORK for clock in self.clocks)

    @property
    def hard_at(self) -> float:
        """When anything that counts as progress was last seen."""
        return max([self.began, self.phases.since, *self.clocks.values()])

    @property
    def started(self) -> bool:
        """Whether the run got past its start."""
        return self.ready or self.worked

    def quiet_for(self, now: float) -> float:
        """Return for how long (s) the run's processes and GPUs have done nothing."""
        return now - self.quiet_since if self.quiet_since is not None else 0.0

    def active(self, now: float) -> bool:
        """Whether CPU or GPU were at work within the last half minute, waiting kernels not counted."""
        if self.activity is None or now - self.activity.at > 60:
            return False
        return self.quiet_for(now) < 5 * self.budgets.quiet_s and not self.activity.spinning

    # -- events ---------------------------------------------------------------------------------------------------

    def hit(self, hit: Hit) -> None:
        """Take in a line that a rule matched."""
        rule = hit.rule
        if rule.side:
            self.sides[rule.side] = hit
        with contextlib.suppress(ValueError):  # a number that is none: someone else's text
            getattr(self, f"_{rule.kind}")(hit)
        tables: tuple[dict[Any, Any], ...] = (
            self._readings,
            self._repeats,
            self._numbers,
            self._metrics,
            self.edges,
            self.open_timers,
            self.info,
        )
        for table in tables:
            while len(table) > MOST_NAMES:  # names in text that a model wrote must not fill the memory
                table.pop(next(iter(table)))

    def _tick(self, clock: str, at: float) -> None:
        """Move a clock; a line that was read late never turns it back."""
        self.clocks[clock] = max(at, self.clocks.get(clock, at))

    def _cause(self, hit: Hit) -> None:
        if hit.rule.identical > 1:
            key = hit.rule.key if hit.rule.key is not None else tuple(hit.fields)
            reading = (hit.rule.id, "|".join(hit.fields.get(name, "") for name in key))
            hits = self._readings.setdefault(reading, [])
            if hits and hits[-1].at < self.work_at:
                hits.clear()  # work in between: not the same trouble
            hits.append(hit)
            self._repeats[reading] = self._repeats.get(reading, 0) * (len(hits) > 1) + hit.line.repeats
            self._last_reading = hit
            del hits[1 : -self.budgets.retries]
            if self._repeats[reading] < hit.rule.identical:
                return
            hit = hits[0]
            if hit in self.causes:
                return
        if len(self.causes) < KEPT:
            self.causes.append(hit)
        else:
            self.causes[KEPT // 2 :] = [*self.causes[KEPT // 2 + 1 :], hit]

    def last_reading(self, hit: Hit) -> Hit:
        """Return the newest line that says the same as the repeated cause ``hit``."""
        return next((hits[-1] for hits in self._readings.values() if hits and hits[0] is hit), hit)

    def _symptom(self, hit: Hit) -> None:
        self.symptoms.append(hit)
        if hit.rule.id == "health-monitor-kills":
            self.fault_tolerant = True

    def _notice(self, hit: Hit) -> None:
        self.notices[hit.rule.id] = hit

    def _info(self, hit: Hit) -> None:
        times = hit.fields.get("times") or hit.fields.get("times2")
        if times and self._last_reading is not None:
            last = self._last_reading
            self._cause(replace(last, at=hit.at, line=replace(last.line, repeats=int(times))))
        self.info |= hit.fields

    def _phase(self, hit: Hit) -> None:
        if hit.rule.phase == "engine ready":
            self._tick("startup", hit.at)
            if self.ready:
                return
            self.ready = True
            if self.phases.name != "starting":
                return
        if hit.rule.phase != self.phases.name:
            self.phases.enter(hit.rule.phase, hit.at)

    def _timer(self, hit: Hit) -> None:
        name, who = hit.fields["name"], hit.fields.get("who", hit.rule.side)
        phase = self.phases.named(name)
        if hit.fields["edge"] == "end":
            self.open_timers.pop(name, None)
            self._tick("sync" if phase in ("weight update", "first sync") else "request", hit.at)
            return
        self.open_timers[name] = (hit.at, who)
        if phase is not None:
            self.phases.enter(phase, hit.at)

    def _moved(self, hit: Hit) -> bool:
        """Whether a counter in the line stands elsewhere than at its last line: a line printed twice is no progress."""
        stand = "/".join(hit.fields.get(name, "") for name in ("n", "m", "of", "percent", "progress", "edge"))
        key = (hit.rule.id, hit.source, hit.line.speaker + hit.fields.get("critic", ""))
        if stand.strip("/") and self._numbers.get(key) == stand and hit.rule.clock != "token":
            return False
        self._numbers[key] = stand
        return True

    def _progress(self, hit: Hit) -> None:
        if hit.rule.busy:
            self.busy_at = hit.at
            share = hit.fields.get("progress") or hit.fields.get("percent")
            done = f"{share}%" if share else "/".join(hit.fields[n] for n in ("n", "of") if n in hit.fields)
            self.startup = f"{hit.rule.busy} {done}".strip()
            self.startup_age = number(hit.fields.get("age"))
        if self._moved(hit):
            self._tick(hit.rule.clock, hit.at)

    def _metric(self, hit: Hit) -> None:
        if not self._moved(hit):
            return
        self._tick(hit.rule.clock, hit.at)
        if hit.rule.phase:
            self.phases.enter(hit.rule.phase, hit.at, implied=True)
        numbers = parse_metrics(hit.fields["metrics"])
        if hit.rule.clock == "step":
            # One bad step can be skipped by the optimizer; a second in a row is a state.
            self.bad_steps = [*self.bad_steps, hit] if non_finite(numbers) else []
            said = self.gap.feed(hit.line.text) if self.gap is not None else None
            self.gap_out = None if said is None else (hit, said)
        key = (hit.rule.id, hit.line.speaker)
        down = backend_down(self._metrics.get(key, {}), numbers)
        if down is not None:
            self.backend = (hit, *down)
        elif self.backend is not None and self.backend[0].rule is hit.rule:
            self.backend = None
        self._metrics[key] = numbers

    def _pair(self, hit: Hit) -> None:
        if hit.rule.opens:
            self.open_pairs.setdefault(hit.rule.opens, hit)
            return
        opened = self.open_pairs.pop(hit.rule.closes, None)
        if opened is not None:
            spans = self.pair_spans.setdefault(hit.rule.closes, [])
            spans.append(moment(hit) - moment(opened))
            del spans[:-100]

    def _wait(self, hit: Hit) -> None:
        edges = list(hit.rule.waits)
        if "joined" in hit.fields:
            edges += group_edges(hit.fields["joined"], hit.fields["missing"])
        for edge in edges:
            known = self.edges.get(edge)
            if known is None or known.at < self.work_at:  # the first line of a wait says since when
                self.edges[edge] = hit

    def _exit(self, hit: Hit) -> None:
        fields = hit.fields
        who = (
            next((fields[n] for n in ("who", "who2", "who4", "gone") if n in fields), "")
            or hit.line.speaker
            or "a process"
        )
        code = next((fields[n] for n in ("code", "code2", "code3", "code4") if n in fields), None)
        killed = "killed" in fields or "killed2" in fields
        status = -9 if killed else int(code) if code is not None else None if "gone" in fields else 0
        pid = int(fields.get("pid") or fields.get("pid4") or 0)
        self.exit(
            Exit(hit.at, pid, who.strip(), who.strip().lower(), status, words=fields.get("last", ""), by_log=True)
        )

    def _activity(self, hit: Hit) -> None:
        if self.processes:
            return  # seen with our own eyes; a log can say anything
        numbers = tuple(float(part) for part in hit.fields.get("gpu", "").split(",") if part.strip())
        gpu = numbers or (float(hit.fields["sm"]),) if numbers or "sm" in hit.fields else ()
        bandwidth = (float(hit.fields["mem"]),) if "mem" in hit.fields else ()
        cores = 0.0 if gpu and max(gpu) < 5 else 1.0
        self.active_sample(Activity(hit.at, cores, gpu, bandwidth))

    def exit(self, event: Exit) -> None:
        """Take in the end of a process."""
        if len(self.exits) < KEPT:
            self.exits.append(event)
        else:
            self.exits[KEPT // 2 :] = [*self.exits[KEPT // 2 + 1 :], event]

    def engine_started(self, at: float) -> None:
        """Take in that a process of an engine appeared."""
        self.engine_starts.append(at)

    def probe(self, probe: Probe) -> None:
        """Take in the answer to a probe."""
        self.engines.setdefault(probe.url, Engine()).take(probe)
        if probe.ok and probe.level == "generate" and not self.ready:
            self.ready = True
            if self.phases.name == "starting":
                self.phases.enter("engine ready", probe.at)

    def counted(self, at: float, tokens: bool, requests: bool) -> None:
        """Take in that an engine's counters moved."""
        if tokens:
            self._tick("token", at)
        if requests:
            self._tick("request", at)

    def active_sample(self, activity: Activity) -> None:
        """Take in how busy the run is."""
        self.activity = activity
        if not activity.quiet:
            self.quiet_since = None
        elif self.quiet_since is None:
            self.quiet_since = activity.at
        if not activity.spinning:
            self.spinning_since = None
        elif self.spinning_since is None:
            self.spinning_since = activity.at

    def talked(self, at: float) -> None:
        """Take in that the log said something it had not said before."""
        self.talked_at = max(self.talked_at, at)

    def oom(self, at: float, kills: int, source: str) -> None:
        """Take in that the kernel killed processes of the run's cgroup for memory."""
        self.oom_kills += kills
        self.facts.append(Evidence(at, source, f"oom_kill {self.oom_kills}", "out-of-memory-host"))

    def gpu_error(self, at: float, text: str) -> None:
        """Take in an XID or ECC error that the driver reported."""
        self.facts.append(Evidence(at, "nvml", text, "gpu-hardware-error"))
