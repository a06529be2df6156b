"""The benchmark itself: its arithmetic, its processes, and that torch's own ops compute what the exact ones do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import zerogap
from tests.bench.conftest import BENCH

MODEL = next(Path(zerogap.__file__).parent.rglob("tiny-qwen3/config.json")).parent
ECHO = """
import sys
sys.path.insert(0, {folder!r})
from jsonlines import Watch, serve, take_stdout
channel = take_stdout()
print("noise")
def spin(seconds):
    watch, turns = Watch(), 0
    while watch.seconds < seconds:
        turns += 1
    return {{"seconds": watch.seconds}}
def fail():
    raise ValueError("no\\nluck")
serve(channel, {{"spin": spin, "fail": fail}}, {{"who": "echo"}})
"""


def echo_side(tmp_path: Path, name: str = "echo"):
    from measure import Side

    code = ECHO.format(folder=str(BENCH / "sides"))
    return Side(name, [sys.executable, "-c", code], os.environ, tmp_path / f"{name}.log")


def test_a_side_stands_still_unless_it_is_asked(tmp_path: Path) -> None:
    side = echo_side(tmp_path)
    try:
        assert side.about["who"] == "echo"
        process = psutil.Process(side.process.pid)
        for _ in range(2):
            end = time.monotonic() + 10
            while process.status() != psutil.STATUS_STOPPED:
                assert time.monotonic() < end
            assert side.ask(do="spin", seconds=0.05)["seconds"] >= 0.05
    finally:
        side.close()
    assert not psutil.pid_exists(side.process.pid)


def test_what_a_side_cannot_do_is_one_line(tmp_path: Path) -> None:
    from measure import SideError

    side = echo_side(tmp_path)
    try:
        with pytest.raises(SideError, match=r"^echo: ValueError: no luck$"):
            side.ask(do="fail")
        with pytest.raises(SideError, match="no such thing"):
            side.ask(do="unknown")
        os.killpg(side.process.pid, signal.SIGKILL)
        with pytest.raises(SideError, match=r"echo ended: noise \(all in "):
            side.ask(do="spin", seconds=0)
    finally:
        side.close()


def test_rounds_take_turns_and_go_on_without_a_side_that_fails(tmp_path: Path) -> None:
    from measure import rounds

    order: list[str] = []
    sides = {name: echo_side(tmp_path, name) for name in ("a", "b", "c")}

    def ask(side, number):
        if side.name == "b" and number == 1:
            return side.ask(do="fail")
        order.append(side.name)
        return side.ask(do="spin", seconds=0.01)

    try:
        answers, problems = rounds(sides, 3, ask, lambda side: None, lambda text: None)
    finally:
        for side in sides.values():
            side.close()
    assert order == ["c", "b", "a", "a", "c", "c", "a"]
    assert sorted(answers) == ["a", "c"]
    assert [len(given) for given in answers.values()] == [3, 3]
    assert problems == ["b: ValueError: no luck"]


def test_ratios_are_per_round_and_against_the_best_other() -> None:
    from measure import Row

    row = Row("r", "what", [1.0, 2.0, 4.0], {"slow": [9.0, 9.0, 9.0], "fast": [2.0, 2.0, 6.0]}, 1.5, floor_s=1.0)
    ratio = row.ratio()
    assert row.best == "fast"
    assert ratio is not None
    assert (ratio.least, ratio.median, ratio.most) == (1.0, 1.5, 2.0)
    assert row.holds is True
    assert row.roofline == 0.5
    again = Row.from_record(json.loads(json.dumps(row.record())))
    assert again == row
    assert Row("r", "w", [1.0], {"o": [1.4]}, 1.5).holds is False
    assert Row("r", "w", [1.0], {}, 1.5).holds is None


def test_costs_by_hand() -> None:
    from machine import Machine
    from model_costs import Costs

    costs = Costs(vocabulary=10, layer_weights=100, head_weights=50, kv_floats=4, attention_flops=8)
    assert costs.decode_bytes([3, 5]) == 150 * 4 + 4 * 4 * 8
    assert costs.decode_bytes([3], weight_bytes=2) == 150 * 2 + 4 * 4 * 3
    assert costs.decode_flops([3, 5]) == 2 * 150 * 2 + 8 * 8
    assert costs.prefill_flops(2, 3) == 2 * (2 * 100 * 3 + 8 * 6 + 2 * 50)
    assert costs.train_flops(2, 3) == 3 * 2 * (2 * 150 * 3 + 8 * 6)
    memory_bound = Machine("x", 1, read_bytes_per_s=1.0, flops_per_s=1e12, read_spread=1, flops_spread=1)
    assert costs.rollout_floor(memory_bound, 1, 2, 3) == 600 + (600 + 16 * 3) + (600 + 16 * 4)


def ask_ours(tmp_path: Path, *options: str) -> list[dict]:
    requests = [
        {"do": "generate", "sequences": 3, "prompt_tokens": 9, "new_tokens": 5, "seed": 1},
        {"do": "train", "sequences": 2, "length": 12, "seed": 2},
        {"do": "decode", "context": 20, "new_tokens": 3, "seed": 3},
        {"do": "check", "seed": 4},
        {"do": "grpo", "samples": 8, "new_tokens": 4},
    ]
    source = str(Path(zerogap.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, str(BENCH / "sides/ours_side.py"), str(MODEL), *options],
        input="".join(json.dumps(request) + "\n" for request in requests),
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_our_side_and_torchs_own_ops_in_it(tmp_path: Path) -> None:
    exact, inexact = ask_ours(tmp_path), ask_ours(tmp_path, "--inexact")
    assert inexact[0]["backend"] == "torch's own ops"
    assert exact[0]["backend"] != inexact[0]["backend"]
    for answers in (exact, inexact):
        assert [answer.get("error") for answer in answers] == [None] * 6
        assert answers[1]["tokens"] == 15
        assert answers[5]["trained_sequences"] == 64
        assert answers[5]["rows"] == answers[5]["prompt_tokens"] // 8 + 64 * 3 < answers[5]["rows_alone"]
    assert exact[5]["sequences_different"] == 0
    first, second = exact[4]["logprobs"], inexact[4]["logprobs"]
    assert first != second, "torch's own ops are other ops"
    assert first == pytest.approx(second, abs=1e-4)
