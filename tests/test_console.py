"""How far a long piece of work is: said once at its ends where nobody sees a bar."""

from __future__ import annotations

import pytest

from zerogap.console import counted


def test_without_a_terminal_only_the_ends_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    with counted("building kernels") as tell:
        for done in range(3):
            tell(done, 3, "linear_kernel")
        tell(3, 3, "")
    seen = capsys.readouterr()
    assert seen.err == "building kernels: 0 of 3\nbuilding kernels: 3 of 3\n"
    assert seen.out == ""


def test_on_a_terminal_a_bar_names_what_is_next(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with counted("building kernels") as tell:
        tell(1, 3, "linear_kernel")
    assert "building kernels: linear_kernel" in capsys.readouterr().err
