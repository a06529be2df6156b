"""The command's manners: exit codes, one-line errors, and what it loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zerogap import __version__
from zerogap.cli import run
from zerogap.console import finite, printable
from zerogap.errors import ExitCode, UsageError, nearest
from zerogap.files import write_atomic, write_text_atomic
from zerogap.threads import cpu_quota, prepare_environment, thread_count


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"zerogap {__version__}\n"


@pytest.mark.parametrize("arguments", [["trian"], ["train"], ["train", "--nope"], []])
def test_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == ExitCode.USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    if arguments:
        assert captured.err.startswith("zerogap: error: ")
        assert captured.err.count("\n") == 1


def test_a_name_with_a_newline_stays_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "no\nsuch.toml"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_help_needs_no_torch() -> None:
    code = "import sys, zerogap.cli; zerogap.cli.run(['train', '--help']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
    assert "Exit codes" in done.stdout


def test_environment_is_ready_before_torch_loads() -> None:
    code = (
        "import os, zerogap.threads as t; t.prepare_environment(); import torch; "
        "print(os.environ['OMP_WAIT_POLICY'], torch.get_num_threads() == t.thread_count())"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OMP_")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == ["passive", "True"]


def test_thread_count_follows_the_quota(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    for quota, expected in ((None, 16), (3.0, 3), (0.5, 1), (64.0, 16)):
        monkeypatch.setattr("zerogap.threads.cpu_quota", lambda quota=quota: quota)
        assert thread_count() == expected
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert thread_count() == 5
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    prepare_environment()
    assert os.environ["OMP_WAIT_POLICY"] == "active", "what the person set stays"


def test_cgroup_files(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert cpu_quota(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("200000")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000")
    assert cpu_quota(tmp_path) == 2.0
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1")
    assert cpu_quota(tmp_path) is None


def test_files_are_whole_or_absent(tmp_path: Path) -> None:
    target = tmp_path / "file.txt"
    write_text_atomic(target, "old")

    def fails(path: Path) -> None:
        path.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomic(target, fails)
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]
    write_text_atomic(target, "new")
    assert target.read_text() == "new"


def test_hostile_text_is_inert() -> None:
    hostile = "\x1b[2J\x07 \u202eabc\u2066 \x9b31m ok\ttab"
    shown = printable(hostile)
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert "\x9b" not in shown
    assert shown.endswith("ok\ttab")


def test_json_has_no_nan() -> None:
    values = finite({"a": float("nan"), "b": [float("inf"), 1.0], "c": {"d": -float("inf")}})
    assert json.loads(json.dumps(values, allow_nan=False)) == {"a": "nan", "b": ["inf", 1.0], "c": {"d": "-inf"}}


def test_nearest() -> None:
    assert nearest("temprature", ["temperature", "top_p"]) == "; did you mean 'temperature'?"
    assert nearest("zzz", ["temperature"]) == ""
    assert UsageError("x").exit_code == 2
