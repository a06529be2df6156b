"""Our own engine under the probe: deterministic in every way that is asked, and a gap of exactly 0 to our trainer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.probe.exact_engine import ExactEngine
from tests.probe.http_server import serve
from zerogap.probe import verdict
from zerogap.probe.run import Question, probe

pytest.importorskip("torch")


@pytest.mark.timeout(300)
def test_the_exact_engine_holds_every_promise(tmp_path: Path) -> None:
    table = tmp_path / "gap.parquet"
    engine = ExactEngine()
    with serve(engine.truth, engine) as address:
        result = asyncio.run(probe(Question(address, seconds=200.0, trainer=engine.folder, table=table)))
    found = {f.check.name: f.outcome for f in result.findings}
    failed = {name: outcome.observed for name, outcome in found.items() if outcome.status == "fail"}
    assert failed == {}
    assert verdict.deterministic(result) == "yes"
    assert found["trainer-gap"].code == "GAP_IS_ZERO"
    assert found["trainer-gap"].numbers["bit_equal"] == found["trainer-gap"].numbers["tokens"] > 100
    # The control: another forward of the same weights is near and not equal, so equality is no matter of course.
    assert found["trainer-gap-hf"].numbers["bit_equal"] < found["trainer-gap-hf"].numbers["tokens"]
    assert 0 < found["trainer-gap-hf"].numbers["logprob_abs_diff"] < 1e-5
    rows = pq.read_table(table)
    assert rows["logprob_engine"].equals(rows["logprob_trainer"])
