"""Healthy ranges: the seed's row of the table, picking by GPU and model, saving from a finished run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zerogap.cli import run
from zerogap.errors import UsageError
from zerogap.gap.baselines import baselines, pick

SEED = ["--gpu", "GB10", "--model", "Qwen3-0.6B", "--json"]


@pytest.fixture(autouse=True)
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "mine" / "baselines.toml"
    monkeypatch.setenv("ZEROGAP_BASELINES", str(path))
    return path


def log(path: Path, values: list[float], more: str = "") -> str:
    path.write_text(
        "".join(f"step {n}: {{'train/train_rollout_logprob_abs_diff': {v}{more}}}\n" for n, v in enumerate(values)),
        encoding="utf-8",
    )
    return str(path)


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict]:
    code = run(["gap", *arguments])
    return code, json.loads(capsys.readouterr().out)["sources"][0]


IN_RANGE = [0.0136, 0.0141, 0.015, 0.0164, 0.0148, 0.0139]


def test_the_seeds_range(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, verdict = answer(capsys, log(tmp_path / "ok.log", IN_RANGE), *SEED)
    assert (code, verdict["status"]) == (0, "healthy")
    code, verdict = answer(capsys, log(tmp_path / "high.log", [0.03, 0.0301, 0.0299]), *SEED)
    assert (code, verdict["status"]) == (1, "out-of-range")
    assert "0.0136 to 0.0164" in verdict["summary"]
    assert "miles-gb10-lab" in verdict["summary"]
    code, verdict = answer(capsys, log(tmp_path / "zero.log", [0.0] * 5), *SEED)
    assert code == 1
    assert verdict["classes"] == ["metric-broken"]
    code, verdict = answer(capsys, str(tmp_path / "zero.log"), *SEED, "--contract", "qwen3_dense_true_on_policy_v1")
    assert (code, verdict["status"]) == (0, "zero")


def test_nan_logged_as_a_gap_is_never_healthy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "nan.log"
    path.write_text(
        "".join(f"step {n}: {{'train/train_rollout_logprob_abs_diff': nan}}\n" for n in range(4)), encoding="utf-8"
    )
    code, _ = answer(capsys, str(path), *SEED)
    assert code in (1, 3)


def test_first_step_judges_it_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = log(tmp_path / "a.log", [0.0145, 0.2, 0.2])
    assert answer(capsys, path, *SEED, "--first-step")[0] == 0
    assert answer(capsys, path, *SEED)[0] == 1


def test_a_single_step_leaves_the_sync_untested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = log(tmp_path / "a.log", [0.0145])
    code, verdict = answer(capsys, path, *SEED)
    assert code == 3
    assert "no update" in verdict["summary"]
    assert answer(capsys, path, *SEED, "--first-step")[0] == 0
    assert answer(capsys, log(tmp_path / "b.log", [0.0145, 0.0146], ", 'train/grad_norm': 0.0"), *SEED)[0] == 3


def test_an_unknown_setup_is_unknown_and_the_general_range_serves_without_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = log(tmp_path / "a.log", IN_RANGE)
    assert answer(capsys, path, "--gpu", "H900", "--model", "Nobody-7B", "--json")[0] == 3
    assert answer(capsys, path, "--json")[0] == 0
    assert answer(capsys, log(tmp_path / "b.log", [0.05] * 4), "--json")[0] == 3
    assert answer(capsys, log(tmp_path / "c.log", [0.5] * 4), "--json")[0] == 1


def test_a_few_steps_a_little_outside_are_noted_and_one_far_outside_is_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steady = IN_RANGE * 5
    assert answer(capsys, log(tmp_path / "a.log", [*steady, 0.0172]), *SEED)[0] == 0
    assert answer(capsys, log(tmp_path / "b.log", [*steady, 0.031]), *SEED)[0] == 1


@pytest.mark.parametrize(
    ("gpu", "model", "name"),
    [
        ("NVIDIA GB10", "Qwen/Qwen3-0.6B", "gb10-qwen3-0.6b"),
        ("H100", "Qwen3-4B-Base", "fsdp-qwen3-4b-base"),
        ("A100-SXM4-80GB", "Qwen3-4B", "vime-qwen3-4b-a100"),
        ("GB10", "Qwen3-4B", None),
        (None, "Qwen3-0.6B", None),
    ],
)
def test_a_range_is_picked_by_gpu_and_model(gpu: str | None, model: str, name: str | None) -> None:
    found = pick("abs_mean", gpu=gpu, model=model)
    assert (found.name if found else None) == name


def test_unlike_quantities_are_never_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="unlike quantities"):
        pick("k3", name="gb10-qwen3-0.6b")
    with pytest.raises(UsageError, match="did you mean 'gb10-qwen3"):
        pick("abs_mean", name="gb10-qwen3-06b")
    path = tmp_path / "k3.log"
    path.write_text("step:1 - rollout_corr/k3_kl:0.0145\nstep:2 - rollout_corr/k3_kl:0.0145\n", encoding="utf-8")
    assert answer(capsys, str(path), *SEED)[0] == 3


def test_a_saved_range_is_used_by_name_and_by_setup(
    tmp_path: Path, own_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = log(tmp_path / "run.log", [0.021, 0.0223, 0.0215, 0.0219])
    assert run(["gap", "save-baseline", path, "lab-1", "--gpu", "L40S", "--model", "My-1B"]) == 0
    capsys.readouterr()
    assert own_file.exists()
    code, verdict = answer(capsys, path, "--baseline", "lab-1", "--json")
    assert (code, verdict["baseline"]["low"], verdict["baseline"]["high"]) == (0, 0.021, 0.0223)
    assert answer(capsys, path, "--gpu", "NVIDIA L40S", "--model", "My-1B-Instruct", "--json")[0] == 0
    assert answer(capsys, log(tmp_path / "other.log", [0.04] * 4), "--baseline", "lab-1", "--json")[0] == 1
    assert run(["gap", "save-baseline", path, "lab-1"]) == 0  # replaced, not doubled
    assert [b.name for b in baselines()].count("lab-1") == 1


@pytest.mark.parametrize(
    ("values", "reason"), [([0.0] * 5, "not healthy"), ([0.01, 0.01, 0.3, 0.3], "not healthy"), ([0.01], "at least 3")]
)
def test_no_range_is_made_from_a_run_that_is_not_healthy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], values: list[float], reason: str
) -> None:
    assert run(["gap", "save-baseline", log(tmp_path / "run.log", values), "x"]) == 2
    assert reason in capsys.readouterr().err


def test_a_damaged_file_of_ranges_is_one_line(
    own_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_file.parent.mkdir()
    own_file.write_text("[[baseline]\n", encoding="utf-8")
    assert run(["gap", log(tmp_path / "a.log", IN_RANGE)]) == 2
    assert "damaged baselines file" in capsys.readouterr().err


def test_every_published_range_says_where_it_is_from() -> None:
    for baseline in baselines():
        assert baseline.low < baseline.high
        assert baseline.setup
        assert baseline.source
