"""Every report of the gap areas: its input as a file for ``zerogap gap``, its wanted answer in the output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zerogap.cli import run

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "gap_reports.json").read_text(encoding="utf-8"))

# What the gap's tools cannot establish from logs, dumps or facts, and why. The cases below are answered from what the
# report states; finding the same without that statement is out of reach.
OUT_OF_REACH = {
    "R053": "the identity sync must be run against a live engine: `zerogap probe` and the engine's owner do that",
    "R058": "the layers' dtypes must be stated: neither program writes them to a log",
    "R060": "the share of changed elements needs the weights",
    "R094": "the bucket sizes must be varied on a live engine",
    "R096": "checksums need the engine's memory",
    "R099": "the order of calls must be stated or logged",
    "R102": "checksums need both devices",
    "R152": "a preflight rule on flags: `zerogap check` reads the launch command; here it must be stated",
    "R154": "the padded vocabulary must be stated; its effect alone looks like a small constant shift",
    "R158": "gradients are not in any gap source",
    "R159": "the installed profile table is read by `zerogap check`",
}


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = run(["gap", *arguments, "--json"])
    captured = capsys.readouterr()
    return code, json.loads(captured.out)["sources"][0] if captured.out else {"error": captured.err}


@pytest.mark.parametrize("case", CASES, ids=[f"{case['id']}-{case['code']}" for case in CASES])
def test_the_report_gets_its_answer(case: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "input.txt"
    source.write_text(case["input"], encoding="utf-8")
    code, verdict = answer(capsys, str(source))
    assert "findings" in verdict, verdict
    found = {finding["code"]: finding for finding in verdict["findings"]}
    if case["code"]:
        assert case["code"] in found, (list(found), verdict["summary"])
        text = json.dumps(found[case["code"]], ensure_ascii=False) + " ".join(f["observed"] for f in found.values())
        for said in case["says"]:
            assert said in text, (said, text)
    assert code == case["exit"], verdict["summary"]


def test_a_dict_repr_behind_a_ray_prefix_is_one_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R147: step=11 gap=0.0183 from a dict repr, the other line ignored."""
    source = tmp_path / "run.log"
    source.write_text(next(case["input"] for case in CASES if case["id"] == "R147"), encoding="utf-8")
    _, verdict = answer(capsys, str(source))
    (series,) = verdict["series"]
    assert series["steps"] == [11]
    assert series["values"]["abs_mean"] == [0.0183]


def test_the_list_of_what_is_out_of_reach_names_real_cases() -> None:
    assert set(OUT_OF_REACH) <= {case["id"] for case in CASES}
    assert len(CASES) == 62
