"""A real Ray job on a real one-node cluster: the engine under an actor dies, only that job is stopped."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from .running import PROGRAMS, environment, free_port, zerogap_command

pytest.importorskip("ray")
pytestmark = pytest.mark.slow
RAY = str(Path(sys.executable).parent / "ray")


def ray_environment(address=""):
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_DOCKER_CPU_WARNING": "1", "NO_COLOR": "1"}
    engine = {"ZEROGAP_TEST_ENGINE": str(PROGRAMS / "engine.py")}
    return environment(**quiet, **engine, **({"RAY_API_SERVER_ADDRESS": address} if address else {}))


@pytest.fixture
def cluster():
    """A cluster of our own; at the end its processes are ended by pid, found by their own folder."""
    folder = tempfile.mkdtemp(prefix="zg", dir="/tmp")  # Ray's sockets need a short path
    port, dashboard = free_port(), free_port()
    command = [RAY, "start", "--head", "--num-cpus=2", f"--port={port}", f"--dashboard-port={dashboard}"]
    command += [
        "--include-dashboard=true",
        "--dashboard-host=127.0.0.1",
        f"--temp-dir={folder}",
        "--disable-usage-stats",
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=120, env=ray_environment())
    try:
        yield f"http://127.0.0.1:{dashboard}"
    finally:
        mine = [process for process in psutil.process_iter() if folder in " ".join(_command(process))]
        mine += [child for process in mine for child in _children(process)]
        for process in mine:
            try:
                process.kill()
            except psutil.Error:
                continue
        shutil.rmtree(folder, ignore_errors=True)


def _command(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _children(process):
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def submit(address, port, name):
    command = [RAY, "job", "submit", "--no-wait", "--submission-id", name, "--", sys.executable]
    command += [str(PROGRAMS / "ray_job.py"), str(port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, env=ray_environment(address))
    assert done.returncode == 0, done.stdout + done.stderr


def logs(address, name):
    command = [RAY, "job", "logs", name]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=ray_environment(address)).stdout


def status(address, name):
    command = [RAY, "job", "status", name]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=ray_environment(address)).stdout


@pytest.mark.timeout(300)
def test_a_dead_engine_under_an_actor_stops_its_job_and_no_other(cluster, tmp_path):
    port = free_port()
    submit(cluster, 0, "bystander")
    submit(cluster, port, "training")
    deadline = time.monotonic() + 90
    while "first answer" not in (text := logs(cluster, "training")) and time.monotonic() < deadline:
        time.sleep(1)
    pid = int(re.findall(r"ENGINE pid=(\d+)", text)[-1])
    command = zerogap_command("watch", "--ray-job", "training", "--ray-address", cluster, "--dir", tmp_path / "w")
    command += ["--engine", f"127.0.0.1:{port}", "--probe-timeout", "1", "--json"]
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        watch = subprocess.Popen(command, stdout=out, stderr=err, env=ray_environment())
        time.sleep(8)
        assert watch.poll() is None, (tmp_path / "err").read_text()
        os.kill(pid, signal.SIGKILL)
        begun = time.monotonic()
        assert watch.wait(60) == 1
        took = time.monotonic() - begun
    verdict = json.loads((tmp_path / "out").read_text())
    print(f"stopped {took:.1f} s after the death: {verdict['verdict']} ({verdict['cause']}): {verdict['summary']}")
    assert verdict["verdict"] == "died"
    assert verdict["cause"] == "killed-from-outside"
    text = json.dumps(verdict)
    assert "SIGKILL" in text
    assert "its parent lives on: ray::RolloutManager" in text
    assert "STOPPED" in status(cluster, "training") or "stopped" in status(cluster, "training")
    assert "RUNNING" in status(cluster, "bystander")
    incident = json.loads((tmp_path / "w" / "incident.json").read_text())
    assert incident["action"]["left"] == []
    assert not psutil.pid_exists(pid)
