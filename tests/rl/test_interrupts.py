"""Ctrl-C, a request to end and kill -9 at every stage: one line, nothing left behind, resumable bit for bit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from small_run import arguments, error_line, leftovers, train, weights, workers

import zerogap.engine.engine
import zerogap.rl.loop
import zerogap.rl.rewards
import zerogap.rl.samples
import zerogap.rl.setup
import zerogap.trainer.checkpoint
from zerogap.rl.records import read_records

STEPS = 3


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The command sets the thread count of the process; other tests keep theirs."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Weights and moments of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert train(folder, steps=STEPS) == 0
    return weights(folder, STEPS)


def interrupt_in(
    monkeypatch: pytest.MonkeyPatch, holder: Any, name: str, call: int, number: signal.Signals, after: bool = False
) -> None:
    """Send this process a signal at the call-th call of a function, before or after its work."""
    original: Callable[..., Any] = getattr(holder, name)
    calls = 0

    def interrupted(*positional: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and not after:
            os.kill(os.getpid(), number)
        result = original(*positional, **named)
        if calls == call and after:
            os.kill(os.getpid(), number)
        return result

    monkeypatch.setattr(holder, name, interrupted)


BEGINNING = [
    (zerogap.rl.setup, "load_decoder", 1),
    (zerogap.rl.setup, "prove_row_law", 1),
    (zerogap.rl.rewards.RewardPool, "check", 1),
]
MIDDLE = [
    (zerogap.engine.engine.Engine, "step", 9),  # a rollout
    (zerogap.rl.rewards.Scoring, "poll", 9),  # a reward, during a rollout and after it
    (zerogap.rl.rewards.Scoring, "finish", 2),
    (zerogap.rl.loop, "accumulate", 2),  # training
    (zerogap.rl.loop, "write_samples", 2),
    (zerogap.rl.loop.MetricsWriter, "write", 2),
    (zerogap.rl.loop.Loop, "_send_weights", 2),
    (
        zerogap.trainer.checkpoint,
        "save_decoder",
        2,
    ),  # a checkpoint: weights, moments, flushing, renaming, the oldest goes
    (zerogap.trainer.checkpoint, "save_file", 2),
    (zerogap.trainer.checkpoint, "fsync", 20),
    (zerogap.trainer.checkpoint, "_write_folder", 2),
    (zerogap.trainer.checkpoint, "_set_aside", 1),
]


def name_of(value: object) -> str:
    return getattr(value, "__name__", str(value)).rpartition(".")[2]


@pytest.mark.parametrize(("holder", "name", "call"), BEGINNING, ids=name_of)
def test_before_the_run_began(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    holder: Any,
    name: str,
    call: int,
) -> None:
    interrupt_in(monkeypatch, holder, name, call, signal.SIGINT, after=name == "check")
    assert train(tmp_path / "run") == 2
    assert "interrupted before the run began; nothing was written" in error_line(capsys)
    assert not (tmp_path / "run").exists()
    assert workers() == []


@pytest.mark.parametrize(("holder", "name", "call"), MIDDLE, ids=name_of)
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)], ids=name_of)
def test_in_the_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    whole: list[bytes],
    holder: Any,
    name: str,
    call: int,
    number: signal.Signals,
) -> None:
    folder, often = tmp_path / "run", ("run.checkpoint_every=1", "run.keep_checkpoints=1")
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        interrupt_in(patch, holder, name, call, number, after=name == "_set_aside")
        assert train(folder, *often, steps=STEPS) == 2
    assert "interrupted; what" in error_line(capsys)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert workers() == []
    assert [path for path in leftovers(folder) if "old-step" not in path] == []
    assert train(folder, *often, "--resume", "auto", steps=STEPS) == 0
    assert leftovers(folder) == []
    assert weights(folder, STEPS) == whole
    for file in ("metrics.jsonl", "rewards.jsonl"):
        records = list(read_records(folder / file))
        assert {record["step"] for record in records} == set(range(STEPS))
    assert [record["step"] for record in read_records(folder / "metrics.jsonl")] == list(range(STEPS))


def test_an_ignored_signal_stays_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under nohup or in the background of a script."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        interrupt_in(monkeypatch, zerogap.rl.loop, "accumulate", 1, signal.SIGINT)
        assert train(tmp_path / "run") == 0
    finally:
        signal.signal(signal.SIGINT, before)


def start(folder: Path, *extra: str, steps: int = STEPS) -> subprocess.Popen[bytes]:
    """Start the command in a process of its own."""
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-m", "zerogap", *arguments(folder, *extra, steps=steps)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": str(torch.get_num_threads())},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def wait_for(condition: Callable[[], object], process: subprocess.Popen[bytes], limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not condition() and process.poll() is None:
        assert time.monotonic() < deadline, "the run does not get on"
        time.sleep(0.002)


def end_with(process: subprocess.Popen[bytes], number: signal.Signals) -> str:
    """Send the signal; return what the run wrote on stderr, after all its processes have gone."""
    children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.send_signal(number)
    error = process.communicate(timeout=60)[1].decode()
    psutil.wait_procs(children, timeout=10)
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
    return error


def killed_and_resumed(folder: Path, kills: int, generator: random.Random) -> int:
    """Kill a run that often, each time some while after a new step; let it end; return how many kills struck."""
    struck = 0
    for _ in range(kills):
        process = start(folder, "run.checkpoint_every=2", "--resume", "auto")
        seen = {path: path.stat().st_mtime_ns for path in folder.glob("samples/step-*")}
        wait_for(
            lambda seen=seen: any(seen.get(p) != p.stat().st_mtime_ns for p in folder.glob("samples/step-*")), process
        )
        time.sleep(generator.uniform(0.0, 0.3))
        end_with(process, signal.SIGKILL)
        struck += process.returncode == -signal.SIGKILL
    assert train(folder, "run.checkpoint_every=2", "--resume", "auto", steps=STEPS) == 0
    return struck


def test_kill_and_resume(tmp_path: Path, whole: list[bytes]) -> None:
    assert killed_and_resumed(tmp_path / "run", 2, random.Random(1)) > 0
    assert weights(tmp_path / "run", STEPS) == whole
    assert leftovers(tmp_path / "run") == []


@pytest.mark.slow
def test_many_kills_and_resumes(tmp_path: Path, whole: list[bytes]) -> None:
    generator, struck, rounds = random.Random(7), 0, 0
    while struck < 20:
        rounds += 1
        folder = tmp_path / f"run-{rounds}"
        struck += killed_and_resumed(folder, 4, generator)
        assert weights(folder, STEPS) == whole
        assert leftovers(folder) == []


def test_ctrl_c_while_modules_load(tmp_path: Path) -> None:
    process = start(tmp_path / "run")
    loading = psutil.Process(process.pid)
    wait_for(lambda: any("libtorch_cpu" in part.path for part in loading.memory_maps()), process)
    error = end_with(process, signal.SIGINT)
    assert process.returncode == 2
    assert error == "zerogap: interrupted at its start; nothing was written\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=name_of)
def test_signals_at_random_moments(tmp_path: Path, number: signal.Signals) -> None:
    generator = random.Random(int(number))
    for attempt in range(8):
        folder = tmp_path / f"run-{attempt}"
        process = start(folder, "run.checkpoint_every=1", steps=10_000)
        wait_for(lambda folder=folder: (folder / "config.toml").exists(), process)
        time.sleep(generator.uniform(0.0, 1.5))
        error = end_with(process, number)
        assert process.returncode == 2, error
        assert error == f"zerogap: error: interrupted; what {folder} holds is whole, continue it with --resume auto\n"
        assert [path for path in leftovers(folder) if "old-step" not in path] == []
