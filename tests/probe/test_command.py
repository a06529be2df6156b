"""The verb: table, JSON, JUnit, comparison with an older report, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.probe.engine_server import Truth
from tests.probe.http_server import serve
from zerogap.cli import run
from zerogap.probe import prompts
from zerogap.probe.checks import CHECKS
from zerogap.probe.outcome import checks


def test_every_check_is_described_and_every_description_is_asked() -> None:
    described = {name for name, check in checks().items() if check.group != "trainer"}
    assert described == set(CHECKS)
    assert all(check.expected and check.title for check in checks().values())


def test_no_torch_is_imported() -> None:
    code = "import sys; import zerogap.probe.command, zerogap.probe.checks; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_json_is_alone_on_stdout_and_holds_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    with serve(Truth()) as address:
        code = run(["probe", address, "--json", "--only", "repeat", "--only", "temperature"])
    shown = capsys.readouterr()
    body = json.loads(shown.out)
    assert (code, shown.err) == (0, "")
    assert (body["schema"], body["schema_version"]) == ("zerogap.probe", 1)
    assert list(body) == sorted(body)
    assert {f["name"] for f in body["findings"]} == {"alive", "repeat", "temperature"}
    assert all(f["recheck"].startswith("zerogap probe http") for f in body["findings"])
    assert prompts.VICTIM[:30] not in shown.out
    assert prompts.OPEN[:20] not in shown.out


def test_the_table_ends_with_what_to_do_and_what_stays_unproven(capsys: pytest.CaptureFixture[str]) -> None:
    with serve(Truth(noise="batch")) as address:
        code = run(["probe", address, "--only", "company"])
    shown = capsys.readouterr().out
    assert code == 1
    assert "NOT_BATCH_INVARIANT" in shown
    assert "to make it deterministic" in shown
    # The test engine says it is vLLM and runs here: what this machine cannot do is not suggested.
    assert ("not on this machine" in shown) != ("switch on: VLLM_BATCH_INVARIANT=1" in shown)
    assert "not proven by this" in shown
    assert "deterministic: no" in shown


def test_a_run_folder_keeps_the_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serve(Truth(logprob="nan")) as address:
        assert run(["probe", address, "--only", "values", "--store", str(tmp_path), "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "probe.json").read_text()) == shown


def test_junit(tmp_path: Path) -> None:
    target = tmp_path / "probe.xml"
    with serve(Truth(noise="run", broken_share=0.0)) as address:
        assert run(["probe", address, "--only", "repeat", "--only", "ties", "--junit", str(target)]) == 1
    suite = ElementTree.parse(target).getroot()
    assert suite.attrib["failures"] == "1"
    assert suite.find("testcase[@name='repeat']/failure") is not None


def test_changes_since_an_older_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, asked = tmp_path / "old.json", ("--only", "repeat", "--only", "precision")
    with serve(Truth()) as address:
        run(["probe", address, "--json", *asked])
        old.write_text(capsys.readouterr().out)
        run(["probe", address, "--json", *asked, "--against", str(old)])
        again = json.loads(capsys.readouterr().out)
    assert again["changes"] == []
    with serve(Truth(logprob="bf16")) as address:
        run(["probe", address, "--json", *asked, "--against", str(old)])
        changed = json.loads(capsys.readouterr().out)
    said = "\n".join(changed["changes"])
    assert "precision: pass before, fail BF16_GRID now" in said
    assert "other bits than before" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "compny"], "did you mean 'company'"),
        (["--budget-requests", "0"], "at least 1"),
        (["--budget-seconds", "-1"], "positive"),
        (["--budget-seconds", "nan"], "positive"),
        (["--junit", "/nonexistent/x.xml"], "does not exist"),
        (["--against", "/nonexistent/x.json"], "cannot be read"),
        (["--trainer-model", "/nonexistent"], "no config.json"),
        (["--save-table", "x.parquet"], "needs --trainer-model"),
        (["--store", "/nonexistent"], "no such folder"),
        (["--only", "trainer-gap"], "it needs --trainer-model"),
    ],
)
def test_bad_arguments_are_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["probe", "http://127.0.0.1:9", *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert words in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("text", ["", "[", "[]", '{"schema": "zerogap.probe"}', '{"schema": "other", "findings": []}'])
def test_what_is_no_older_report_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = tmp_path / "old.json"
    old.write_text(text)
    assert run(["probe", "http://127.0.0.1:9", "--against", str(old)]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_key_is_sent_and_never_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ZEROGAP_PROBE_KEY", "sk-very-secret")
    with serve(Truth(key="sk-very-secret")) as address:
        assert run(["probe", address, "--json", "--only", "repeat"]) == 0
    shown = capsys.readouterr()
    assert "secret" not in shown.out + shown.err
    with serve(Truth(key="another")) as address:
        assert run(["probe", address, "--json", "--only", "repeat"]) == 3
