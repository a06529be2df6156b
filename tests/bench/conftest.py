import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(autouse=True)
def bench_on_the_path() -> Iterator[None]:
    """Scripts of ``bench/`` import each other by plain names."""
    sys.path.insert(0, str(BENCH))
    yield
    sys.path.remove(str(BENCH))
