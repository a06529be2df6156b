"""Metrics, samples, the display, and the JSONL files under them."""

import io
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from zerogap.rl.display import GuardedDisplay, LiveDisplay, PlainDisplay, SilentDisplay, make_display, time_left
from zerogap.rl.metric_names import METRICS
from zerogap.rl.metrics import MetricsWriter
from zerogap.rl.records import drop_steps_from, open_to_append, read_records, to_line
from zerogap.rl.samples import Sample, read_samples, samples_path, write_samples

STEP = {
    "gap/tokens_compared": 1234,
    "gap/tokens_different": 0,
    "gap/max": 0.0,
    "gap/mean": 0.0,
    "reward/mean": 0.5,
    "eval/accuracy": 0.75,
    "time/step_s": 2.0,
}


@given(st.integers(0, 2**32 - 1))
def test_float32_values_keep_their_bits(word: int) -> None:
    value = np.array([word], np.uint32).view(np.float32)[0]
    back = np.float32(float(json.loads(to_line({"v": float(value)}))["v"]))
    assert back.view(np.uint32) == word or (math.isnan(value) and math.isnan(back))


def test_lines_are_ascii_and_keep_non_finite_numbers_as_texts() -> None:
    line = to_line({"a": [math.nan, math.inf, -math.inf], "b": "\x1b[31m\u202eé\n"})
    assert line.isascii()
    assert line.count("\n") == 1
    assert "\x1b" not in line
    assert json.loads(line)["a"] == ["nan", "inf", "-inf"]


@given(st.lists(st.text(max_size=20)), st.binary(max_size=30).filter(lambda tail: b"\n" not in tail))
def test_a_torn_line_is_cut_off_before_appending(texts: list[str], torn: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "f.jsonl"
        path.write_bytes("".join(to_line({"t": text}) for text in texts).encode() + torn)
        assert [record["t"] for record in read_records(path)] == texts
        with open_to_append(path) as file:
            file.write(to_line({"t": "new"}))
        assert [record["t"] for record in read_records(path)] == [*texts, "new"]


def test_a_torn_line_longer_than_the_read_block(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_bytes(b'{"t":1}\n' + b"x" * 200_000)
    open_to_append(path).close()
    assert path.read_bytes() == b'{"t":1}\n'


def test_dropping_steps(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    drop_steps_from(path, 0)
    assert not path.exists()
    path.write_text("".join(to_line({"step": step}) for step in range(5)))
    drop_steps_from(path, 3)
    assert [record["step"] for record in read_records(path)] == [0, 1, 2]


def test_metrics_of_a_resumed_run_follow_the_checkpoint(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as metrics:
        for step in range(5):
            metrics.write(step, {"reward/mean": step, "gap/max": math.nan if step == 1 else 0.0})
    with MetricsWriter(tmp_path, first_step=3) as metrics:
        metrics.write(3, {"reward/mean": 30.0})
    records = list(read_records(tmp_path / "metrics.jsonl"))
    assert [(record["step"], record["reward/mean"]) for record in records] == [(0, 0), (1, 1), (2, 2), (3, 30.0)]
    assert records[1]["gap/max"] == "nan"
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(0, 0), (1, 1), (2, 2), (3, 30)]


def test_metrics_of_a_run_that_begins_again_at_0_replace_the_old(tmp_path: Path) -> None:
    """Killed before its first checkpoint and started again: TensorBoard must not show the steps of the first try."""
    for value in (1.0, 2.0):
        with MetricsWriter(tmp_path) as metrics:
            for step in range(3 - int(value)):
                metrics.write(step, {"reward/mean": value})
    assert [record["reward/mean"] for record in read_records(tmp_path / "metrics.jsonl")] == [2.0]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(0, 2.0)]


def test_only_defined_metrics_can_be_written(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(0, dict.fromkeys(METRICS, 1.0))
        with pytest.raises(AssertionError, match="reward/avg"):
            metrics.write(0, {"reward/avg": 1.0})


def test_nothing_here_imports_torch() -> None:
    code = (
        "import sys, zerogap.rl.metrics, zerogap.rl.samples, zerogap.rl.display, zerogap.rl.memory, zerogap.rl.custom, "
        "zerogap.rl.reward_journal, zerogap.rl.tasks, zerogap.rl.pages, zerogap.rl.lockstep\n"
        "assert not {'torch', 'tensorflow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def sample(**changes: object) -> Sample:
    values: dict[str, object] = {
        "prompt_index": 3, "sample_index": 1, "prompt": "12+34=", "completion": "46", "answer": "46", "reward": 1.0,
        "reward_kind": "ok", "advantage": None, "finish_reason": "stop", "weights_version": 7, "prompt_ids": [1, 2],
        "response_ids": [4, 6, 0], "logprobs_engine": [-0.1, float(np.float32(-0.3)), -math.inf],
        "logprobs_trainer": [-0.1, None, math.nan], "loss_mask": [True, False, True],
        "cached_tokens": 2,
    }  # fmt: skip
    return Sample(**{**values, **changes})  # type: ignore[arg-type]


def test_samples_round_trip(tmp_path: Path) -> None:
    write_samples(tmp_path, 12, [sample(), sample()])
    path = write_samples(tmp_path, 12, [sample()])
    assert path == samples_path(tmp_path, 12)
    assert path.name == "step-000012.jsonl"
    (record,) = read_samples(path)
    assert record["sample"] == "3.1"
    assert record["logprobs_engine"] == [-0.1, float(np.float32(-0.3)), -math.inf]
    assert record["logprobs_trainer"][:2] == [-0.1, None]
    assert math.isnan(record["logprobs_trainer"][2])
    assert [item.name for item in path.parent.iterdir()] == [path.name]


def test_samples_with_columns_of_different_lengths_are_a_fault(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="different lengths"):
        write_samples(tmp_path, 0, [sample(loss_mask=[True])])
    assert not samples_path(tmp_path, 0).exists()


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=140, highlight=False, markup=False)


def test_the_display_fits_where_it_goes() -> None:
    assert isinstance(make_display(9, as_json=True), SilentDisplay)
    for terminal, kind in ((True, LiveDisplay), (False, PlainDisplay)):
        display = make_display(9, as_json=False, console=console(terminal))
        assert isinstance(display, GuardedDisplay)
        assert isinstance(display.display, kind)


def test_silent_means_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with make_display(3, as_json=True) as display:
        display.note("text")
        display.step(0, STEP)
    assert capsys.readouterr() == ("", "")


def test_plain_lines_are_aligned() -> None:
    screen = console(False)
    with make_display(3, as_json=False, console=screen) as display:
        display.note("evil \x1b[31m text [bold]x[/bold]")
        for step in range(2):
            display.step(step, STEP)
    note, head, first, second = screen.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert note == "evil \\x1b[31m text [bold]x[/bold]"
    assert head.index("compared") + len("compared") == first.index("1,234") + len("1,234")
    assert first.endswith("4s")
    assert second.endswith("2s")
    assert "\x1b" not in head + first


def test_a_gap_that_is_not_zero_never_looks_like_zero() -> None:
    screen = console(False)
    PlainDisplay(screen, 1).step(0, {**STEP, "gap/max": 1e-38, "gap/mean": math.nan, "gap/tokens_different": 1})
    line = screen.file.getvalue().splitlines()[1]  # type: ignore[attr-defined]
    assert "1e-38" in line
    assert "nan" in line


def test_the_live_table_shows_the_newest_steps() -> None:
    screen = console(True)
    with make_display(40, as_json=False, console=screen) as display:
        display.note("\x1b]0;title\x07")
        for step in range(20):
            display.step(step, {**STEP, "gap/tokens_compared": 5000 + step})
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "step 20 of 40 · held-out accuracy 0.750 · 40s left" in text
    assert "\x1b]0;" not in text
    assert "5,000" not in text.rpartition("compared")[2]
    assert "5,019" in text.rpartition("compared")[2]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.4, "59s"), (61, "1m01s"), (3600 * 2 + 425, "2h07m"), (math.nan, "?")]
)
def test_time_left(seconds: float, text: str) -> None:
    assert time_left(seconds) == text
