"""Rewards, called in worker processes: one that raises, hangs, dies or returns no finite number is a counted event.

A reward function is ``reward(prompt, completion, answer, **fields) -> float``. ``prompt`` is the text or the list of
chat messages, ``completion`` the generated text, ``answer`` the task's answer, and ``fields`` what else the task's data
has; a function without ``**fields`` receives only those that it names.

The workers are plain child processes that speak JSON lines over a socket, and not a process pool of a library, for
three reasons: their environment is free of secrets from the start (a cleaned ``os.environ`` leaves them readable in
/proc), each is killed with everything that the reward started, and one round trip is cheap enough (tens of
microseconds) to give every reward its own, so that a hang costs one reward only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from zerogap.errors import UsageError

Kind = Literal["ok", "raised", "timed_out", "not_finite", "died"]
EVENT_KINDS: tuple[Kind, ...] = ("raised", "timed_out", "not_finite", "died")

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
_START_LIMIT_S = 120.0


@dataclass(frozen=True)
class RewardJob:
    """One completion to judge.

    Attributes:
        phase: ``train`` or ``eval``.
        step, prompt_index, sample: which completion it is.
        prompt: text, or chat messages.
        completion: the generated text.
        answer: what the task says is right; any JSON value.
        fields: further JSON values of the task.
    """

    phase: Literal["train", "eval"]
    step: int
    prompt_index: int
    sample: int
    prompt: str | Sequence[Mapping[str, str]]
    completion: str
    answer: Any
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int, int, int]:
        """Which completion of the run this is."""
        return self.phase, self.step, self.prompt_index, self.sample

    def arguments(self) -> str:
        """Return the arguments of the call as one line of JSON."""
        prompt = self.prompt if isinstance(self.prompt, str) else [dict(message) for message in self.prompt]
        return json.dumps(
            {"prompt": prompt, "completion": self.completion, "answer": self.answer, "fields": dict(self.fields)}
        )

    def digest(self) -> str:
        """Return a hex digest of the arguments: equal digest, same question and completion."""
        return hashlib.blake2b(self.arguments().encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class RewardOutcome:
    """What a call gave.

    Attributes:
        kind: ``ok``, or what went wrong.
        value: the reward; ``reward.on_error`` unless ``kind`` is ``ok``.
        seconds: duration of the call.
        detail: one line on what went wrong.
        replayed: True if it was read from the journal and the function was not called.
    """

    kind: Kind
    value: float
    seconds: float
    detail: str = ""
    replayed: bool = False


def event_counts(outcomes: Sequence[RewardOutcome]) -> dict[str, int]:
    """Return the metrics ``reward/raised``, ``reward/timed_out``, ``reward/not_finite`` and ``reward/died``."""
    return {f"reward/{kind}": sum(outcome.kind == kind for outcome in outcomes) for kind in EVENT_KINDS}


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without variables that look like secrets, by their name or their value."""
    return {
        name: value
        for name, value in environment.items()
        if name in _HARMLESS or not (_SECRET_NAME.search(name) or _SECRET_VALUE.search(value))
    }


class _Worker:
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

    def send(self, record: Mapping[str, Any] | str, limit_s: float = _START_LIMIT_S) -> None:
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


class RewardPool:
    """Calls a reward function in worker processes; a context manager, so that none is left behind."""

    def __init__(self, function: str, workers: int, time_limit_s: float, on_error: float) -> None:
        """Start nothing yet.

        Args:
            function: ``module:function``.
            workers: number of processes.
            time_limit_s: limit of one call, seconds.
            on_error: reward of a call that gives none.
        """
        self._function, self._limit, self._on_error = function, time_limit_s, on_error
        self._workers: list[_Worker | None] = [None] * workers
        self._log: Path | None = None

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End every worker and everything that the rewards started."""
        for index in range(len(self._workers)):
            self._drop(index)

    def log_to(self, path: Path) -> None:
        """Append what the reward function prints from now on to a file; before that it goes nowhere."""
        self._log = path
        for worker in self._workers:
            if worker is not None and worker.ready:
                worker.send({"log": _text(path)})

    def check(self) -> None:
        """Start one worker and wait until it has the function.

        Raises:
            UsageError: it cannot be imported or called.
        """
        while not any(worker is not None and worker.ready for worker in self._workers):
            self._advance([], deque(), {}, 1)

    def score(self, jobs: Sequence[RewardJob]) -> list[RewardOutcome]:
        """Return the outcomes of ``jobs``, in their order; each function call is made once.

        Raises:
            UsageError: a worker cannot import the function.
        """
        lines = [job.arguments() for job in jobs]
        waiting = deque(range(len(lines)))
        outcomes: dict[int, RewardOutcome] = {}
        try:
            while len(outcomes) < len(lines):
                self._advance(lines, waiting, outcomes, len(lines) - len(outcomes))
        except BaseException:
            for index in range(len(self._workers)):  # an answer to this call must not become one to the next
                self._drop(index)
            raise
        return [outcomes[index] for index in range(len(lines))]

    def _advance(
        self, lines: Sequence[str], waiting: deque[int], outcomes: dict[int, RewardOutcome], wanted: int
    ) -> None:
        """Hand out calls, wait until something happens, and take what came."""
        self._give(lines, waiting, wanted)
        for index, worker in self._wait():
            answer, closed = worker.receive()
            if answer is not None and not worker.ready:
                if "error" in answer:
                    raise UsageError(answer["error"])
                worker.ready = True
            elif answer is not None and worker.job is not None:
                outcomes[worker.job] = self._outcome(answer)
                worker.job = None
            elif closed or worker.seconds > (self._limit if worker.ready else _START_LIMIT_S):
                self._lost(worker, closed, outcomes)
                self._drop(index)

    def _give(self, lines: Sequence[str], waiting: deque[int], wanted: int) -> None:
        """Start missing workers, as many as there is work for, and give each idle one a call."""
        for index, worker in enumerate(self._workers[:wanted]):
            if worker is None or (worker.job is None and worker.process.poll() is not None):
                self._drop(index)
                self._workers[index] = _Worker(self._function, self._log)
        for worker in self._workers:
            if worker is not None and worker.ready and worker.job is None and waiting:
                worker.job = waiting.popleft()
                worker.send(lines[worker.job], self._limit)

    def _wait(self) -> list[tuple[int, _Worker]]:
        """Wait until a worker says something or its time is up; return the workers that are at something."""
        at_work = [(i, w) for i, w in enumerate(self._workers) if w is not None and (w.job is not None or not w.ready)]
        left = [(self._limit if worker.ready else _START_LIMIT_S) - worker.seconds for _, worker in at_work]
        with selectors.DefaultSelector() as selector:
            for index, worker in at_work:
                selector.register(worker.channel, selectors.EVENT_READ, index)
            # A grandchild may hold the socket open after its worker's death, so the processes are looked at too.
            selector.select(timeout=max(0.0, min([0.2, *left])) + 0.001)
        return at_work

    def _outcome(self, answer: Mapping[str, Any]) -> RewardOutcome:
        value = self._on_error if answer["value"] is None else float(answer["value"])
        return RewardOutcome(answer["kind"], value, float(answer["seconds"]), str(answer["detail"]))

    def _lost(self, worker: _Worker, closed: bool, outcomes: dict[int, RewardOutcome]) -> None:
        """Record what a worker that hung or died was doing."""
        if not worker.ready:
            problem = "ended" if closed else f"took over {_START_LIMIT_S:g} s"
            raise UsageError(f"task.reward = '{self._function}': the worker process {problem} while importing it")
        if worker.job is None:
            return
        if closed:
            try:
                code: int | None = worker.process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                code = None
            outcome = RewardOutcome(
                "died", self._on_error, worker.seconds, f"the worker process ended with code {code}"
            )
        else:
            outcome = RewardOutcome("timed_out", self._on_error, worker.seconds, f"over {self._limit:g} s")
        outcomes[worker.job] = outcome

    def _drop(self, index: int) -> None:
        worker = self._workers[index]
        if worker is not None:
            worker.end()
            self._workers[index] = None
