"""A training run of half a second through the command line, and what it leaves behind."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from zerogap.cli import run

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"
SMALL = (
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "eval.every=0",
    "engine.kv_bytes=2000000",
    "gap.scope=all",
    "reward.workers=1",
)


def arguments(folder: Path | str, *extra: str, steps: int = 1, config: Path | str = QUICKSTART) -> list[str]:
    """The command line of a small run."""
    return ["train", str(config), f"run.dir={folder}", f"run.steps={steps}", *SMALL, *extra]


def train(folder: Path | str, *extra: str, steps: int = 1, config: Path | str = QUICKSTART) -> int:
    """Run it in this process; return the exit code."""
    return run(arguments(folder, *extra, steps=steps, config=config))


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr, with nothing on stdout but what a run shows."""
    error = capsys.readouterr().err
    assert error.count("\n") == 1, f"one line: {error!r}"
    assert error.startswith("zerogap: error: ")
    assert "Traceback" not in error
    return error


def weights(folder: Path, step: int) -> list[bytes]:
    """The bytes of a checkpoint's weights and moments."""
    checkpoint = folder / "checkpoints" / f"step-{step:06d}"
    return [path.read_bytes() for path in sorted(checkpoint.rglob("*.safetensors"))]


def leftovers(folder: Path) -> list[str]:
    """Temporary files under a folder."""
    return [str(path.relative_to(folder)) for path in folder.rglob(".*")]


def workers() -> list[int]:
    """Reward workers of this process."""
    return [child.pid for child in psutil.Process().children(recursive=True) if "reward_worker" in str(child.cmdline())]
