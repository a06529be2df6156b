"""Real engine faults: fault x phase, each detected in its stated time."""

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from .running import PROGRAMS, Running, free_port, program

# Seconds from the fault to the end of the run, with one-second probes: three failed probes and a stop.
STATED_S = {
    "sigkill": 12.0,
    "exit0": 12.0,
    "sigstop": 25.0,
    "503": 15.0,
    "dead-generate": 20.0,
    "reset": 15.0,
    "takeover": 15.0,
}
VERDICTS = {
    "sigkill": {"died"},
    "exit0": {"died"},
    "sigstop": {"unresponsive"},
    "503": {"unresponsive"},
    "dead-generate": {"unresponsive"},
    "reset": {"unresponsive"},
    "takeover": {"unresponsive", "died"},
}
PHASES = ("rollout", "train", "update_weights")
SHORT = {
    ("sigkill", "rollout", "sglang"),
    ("sigstop", "rollout", "vllm"),
    ("dead-generate", "rollout", "vllm"),
    ("sigkill", "train", "vllm"),
}


def break_engine(fault, pid, port):
    if fault == "sigkill":
        os.kill(pid, signal.SIGKILL)
    elif fault == "sigstop":
        os.kill(pid, signal.SIGSTOP)
    elif fault == "exit0":
        os.kill(pid, signal.SIGTERM)
    elif fault == "takeover":
        os.kill(pid, signal.SIGKILL)
        return take_port(port)
    else:
        httpx.post(f"http://127.0.0.1:{port}/fault", json={"mode": fault}, timeout=5, trust_env=False)
    return None


def take_port(port):
    """Another program's web server takes the port over."""
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(PROGRAMS)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return server
        time.sleep(0.05)
    raise AssertionError("the other server did not come up")


def run_fault(folder, fault, phase, kind):
    port = free_port()
    options = ["--engine", f"127.0.0.1:{port}", "--probe-timeout", "1", "--patience", "0.2", "--grace", "2"]
    other = None
    with Running(folder, program("driver.py", kind, port, "--hold", phase), *options) as run:
        pid = int(run.wait_for(r"ENGINE pid=(\d+)")[1])
        run.wait_for(f"HOLDING {phase}", 30)
        time.sleep(2.5)  # the probes have seen it work
        begun = time.monotonic()
        try:
            other = break_engine(fault, pid, port)
            try:
                code = run.wait(90)
            except subprocess.TimeoutExpired:
                return None, 90.0, {"verdict": "none", "cause": "not detected"}
            took = time.monotonic() - begun
            verdict = run.incident()["verdict"]
            assert other is None or other.poll() is None, "the other program's server was touched"
            assert not run.members()
        finally:
            if other is not None:
                other.kill()
                other.wait()
    return code, took, verdict


def check_faults(tmp_path, combinations):
    combinations = sorted(combinations)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda c: (c, run_fault(tmp_path / "-".join(c), *c)), combinations))
    wrong = []
    for (fault, phase, kind), (code, took, verdict) in results:
        print(f"{fault:14} {phase:15} {kind:7} {took:5.1f} s  {verdict['verdict']}: {verdict['cause']}")
        limit = STATED_S[fault] + (15.0 if phase == "update_weights" and fault not in ("sigkill", "takeover") else 0.0)
        if fault == "sigstop" and verdict["cause"] != "engine-stopped":
            wrong.append((fault, phase, verdict["cause"]))
        if code != 1 or verdict["verdict"] not in VERDICTS[fault] or took > limit:
            wrong.append((fault, phase, kind, code, round(took, 1), limit, verdict["verdict"], verdict["cause"]))
    assert not wrong, wrong


def test_faults_short(tmp_path):
    check_faults(tmp_path, SHORT)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_faults_all(tmp_path):
    check_faults(
        tmp_path, {(f, p, k) for f in STATED_S for p, k in zip(PHASES, ("sglang", "vllm", "sglang"), strict=True)}
    )


@pytest.mark.slow
def test_a_port_that_another_server_took_over_is_named(tmp_path):
    """The engine is not among the run's processes, so only the probes can tell."""
    port = free_port()
    command = [sys.executable, str(PROGRAMS / "engine.py"), "sglang", str(port)]
    engine, other = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL), None
    options = ["--engine", f"127.0.0.1:{port}", "--probe-timeout", "1", "--patience", "0.2"]
    try:
        with Running(
            tmp_path, program("driver.py", "sglang", port, "--external", "--hold", "rollout"), *options
        ) as run:
            run.wait_for("HOLDING rollout", 30)
            time.sleep(2.5)
            engine.kill()
            engine.wait()
            other = take_port(port)
            assert run.wait(40) == 1
            assert run.incident()["verdict"]["cause"] == "port-taken-over"
        assert other.poll() is None
    finally:
        for process in (engine, other):
            if process is not None:
                process.kill()
                process.wait()


def test_slow_start_is_no_fault(tmp_path):
    port = free_port()
    command = program("driver.py", "sglang", port, "--start-delay", "3", "--steps", "2")
    with Running(tmp_path, command, "--engine", f"127.0.0.1:{port}", "--probe-timeout", "1") as run:
        assert run.wait(40) == 0
        assert not (run.run / "incident.json").exists()


@pytest.mark.slow
def test_an_engine_that_never_comes_up_uses_up_the_start_budget(tmp_path):
    port = free_port()
    command = program("driver.py", "sglang", port, "--start-delay", "600")
    begun = time.monotonic()
    with Running(tmp_path, command, "--engine", f"127.0.0.1:{port}", "--patience", "0.004", "--grace", "2") as run:
        assert run.wait(60) == 1
        verdict = run.incident()["verdict"]
    assert verdict["verdict"] == "failed-to-start"
    assert time.monotonic() - begun < 30
