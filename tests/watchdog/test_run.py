"""`zerogap run` from end to end: the seed's case, a clean stop, and the judge's own death."""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest

from zerogap.watchdog.stop import py_spy

from .running import Running, environment, program, zerogap_command


def test_the_seeds_case_is_stopped_within_five_seconds_of_the_death(tmp_path):
    with Running(tmp_path, program("seed_run.py", "1.0")) as run:
        run.wait_for("AssertionError")
        died = time.monotonic()
        assert run.wait(30) == 1
        ended = time.monotonic()
        incident = run.incident()
        assert not run.members()
    verdict = incident["verdict"]
    assert (verdict["verdict"], verdict["cause"]) == ("failed-to-start", "attention-backend-refused")
    text = json.dumps(verdict)
    assert "FlashAttention v3" in text
    assert "SM>=80 and SM<=90" in text
    assert verdict["check_command"].startswith("zerogap check")
    stopped = max(at for at in (os.stat(run.run / "stopping.json").st_mtime,))
    exits = [json.loads(line) for line in (run.run / "events.jsonl").read_text().splitlines()]
    death = next(entry["at"] for entry in exits if entry["kind"] == "exit")
    assert stopped - death < 5.0
    assert ended - died < 8.0  # stacks, stop, incident and check included
    assert incident["check"]["verdict"] in ("yes", "no", "unknown")
    assert any(item["name"] == "miles/qwen3-dense-v1" for item in incident["check"]["contracts"])
    page = (run.run / "incident.md").read_text()
    assert "compute capability 8.0 to 9.0" in page
    assert page.startswith("# failed-to-start: attention-backend-refused")
    assert "zerogap check" in page


@pytest.mark.slow
def test_the_parent_that_only_sleeps_is_stopped_too(tmp_path):
    """No retry line at all: the fatal line, the exit and a quiet machine are enough while a run starts."""
    script = (
        "import subprocess,sys,time; subprocess.Popen([sys.executable,'-c',"
        "'raise SystemExit(print(\"AssertionError: FlashAttention v3 Backend requires SM>=80 and SM<=90.\") or 1)']);"
        "time.sleep(3600)"
    )
    begun = time.monotonic()
    with Running(tmp_path, [sys.executable, "-c", script]) as run:
        assert run.wait(30) == 1
        assert run.incident()["verdict"]["cause"] == "attention-backend-refused"
    assert time.monotonic() - begun < 15


def test_an_exception_in_a_background_task_ends_the_run(tmp_path):
    """The task nobody awaits: the loop goes on for ever, the reason is printed once."""
    script = (
        "import asyncio\n"
        "class EngineDead(Exception): pass\n"
        "async def worker(): raise EngineDead('EngineCore encountered an issue')\n"
        "async def main():\n    asyncio.create_task(worker())\n    await asyncio.sleep(3600)\n"
        "asyncio.run(main())\n"
    )
    with Running(tmp_path, [sys.executable, "-c", script]) as run:
        run.wait_for("EngineCore encountered an issue")
        begun = time.monotonic()
        assert run.wait(30) == 1
        assert time.monotonic() - begun < 10
        assert "EngineCore encountered an issue" in run.incident()["verdict"]["summary"]


FAMILY = r"""
import os, subprocess, sys, time, signal
deaf = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"
subprocess.Popen([sys.executable, "-c", deaf])                                  # ignores SIGTERM
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)   # setsid
if os.fork() == 0:                                                              # double fork, own session
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 3)
        time.sleep(3600)
    os._exit(0)
stopped = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
os.kill(stopped.pid, signal.SIGSTOP)
print("AssertionError: FlashAttention v3 Backend requires SM>=80 and SM<=90.", flush=True)
if os.fork() == 0:
    os._exit(1)
time.sleep(3600)
"""


def test_nothing_is_left_and_nothing_else_is_touched(tmp_path):
    path = tmp_path / "family.py"
    path.write_text(FAMILY)
    deaf = [sys.executable, "-c", "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"]
    with subprocess.Popen(deaf) as bystander:
        try:
            with Running(tmp_path, [sys.executable, str(path)], "--grace", "1.5", "--patience", "0.3") as run:
                run.wait_for("AssertionError")
                time.sleep(1)
                assert len(run.members()) >= 5
                assert run.wait(40) == 1
                incident = run.incident()
                assert not run.members()
            assert incident["action"]["left"] == []
            assert len(incident["action"]["killed"]) >= 1
            assert bystander.poll() is None
        finally:
            bystander.kill()


def test_sigkill_of_the_judge_leaves_the_run_and_watch_takes_over(tmp_path):
    with Running(tmp_path, program("seed_run.py", "4"), "--patience", "0.3") as run:
        run.wait_for("legacy rl_on_policy_target")
        deadline = time.monotonic() + 10
        while not (run.run / "judge.json").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        judge = json.loads((run.run / "judge.json").read_text())["pid"]
        second = subprocess.run(
            zerogap_command("watch", "--dir", run.run), capture_output=True, text=True, env=environment(), timeout=30
        )
        assert second.returncode == 2
        assert "already watches" in second.stderr
        os.kill(judge, signal.SIGKILL)
        run.wait_for("the judge ended")
        assert run.process.poll() is None
        assert run.members()
        done = subprocess.run(
            zerogap_command("watch", "--dir", run.run, "--json"),
            capture_output=True,
            text=True,
            env=environment(),
            timeout=60,
        )
        assert done.returncode == 1, done.stderr
        assert json.loads(done.stdout)["cause"] == "attention-backend-refused"
        assert run.wait(20) == 1
        assert not run.members()


def test_sigkill_of_the_judge_lets_a_healthy_run_end_well(tmp_path):
    with Running(tmp_path, ["sh", "-c", "for i in 1 2 3 4; do echo tick $i; sleep 0.4; done; exit 3"]) as run:
        deadline = time.monotonic() + 10
        while not (run.run / "judge.json").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(json.loads((run.run / "judge.json").read_text())["pid"], signal.SIGKILL)
        assert run.wait(20) == 3
        assert run.out.read_text() == "tick 1\ntick 2\ntick 3\ntick 4\n"


def test_sigkill_of_the_pump_ends_the_run_with_an_incident(tmp_path):
    with Running(tmp_path, [sys.executable, "-c", "import time; time.sleep(3600)"]) as run:
        deadline = time.monotonic() + 10
        while not (run.run / "judge.json").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        run.process.kill()
        deadline = time.monotonic() + 20
        while not (run.run / "incident.md").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert run.incident()["verdict"]["cause"] == "pump-killed"
        assert not run.members()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_us_ends_the_run_in_order(tmp_path, number):
    with Running(tmp_path, ["sh", "-c", "sleep 3600 & echo up; wait"]) as run:
        run.wait_for("up")
        run.process.send_signal(number)
        assert run.wait(20) == 128 + number
        assert not run.members()
        assert not (run.run / "incident.json").exists()


def test_a_crash_is_reported_with_its_first_cause_and_the_commands_code(tmp_path):
    script = (
        "import sys; print('torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.');"
        "print('httpx.ConnectError: All connection attempts failed'); sys.exit(3)"
    )
    with Running(tmp_path, [sys.executable, "-c", script]) as run:
        assert run.wait(20) == 3
        verdict = run.incident()["verdict"]
    assert (verdict["verdict"], verdict["cause"]) == ("failed-to-start", "out-of-memory-gpu")


def test_exec_starts_the_given_command_without_a_shell_and_leaves_the_run_alone(tmp_path):
    target = tmp_path / "note"
    script = "import os,sys; open(sys.argv[1],'w').write(os.environ['ZEROGAP_INCIDENT'])"
    command = shlex.join([sys.executable, "-c", script, str(target)])
    options = ["--on-failure", "exec", "--exec", command, "--patience", "0.3"]
    with Running(tmp_path, program("seed_run.py", "0.5"), *options) as run:
        run.wait_for("the run goes on. Incident", 20)
        deadline = time.monotonic() + 10
        while not (target.exists() and target.read_text()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert target.read_text() == str(run.run / "incident.json")
        assert run.process.poll() is None
        assert run.members()


@pytest.mark.slow
def test_warn_leaves_the_run_alone(tmp_path):
    with Running(tmp_path, program("seed_run.py", "0.5"), "--on-failure", "warn") as run:
        run.wait_for("the run goes on. Incident", 20)
        assert run.process.poll() is None
        assert run.members()
        assert run.incident()["action"]["asked"] == "warn"


def test_secrets_are_redacted_and_hostile_text_is_inert(tmp_path):
    script = (
        "import sys; print('\\x1b]0;owned\\x07ValueError: token hf_abcdefghijklmnopqrstuvwx api_key=verysecretvalue "
        "\\x1b[31m<script>alert(1)</script> ``` # heading'); sys.exit(1)"
    )
    with Running(tmp_path, [sys.executable, "-c", script, "--api-key", "topsecret123"]) as run:
        assert run.wait(20) == 1
        files = [(run.run / name).read_text() for name in ("incident.md", "incident.json", "events.jsonl")]
    for text in files:
        for secret in ("hf_abcdefgh", "verysecretvalue", "topsecret123", "\x1b"):
            assert secret not in text
    assert not any(line.startswith("# heading") for line in files[0].splitlines())
    assert (run.run / "run.json").stat().st_mode & 0o077 == 0


def test_watch_attaches_to_a_pid_and_stops_its_tree(tmp_path):
    with subprocess.Popen(
        program("seed_run.py", "3"), stdout=(tmp_path / "log").open("wb"), stderr=subprocess.STDOUT
    ) as run:
        try:
            done = subprocess.run(
                zerogap_command(
                    "watch", "--pid", run.pid, "--log", tmp_path / "log", "--dir", tmp_path / "w", "--json"
                ),
                capture_output=True, text=True, env=environment(), timeout=60,
            )  # fmt: skip
            assert done.returncode == 1, done.stderr
            assert json.loads(done.stdout)["cause"] == "attention-backend-refused"
            assert run.wait(5) != 0
        finally:
            if run.poll() is None:
                run.kill()


def test_watch_of_a_healthy_process_ends_with_it(tmp_path):
    with subprocess.Popen(["sleep", "2"]) as run:
        done = subprocess.run(
            zerogap_command("watch", "--pid", run.pid, "--dir", tmp_path / "w"),
            capture_output=True, text=True, env=environment(), timeout=60,
        )  # fmt: skip
        run.wait()
    assert done.returncode in (0, 3), done.stderr


def test_no_torch_and_little_memory(tmp_path):
    waits = "import os, time\nwhile not os.path.exists('judged'): time.sleep(0.1)"
    with Running(tmp_path, [sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r})\n{waits}"]) as run:
        end = time.monotonic() + 30
        while not (run.run / "judge.json").exists() and time.monotonic() < end:
            time.sleep(0.1)
        time.sleep(1)
        judge = psutil.Process(json.loads((run.run / "judge.json").read_text())["pid"])
        assert judge.memory_info().rss < 150 << 20
        assert "libtorch" not in Path(f"/proc/{judge.pid}/maps").read_text()
        pump = psutil.Process(run.process.pid)
        assert pump.memory_info().rss < 30 << 20
        (tmp_path / "judged").touch()
        assert run.wait(20) == 0


def test_a_cause_within_a_flood_is_found_when_it_matters(tmp_path):
    """The judge passes most of a flood over while all is well; the cause stands in what it passed over."""
    script = (
        "import os,sys,time\n"
        "noise = b''.join(b'%06d some model text that says nothing at all\\n' % n for n in range(40000))\n"
        "for turn in range(12):\n"
        "    os.write(1, noise)\n"
        "    if turn == 4: os.write(1, b'torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\\n')\n"
        "    os.write(1, noise); time.sleep(0.15)\n"
        "os.write(1, b'httpx.ConnectError: All connection attempts failed\\n'); sys.exit(1)\n"
    )
    with Running(tmp_path, [sys.executable, "-c", script]) as run:
        assert run.wait(40) == 1
        incident = run.incident()
    assert incident["verdict"]["cause"] == "out-of-memory-gpu"
    assert incident["log"]["unread_bytes"] == 0


def test_a_schedulers_sigterm_is_a_preemption_and_no_failure(tmp_path):
    with Running(tmp_path, ["sh", "-c", "echo up; exec sleep 3600"], env=environment(SLURM_JOB_ID="42")) as run:
        run.wait_for("up")
        time.sleep(1.0)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait(20) == 143
        assert run.incident()["verdict"]["verdict"] == "preempted"
        assert run.incident()["verdict"]["cause"] == "preempted-slurm"


def test_a_users_folder_cannot_shadow_the_watchdogs_modules(tmp_path):
    for name in ("queue", "signal", "json", "zerogap"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')\n")
    code = "from zerogap.cli import main; main()"
    line = [sys.executable, "-P", "-c", code, "run", "--", "echo", "fine"]
    done = subprocess.run(line, capture_output=True, text=True, env=environment(), cwd=tmp_path, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


def test_a_notification_is_sent(tmp_path):
    pytest.importorskip("apprise")
    received = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            received.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"json://127.0.0.1:{server.server_port}"
    with Running(tmp_path, ["sh", "-c", "echo 'ValueError: broken'; exit 1"], "--notify", url) as run:
        assert run.wait(30) == 1
    server.shutdown()
    assert received
    assert b"failed-to-start (python-exception)" in received[0]


@pytest.mark.parametrize("url", ["nonsense", "jsom://127.0.0.1"])
def test_an_address_that_cannot_be_notified_is_refused_beforehand(tmp_path, url):
    done = subprocess.run(
        zerogap_command("run", "--notify", url, "--", "true"),
        capture_output=True, text=True, env=environment(), cwd=tmp_path, timeout=30,
    )  # fmt: skip
    assert done.returncode == 2
    assert "--notify" in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_stack_of_a_stuck_process_is_in_the_incident(tmp_path):
    script = (
        "import time\n"
        "print('AssertionError: FlashAttention v3 Backend requires SM>=80 and SM<=90.', flush=True)\n"
        "def waits_for_ever():\n    time.sleep(3600)\n"
        "waits_for_ever()\n"
    )
    path = tmp_path / "stuck.py"
    path.write_text(script)
    with Running(tmp_path, [sys.executable, str(path)], "--patience", "0.3") as run:
        assert run.wait(40) == 1
        stacks = run.incident()["stacks"]
    (text,) = [text for name, text in stacks.items() if "stuck.py" in name]
    assert ("waits_for_ever" in text) if py_spy() else ("py-spy is not installed" in text)
