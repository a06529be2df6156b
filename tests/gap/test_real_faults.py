"""Faults made for real with our own engine and trainer are found from the run's own files; see bench/real_faults.py."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")

BENCH = Path(__file__).parents[2] / "bench" / "real_faults.py"


def load_bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_real_faults", BENCH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


bench = load_bench()


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The command sets the thread count of the process; other tests keep theirs."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


SHORT = ("none", "stale weights", "other rotary base", "top-p without replay", "prefix cache kept over updates")


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.slow) for name in bench.FAULTS]
)
def test_the_fault_is_found_from_the_run_folder(name: str, tmp_path: Path) -> None:
    _, _, wanted = bench.FAULTS[name]
    verdict = bench.verdict_of(name, tmp_path / "run", steps=4)
    found = {finding.name for finding in verdict.findings if finding.level == "fault"}
    if wanted:
        assert found & wanted, (found, verdict.summary)
        assert verdict.exit_code == 1
    else:
        assert (verdict.status, found) == ("zero", set())
