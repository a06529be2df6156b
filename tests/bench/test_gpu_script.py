"""``bench/gpu.sh``: it runs as far as a CPU can, keeps what it has when cut short, and brings along what is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "bench" / "sides")]

import gpu
import gpu_stages
import gpu_wheels


def _run(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = ["bash", str(ROOT / "bench" / "gpu.sh"), "--dry", "--out", str(out), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)


def _results(out: Path) -> dict[str, dict[str, object]]:
    body = json.loads((out / "results.json").read_text())
    assert body["schema"] == "zerogap.gpu_bench"
    return body["stages"]


def test_dry_run_measures_and_writes_tables(tmp_path: Path) -> None:
    done = _run(tmp_path, "--only", "machine", "linear")
    assert done.returncode == 0, done.stdout + done.stderr
    stages = _results(tmp_path)
    assert {name: stage["status"] for name, stage in stages.items()} == {"machine": "holds", "linear": "holds"}
    rows = stages["linear"]["record"]["rows"]
    assert {row["layer"] for row in rows} == {"q_proj", "k_proj", "o_proj", "gate_proj", "down_proj", "lm_head"}
    assert all(row["exact_us"] > 0 and row["row_law"] for row in rows)
    text = (tmp_path / "results.txt").read_text()
    assert "== linear: holds" in text
    assert "of_library" in text


@pytest.mark.slow
def test_dry_run_of_every_stage(tmp_path: Path) -> None:
    done = _run(tmp_path)
    stages = _results(tmp_path)
    assert set(stages) == {stage.name for stage in gpu.STAGES}, done.stderr
    assert {stage["status"] for stage in stages.values()} <= {"holds", "skipped"}


def test_a_stage_cut_short_leaves_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "gpu_stages.py"
    slow.write_text(
        "import sys, time, pathlib\n"
        'pathlib.Path(sys.argv[3]).write_text(\'{"facts": {"copied": 1}, "rows": [{"a": 1.5}]}\')\n'
        "time.sleep(60)\n"
    )
    monkeypatch.setattr(gpu, "__file__", str(slow))
    (tmp_path / "logs").mkdir()
    outcome = gpu.run_stage("linear", 2.0, "cpu", True, tmp_path)
    assert outcome["status"] == "out of time"
    assert outcome["seconds"] < 20
    assert outcome["record"] == {"facts": {"copied": 1}, "rows": [{"a": 1.5}]}
    gpu.gather(tmp_path, "cpu", {"linear": outcome})
    assert "copied: 1" in (tmp_path / "results.txt").read_text()


def test_a_stage_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "gpu_stages.py"
    broken.write_text("raise RuntimeError('no such GPU')\n")
    monkeypatch.setattr(gpu, "__file__", str(broken))
    (tmp_path / "logs").mkdir()
    # Python leaves with 1, as a stage that does not hold: either way it is not passed.
    outcome = gpu.run_stage("linear", 30.0, "cpu", True, tmp_path)
    assert outcome["status"] == "does not hold"
    assert "no such GPU" in outcome["why"]


def test_time_used_up_is_said(tmp_path: Path) -> None:
    code = gpu.main(["--dry", "--out", str(tmp_path), "--only", "linear", "--seconds", "1"])
    assert code == 1
    assert _results(tmp_path)["linear"]["status"] == "not started"


def test_sigterm_ends_the_stage_and_keeps_what_there_is(tmp_path: Path) -> None:
    """A machine that is taken away sends SIGTERM: what was measured is written, and no process is left behind."""
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = ["bash", str(ROOT / "bench" / "gpu.sh"), "--dry", "--out", str(tmp_path), "--only", "certify", "machine"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while not (tmp_path / "logs" / "certify.txt").exists():
            assert time.monotonic() < end
            time.sleep(0.05)
        process.terminate()
        assert process.wait(timeout=30) == 1
    finally:
        process.kill()
        process.wait()
    stages = _results(tmp_path)
    assert stages["machine"]["status"] == "holds"
    assert stages["machine"]["record"]["facts"]["torch"]
    assert stages["certify"]["status"] == "cut short"
    assert "== certify: cut short" in (tmp_path / "results.txt").read_text()
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "cuda:99"], "--device cuda:99: PyTorch cannot use it"),
        (["--dry", "--out", "/proc/none/there"], "--out /proc/none/there: No such file or directory"),
        (["--dry", "--only", "linaer"], "invalid choice: 'linaer'"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        gpu.main(arguments)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_the_kernels_of_a_stage_are_found_and_built_without_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'zerogap[gpu]'")
    done = _run(tmp_path, "--only", "kernels")
    assert done.returncode == 0, done.stdout + done.stderr
    record = _results(tmp_path)["kernels"]["record"]
    assert record["rows"] == [{"stage": "attention", "kernels": 2, "why": ""}]  # over one split, and over several
    assert (record["facts"]["built"], record["facts"]["failed"]) == (1, 0)


@pytest.mark.slow
def test_every_stage_tells_its_kernels() -> None:
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'zerogap[gpu]'")
    import gpu_kernels

    found = gpu_kernels.kernels_of(list(gpu_kernels.CASES), "sm_90", 280.0)
    assert set(found) == set(gpu_kernels.CASES)
    for case, kernels in found.items():
        assert isinstance(kernels, list), f"{case}: {kernels}"
        assert kernels


def test_stages_have_functions_and_fit_eight_minutes() -> None:
    assert [stage.name for stage in gpu.STAGES] == list(gpu_stages.STAGES)
    assert sum(stage.seconds for stage in gpu.STAGES) < 480
    assert gpu.BUDGET < 480


def test_only_missing_wheels_are_unpacked(tmp_path: Path) -> None:
    names = ("pytest-99.0-py3-none-any.whl", "zerogap_no_such-1.0-py3-none-any.whl", "elsewhere-1.0-cp39-cp39-any.whl")
    for name in names:
        package, version, _ = name.split("-", 2)
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr(f"{package}.py", "VALUE = 1\n")
            archive.writestr(f"{package}-{version}.dist-info/METADATA", f"Name: {package}\n")
    site = gpu_wheels.unpack(tmp_path)
    assert site is not None
    assert sorted(path.name for path in site.glob("*.py")) == ["zerogap_no_such.py"]
    assert gpu_wheels.unpack(tmp_path) == site
    assert gpu_wheels.unpack(tmp_path / "absent") is None
