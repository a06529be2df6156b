"""The pump passes bytes, signals, terminal and exit code through unchanged."""

import fcntl
import hashlib
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest

from .running import Running, environment, zerogap_command

NOISE = r"""
import os, sys
block = bytes(range(256)) * 256
for number in range(40):
    os.write(1, block + b"\xff\xfe no newline \x1b[31m red \r\n" * 50)
    os.write(2, b"err %d \x80\n" % number)
"""


def start(tmp_path, command, *options, **more):
    line = zerogap_command("run", "--dir", tmp_path / "run", *options, "--", *command)
    return subprocess.run(line, capture_output=True, env=environment(), timeout=60, check=False, **more)


def test_each_stream_is_byte_identical(tmp_path):
    command = [sys.executable, "-c", NOISE]
    plain = subprocess.run(command, capture_output=True, check=True)
    pumped = start(tmp_path, command)
    assert pumped.returncode == 0
    assert pumped.stdout == plain.stdout
    assert pumped.stderr == plain.stderr
    assert (tmp_path / "run" / "stdout.log").read_bytes() == plain.stdout
    assert (tmp_path / "run" / "stderr.log").read_bytes() == plain.stderr


def test_a_line_of_fifty_megabytes_and_invalid_utf8_pass(tmp_path):
    script = (
        "import sys; w=sys.stdout.buffer; [w.write(b'\\xc3x\\xff'*(1<<20)) for _ in range(17)]; w.write(b'\\nend\\n')"
    )
    done = start(tmp_path, [sys.executable, "-c", script])
    assert done.returncode == 0
    assert len(done.stdout) == 17 * 3 * (1 << 20) + 5
    assert hashlib.sha256(done.stdout[:-5]).digest() == hashlib.sha256(b"\xc3x\xff" * (17 << 20)).digest()


def test_stdin_reaches_the_command(tmp_path):
    done = start(tmp_path, ["cat"], input=b"\x00\x01 hello \xff")
    assert done.stdout == b"\x00\x01 hello \xff"


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill -15 $$", 143)])
def test_the_exit_code_is_the_commands_own(tmp_path, script, code):
    assert start(tmp_path, ["sh", "-c", script]).returncode == code


def test_the_environment_and_folder_are_the_users(tmp_path):
    done = start(tmp_path, ["sh", "-c", "pwd; echo $MARK"], cwd=tmp_path)
    assert done.stdout.decode().split() == [str(tmp_path)]


SIGNALS = r"""
import signal, sys, time
def show(number, frame):
    print("got", signal.Signals(number).name, flush=True)
    if number == signal.SIGTERM:
        sys.exit(5)
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, show)
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""


def test_signals_are_forwarded_once_and_the_run_ends_in_order(tmp_path):
    with Running(tmp_path, [sys.executable, "-c", SIGNALS]) as run:
        run.wait_for("ready")
        for name in ("SIGUSR1", "SIGUSR2", "SIGINT", "SIGHUP"):
            run.process.send_signal(signal.Signals[name])
            run.wait_for(f"got {name}")
        run.process.send_signal(signal.SIGTERM)
        assert run.wait(20) == 5
        time.sleep(0.2)
        assert run.text().count("got ") == 5
        assert not run.members()


def in_terminal(tmp_path, command, send=(), size=(31, 97), resize=None):
    """Run `zerogap run` in a terminal of its own and return (exit code, what the terminal showed)."""
    pid, master = pty.fork()
    line = zerogap_command("run", "--dir", tmp_path / "run", "--", *command)
    if pid == 0:
        os.execvpe(line[0], line, environment(TERM="xterm"))
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    shown, send, resized = b"", list(send), False
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            data = os.read(master, 65536)
        except OSError:
            break
        if not data:
            break
        shown += data
        if send and send[0][0] in shown:
            os.write(master, send.pop(0)[1])
        if resize and not resized and b"ready" in shown:
            resized = True
            fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", *resize, 0, 0))
            os.kill(pid, signal.SIGWINCH)
    _, status = os.waitpid(pid, 0)
    os.close(master)
    return os.waitstatus_to_exitcode(status), shown


def test_a_terminal_stays_a_terminal_of_the_same_size(tmp_path):
    script = (
        "import os,sys,time; print('ready', sys.stdin.isatty(), sys.stdout.isatty(), sys.stderr.isatty(), flush=True);"
        "time.sleep(1); print('size', tuple(os.get_terminal_size()), flush=True)"
    )
    code, shown = in_terminal(tmp_path, [sys.executable, "-c", script], resize=(40, 120))
    assert code == 0
    assert b"ready True True True" in shown
    assert b"size (120, 40)" in shown


def test_keys_and_ctrl_c_reach_the_command_in_a_terminal(tmp_path):
    script = (
        "import sys\nprint('ready', flush=True)\nprint('read', sys.stdin.readline().strip(), flush=True)\n"
        "try:\n    sys.stdin.readline()\n"
        "except KeyboardInterrupt:\n    print('interrupted', flush=True)\n    sys.exit(9)"
    )
    code, shown = in_terminal(
        tmp_path, [sys.executable, "-c", script], send=[(b"ready", b"hello\n"), (b"read hello", b"\x03")]
    )
    assert b"read hello" in shown
    assert b"interrupted" in shown
    assert code == 9
    assert not (tmp_path / "run" / "incident.json").exists()


def test_a_reader_that_goes_away_ends_the_command_as_without_us(tmp_path):
    line = zerogap_command("run", "--dir", tmp_path / "run", "--", "yes")
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment()) as process:
        assert process.stdout is not None
        process.stdout.read(1000)
        process.stdout.close()
        assert process.wait(20) == 128 + signal.SIGPIPE


def test_leftover_background_children_do_not_hold_the_pump(tmp_path):
    begun = time.monotonic()
    done = start(tmp_path, ["sh", "-c", "sleep 30 & echo done"])
    assert done.returncode == 0
    assert time.monotonic() - begun < 15
    assert b"left 1 process(es) alive" in done.stderr
    pid = int(done.stderr.split(b"alive: pid ")[1].split()[0])
    os.kill(pid, signal.SIGKILL)


def test_a_log_is_renamed_at_its_limit_and_the_stream_goes_on(tmp_path):
    from zerogap.watchdog.pump import LogFile

    log = LogFile(tmp_path / "x.log", limit=100)
    for number in range(30):
        log.write(b"%09d\n" % number)
    assert (tmp_path / "x.log").stat().st_size <= 100
    assert (tmp_path / "x.log.1").stat().st_size == 100
    assert (tmp_path / "x.log").read_bytes().endswith(b"000000029\n")


def test_a_full_disk_ends_the_log_and_not_the_run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "stdout.log").symlink_to("/dev/full")
    done = start(tmp_path, ["sh", "-c", "echo one; sleep 0.3; echo two"])
    assert done.returncode == 0
    assert done.stdout == b"one\ntwo\n"
    assert b"the run goes on without it" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run"], "no command"),
        (["run", "--", "no-such-command-here"], "no such command"),
        (["run", "--on-failure", "stpo", "--", "true"], "did you mean 'stop'"),
        (["run", "--on-failure", "exec", "--", "true"], "belong together"),
        (["run", "--exec", "echo", "--", "true"], "belong together"),
        (["run", "--patience", "-1", "--", "true"], "positive"),
        (["run", "--engine", "nonsense", "--", "true"], "http://host:port"),
        (["run", "--engine", "http://h:99999", "--", "true"], "http://host:port"),
        (["run", "--rules", "/no/such.toml", "--", "true"], "cannot read the rules file"),
        (["run", "--dir", "/proc/x", "--", "true"], "can be written"),
        (["watch"], "nothing to watch"),
        (["watch", "--pid", "999999999"], "no such process"),
        (["watch", "--pid", "1"], "not a training run"),
        (["watch", "--once"], "--log"),
        (["watch", "--once", "--log", "/no/such/log"], "no such file"),
        (["watch", "--once", "--log", "/"], "not a file"),
        (["watch", "--ray-job", "x", "--ray-address", "http://127.0.0.1:1"], "no Ray job server"),
        (["watch", "--dir", "/tmp"], "nothing to watch"),
    ],
)
def test_wrong_inputs_get_one_line_and_exit_code_2(tmp_path, arguments, said):
    done = subprocess.run(
        zerogap_command(*arguments), capture_output=True, text=True, env=environment(), cwd=tmp_path, timeout=30
    )
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())
