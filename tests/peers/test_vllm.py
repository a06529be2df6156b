"""``zerogap probe`` against a real engine of someone else: vLLM 0.32 on the CPU with SmolLM2."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.peers.conftest import Start, vllm_command, vllm_environment
from zerogap.cli import run

pytestmark = [pytest.mark.peer, pytest.mark.timeout(1500)]
SCRIPT = Path(__file__).with_name("openai_script.py")


@pytest.fixture(scope="module")
def address(running_vllm: Start) -> Iterator[str]:
    with running_vllm() as found:
        yield found


def ask(capsys: pytest.CaptureFixture[str], address: str, *arguments: str) -> tuple[int, dict]:
    code = run(["probe", address, "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_the_quick_form_agrees_with_the_openai_client(
    address: str, peer_python: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, body = ask(capsys, address)
    found = {f["name"]: f for f in body["findings"]}
    said = json.loads(subprocess.run([peer_python, SCRIPT, address], capture_output=True, text=True, check=True).stdout)
    assert (body["engine"]["kind"], body["engine"]["version"]) == ("vllm", "0.32.0")
    assert (found["repeat"]["status"] == "pass") == said["repeat"]
    assert (found["company"]["status"] == "pass") == said["company"]
    assert (found["seed-honoured"]["status"] == "pass") == said["seeds"]
    assert (found["temperature"]["numbers"]["semantics"] == "raw") == said["raw_temperature"]
    assert (found["truncation"]["numbers"]["semantics"] == "raw") == said["raw_truncation"]
    assert found["errors"]["numbers"]["statuses"]["a model that does not exist"] == said["wrong_model"]
    assert code == (0 if all(f["status"] != "fail" for f in body["findings"]) else 1)
    assert body["requests"] <= 200
    unknown = {name for name, f in found.items() if f["status"] == "unknown"}
    assert unknown <= {"ties", "token-ids"}, {name: found[name]["observed"] for name in unknown}


def test_the_gap_to_two_trainers(
    address: str, smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "gap.parquet"
    _, body = ask(capsys, address, "--only", "repeat", "--trainer-model", str(smollm2), "--save-table", str(table))
    found = {f["name"]: f for f in body["findings"]}
    for name in ("trainer-gap", "trainer-gap-hf"):
        assert 0 < found[name]["numbers"]["logprob_abs_diff"] < 1e-4
        assert found[name]["status"] != "fail"
    assert table.stat().st_size > 0


def test_processed_logprobs_and_inherited_defaults(running_vllm: Start, capsys: pytest.CaptureFixture[str]) -> None:
    defaults = '{"repetition_penalty": 1.1, "top_p": 0.8}'
    names = ("temperature", "truncation", "penalties", "defaults")
    flags = ("--enforce-eager", "--logprobs-mode", "processed_logprobs", "--override-generation-config", defaults)
    with running_vllm(*flags) as other:
        _, body = ask(capsys, other, *(word for name in names for word in ("--only", name)))
    found = {f["name"]: f for f in body["findings"]}
    assert found["temperature"]["numbers"]["semantics"] == "temperature"
    assert found["truncation"]["numbers"]["semantics"] == "renormalised"
    assert found["penalties"]["code"] == "PENALTIES_IN"
    inherited = found["defaults"]["numbers"]["inherited"]
    assert inherited["repetition_penalty"] == pytest.approx(1.1, rel=0.02)
    assert inherited["top_p"] == pytest.approx(0.8, rel=0.02)


class TestBatchInvariantOnTheCpu:
    """The mode is neither supported nor refused there: health is fine until the first forward."""

    def test_the_probe_says_so(self, running_vllm: Start, capsys: pytest.CaptureFixture[str]) -> None:
        with running_vllm("--enforce-eager", VLLM_BATCH_INVARIANT="1") as address:
            code, body = ask(capsys, address)
        alive = next(f for f in body["findings"] if f["name"] == "alive")
        assert code == 1
        assert alive["code"] in ("DIED_AT_FIRST_FORWARD", "DEAD_BEHIND_HEALTH")
        assert alive["numbers"]["health_before"] == "200"
        assert body["deterministic"] == "unknown"

    def test_check_says_so_beforehand(self, capsys: pytest.CaptureFixture[str]) -> None:
        launch = ("--", "env", "VLLM_BATCH_INVARIANT=1", "vllm", "serve", "m", "--enforce-eager")
        code = run(["check", "--contract", "vllm/batch-invariant", "--gpu", "CPU", "--json", *launch])
        assert code == 1
        assert "dies at the first forward" in capsys.readouterr().out

    def test_the_watchdog_gives_verdict_and_cause(self, peer_python: Path, smollm2: Path, tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        engine = vllm_command(peer_python, smollm2, port, "--enforce-eager")
        loop = [sys.executable, str(Path(__file__).with_name("endless_loop.py")), str(port), *engine]
        done = subprocess.run(
            [sys.executable, "-m", "zerogap", "run", "--dir", str(tmp_path / "run"), "--", *loop],
            env=vllm_environment(VLLM_BATCH_INVARIANT="1"),
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        incident = (tmp_path / "run" / "incident.md").read_text()
        assert done.returncode == 1
        assert "engine core died" in incident
