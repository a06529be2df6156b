"""Logs: found by their lines, read from both ends when they are large."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerogap.facts import runlog
from zerogap.facts.launch import read_launch

ARGUMENTS = "server_args=ServerArgs(model_path='m', attention_backend='fa3')"


def test_what_is_a_log() -> None:
    assert runlog.is_log(f"x\n(Engine pid=3) [2026] {ARGUMENTS}\n")
    assert runlog.is_log("[2026-01-01 00:00:00] exec_command.py:18 - EXEC: true")
    assert runlog.is_log("\x1b[36m(main pid=9)\x1b[0m [2026-01-01 00:00:00] x.py:1 - EXEC: true")
    assert not runlog.is_log('echo "EXEC: ${CMD}"\npython train.py')
    assert not runlog.is_log("")


def test_line_numbers_of_entries() -> None:
    log = runlog.read(f"a\nb\n{ARGUMENTS} {ARGUMENTS}\nc\n{ARGUMENTS.replace('fa3', 'triton')}\n", "run.log")
    sources = [facts["engine.attention_backend"].source for _, facts in log.engines]
    assert sources == ["run.log line 3: --attention-backend fa3", "run.log line 5: --attention-backend triton"]


def test_a_large_log_is_read_from_both_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runlog, "LIMIT", 4000)
    monkeypatch.setattr(runlog, "TAIL", 1000)
    file = tmp_path / "run.log"
    file.write_text(f"{ARGUMENTS}\n" + "noise\n" * 5000 + "no kernel image is available for execution on the device\n")
    text = runlog.load(file)
    assert len(text) <= 4001
    assert runlog.error_facts(text, "run.log")["log.errors"].value == ("NO_KERNEL_IMAGE",)
    assert read_launch(file)["engine.attention_backend"].value == "fa3"


def test_a_line_beyond_the_limit_is_stepped_over() -> None:
    log = runlog.read("x" * (2**20 + 1) + f"{ARGUMENTS}\n{ARGUMENTS}\n", "run.log")
    assert len(log.engines) == 1


def test_errors_name_their_lines() -> None:
    facts = runlog.error_facts("a\nCan not import FA3 in sgl_kernel.\n", "run.log")
    assert (facts["log.errors"].value, facts["log.errors"].source) == (("FA3_MISSING",), "run.log line 2")
    assert runlog.error_facts("all is well", "run.log")["log.errors"].value == ()
