"""The examples of docs/check.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import zerogap
from zerogap.cli import run

PAGE = (Path(__file__).parents[2] / "docs" / "check.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_console_example(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = _blocks("console")
    command, *lines = block.splitlines()
    code = run(command.removeprefix("$ zerogap ").split())
    out = capsys.readouterr().out
    shown = [line for line in lines[: lines.index("          ...")] if line]
    assert all(line in out for line in shown)
    assert str(code) == lines[-1]


def test_library_examples() -> None:
    guard, library = _blocks("python")
    with pytest.raises(AssertionError, match="not true on-policy: no"):
        exec(guard, {"train_args": "--train-backend fsdp --hf-checkpoint /m/Qwen3-8B --true-on-policy-mode"})
    exec(library, {})


def test_every_option_is_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    run(["check", "--help"])
    options = set(re.findall(r"--[a-z]+", capsys.readouterr().out)) - {"--help"}
    assert {option for option in options if f"`{option}" not in PAGE} == set()
    assert zerogap.check.__doc__
