"""Lines are read through Ray prefixes, time stamps, levels, ANSI and progress bars."""

from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerogap.watchdog.lines import LONGEST, Joiner, parse_line
from zerogap.watchdog.review import Stamper


@pytest.mark.parametrize(
    ("raw", "text", "speaker"),
    [
        ("(RolloutManager pid=1191) [2026-01-05 00:27:53] http_utils.py:153 - Error: x", "Error: x", "RolloutManager"),
        (
            "(WorkerDict pid=97397, ip=10.0.0.2) [rank3]:[E1023 02:44:30.94 a.cpp:632] y",
            "[rank3]:[E1023 02:44:30.94 a.cpp:632] y",
            "WorkerDict",
        ),
        ("\x1b[36m(RolloutManager pid=1)\x1b[0m hello [repeated 7x across cluster]", "hello", "RolloutManager"),
        ("(raylet) worker_pool.cc:586: Some workers", "Some workers", "raylet"),
        ("(EngineCore) TimeoutError: RPC call", "TimeoutError: RPC call", "EngineCore"),
        ("[2026-09-11 22:43:16.263 rollout_executor] metrics.py:89 - perf 0: {}", "perf 0: {}", "rollout_executor"),
        ("00:57:15 TP4] Watchdog timeout", "Watchdog timeout", "TP4"),
        ("[2025-03-09 00:57:15 TP4] Watchdog timeout", "Watchdog timeout", "TP4"),
        ("INFO 12-08 19:40:07 [executor_base.py:210] It took", "It took", ""),
        ("2026-01-01 00:00:00 | INFO     | x", "x", ""),
        ("trainer: RL trainer finished!", "RL trainer finished!", "trainer"),
        (" 10%|#  | 1/10\r 20%|## | 2/10", "20%|## | 2/10", ""),
        ("a plain (bracketed) line", "a plain (bracketed) line", ""),
        ("(just words) and more", "(just words) and more", ""),
    ],
)
def test_prefixes(raw, text, speaker):
    line = parse_line(raw)
    assert (line.text, line.speaker) == (text, speaker)


def test_fields():
    line = parse_line("(A pid=12, ip=10.0.0.7) [2026-01-05 00:27:53.250] x [repeated 7x across cluster]")
    assert (line.pid, line.ip, line.repeats) == (12, "10.0.0.7", 7)
    assert line.stamp == datetime(2026, 1, 5, 0, 27, 53, 250000).timestamp()


@given(st.binary(max_size=300))
def test_any_bytes_give_a_line(raw):
    line = parse_line(raw)
    assert "\x1b[" not in line.text
    assert len(line.text) <= LONGEST


@pytest.mark.parametrize("stamp", ["[2026-13-45 00:00:00] x", "99:99:99 x", "[2026-02-30 10:00:00] x"])
def test_an_impossible_time_is_no_time(stamp):
    assert parse_line(stamp).stamp is None


def test_two_physical_lines_of_a_retry_are_one():
    joiner = Joiner()
    first = parse_line("(R pid=1) Error: Server error '503 Service Unavailable' for url 'http://x/generate'")
    second = parse_line("(R pid=1) For more information check: https://x, retrying... (attempt 51/60, url=x)")
    other = parse_line("(Q pid=2) something else")
    assert joiner.push("s", first) == []
    assert joiner.push("s", other) == [other]
    (joined,) = joiner.push("s", second)
    assert joined.text.startswith("Error: Server error")
    assert "attempt 51/60" in joined.text
    assert joiner.push("s", first) == []
    assert joiner.flush("s") == [first]


def test_times_without_a_date_go_on_over_midnight():
    modified = datetime(2026, 1, 2, 0, 30).timestamp()
    late, early = parse_line("23:59:58 x"), parse_line("00:10:00 y")
    stamper = Stamper(modified, [late.stamp, early.stamp])
    first, second = stamper.at(late.stamp, late.dated), stamper.at(early.stamp, early.dated)
    assert first == datetime(2026, 1, 1, 23, 59, 58).timestamp()
    assert second == datetime(2026, 1, 2, 0, 10).timestamp()
    assert stamper.at(None, True) > second
