"""The gap rule: a run whose gap leaves the range that was asked for is a bad metric, from step 0 on."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerogap.cli import run
from zerogap.gap.baselines import baselines
from zerogap.watchdog.gap_rule import GapRule
from zerogap.watchdog.review import review_logs

NAME = "gb10-qwen3-0.6b"


def step(number: int, gap: float) -> str:
    return (
        f"[2026-01-05 00:{number:02d}:00.000 actor_cell0_rank0] log_utils.py:542 - step {number}: "
        f"{{'train/loss': 0.1, 'train/train_rollout_logprob_abs_diff': {gap}, 'train/grad_norm': 0.5, "
        f"'train/step': {number}}}"
    )


def log(tmp_path: Path, gaps: list[float]) -> list[tuple[str, Path]]:
    path = tmp_path / "run.log"
    path.write_text("".join(step(number, gap) + "\n" for number, gap in enumerate(gaps)))
    return [("run.log", path)]


def verdict(tmp_path: Path, gaps: list[float], name: str | None) -> str | None:
    found = review_logs(log(tmp_path, gaps), gap=name)[0]
    return None if found is None or found.cause != "gap-out-of-range" else found.name


def test_out_of_range_is_a_bad_metric(tmp_path: Path) -> None:
    healthy = [0.0140, 0.0151, 0.0160, 0.0144]
    assert verdict(tmp_path, healthy, NAME) is None
    assert verdict(tmp_path, [*healthy, 0.03, 0.031], NAME) == "bad-metric"
    assert verdict(tmp_path, [0.2], NAME) == "bad-metric", "step 0 counts"
    assert verdict(tmp_path, [0.2, 0.2], None) is None, "nobody asked"


def test_zero_is_a_contract(tmp_path: Path) -> None:
    assert verdict(tmp_path, [0.0, 0.0], "zero") is None
    assert verdict(tmp_path, [0.0, 1e-6], "zero") == "bad-metric"


def test_a_range_of_another_quantity_says_nothing() -> None:
    other = next(b.name for b in baselines() if b.quantity != "abs_mean")
    assert GapRule(other).feed(step(0, 5.0)) is None


def test_unknown_range(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "--gap", "zro", "--", "true"]) == 2
    assert "did you mean 'zero'" in capsys.readouterr().err
