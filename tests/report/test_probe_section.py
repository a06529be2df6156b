"""The engine probe in the HTML report: shown when the run folder keeps one, inert whatever is in it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.probe.engine_server import Truth
from tests.probe.http_server import serve
from zerogap.cli import run
from zerogap.report.probe import read_probe

EVIL = "<script>alert(1)</script>\x1b[2J"


def test_a_stored_probe_is_in_the_report(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "gap/mean": 0.01}}\n' for n in range(3)))
    with serve(Truth(noise="batch")) as address:
        names = ("company", "temperature")
        asked = [word for name in names for word in ("--only", name)]
        assert run(["probe", address, *asked, "--store", str(tmp_path)]) == 1
    run(["report", str(tmp_path), "-o", str(tmp_path / "r.html")])
    page = (tmp_path / "r.html").read_text()
    for wanted in ("Engine probe", "vllm 0.32.0 tiny", "NOT_BATCH_INVARIANT", "before temperature", "not proven by"):
        assert wanted in page


def test_a_report_without_a_probe_says_nothing_of_one(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "gap/mean": 0.01}}\n' for n in range(3)))
    run(["report", str(tmp_path), "-o", str(tmp_path / "r.html")])
    assert "Engine probe" not in (tmp_path / "r.html").read_text()
    assert read_probe(tmp_path) is None
    assert read_probe(None) is None


def test_what_is_in_it_is_inert(tmp_path: Path) -> None:
    finding = {"name": EVIL, "status": EVIL, "expected": EVIL, "observed": EVIL, "code": EVIL, "warnings": []}
    body = {"engine": {"kind": EVIL}, "deterministic": "no", "meaning": EVIL, "findings": [finding], "unproven": [EVIL]}
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "gap/mean": 0.01}}\n' for n in range(3)))
    for text in (json.dumps(body), "[1]", "{", EVIL, '{"engine": 3}'):
        (tmp_path / "probe.json").write_text(text)
        assert read_probe(tmp_path) is not None
        run(["report", str(tmp_path), "-o", str(tmp_path / "r.html")])
        page = (tmp_path / "r.html").read_text()
        assert "<script>alert" not in page
        assert "\x1b" not in page
