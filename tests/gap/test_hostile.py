"""Input that is damaged or meant to harm: refused in one line, nothing run, nothing printed that acts."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerogap.cli import run
from zerogap.errors import UsageError
from zerogap.gap.readers import load
from zerogap.gap.readers.tensorboard import fields
from zerogap.gap.readers.text_log import LogParser

LINE = "step {}: {{'train/train_rollout_logprob_abs_diff': {}}}\n"


class Attack:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def as_torch_zip(path: Path, data: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
    return path


def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    data = pickle.dumps({"samples": [Attack(mark)]})
    for path in (tmp_path / "a.pkl", as_torch_zip(tmp_path / "a.pt", data)):
        if path.suffix == ".pkl":
            path.write_bytes(data)
        with pytest.raises(UsageError, match="refused"):
            load(path)
        assert not mark.exists()
    pickle.loads(data)  # the attack is a real one
    assert mark.exists()


@pytest.mark.parametrize("payload", [b"", b"\x80\x02.", b"\x80\x04K\x01.", b"garbage", b"\x80\x02]q\x00(" * 50])
def test_broken_archives_are_refused(tmp_path: Path, payload: bytes) -> None:
    with pytest.raises(UsageError, match="refused"):
        load(as_torch_zip(tmp_path / "a.pt", payload))


def test_a_dump_that_wants_all_memory_or_time_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerogap.gap.readers.torch_dump.SECONDS", 6)
    # Doubling a list by memo references: a few bytes that ask for gigabytes when expanded into JSON.
    rows: list[object] = [0.0] * 100
    for _ in range(28):
        rows = [rows, rows]
    with pytest.raises(UsageError, match="refused"):
        load(
            as_torch_zip(tmp_path / "a.pt", pickle.dumps([{"log_probs": rows, "rollout_log_probs": rows}], protocol=2))
        )


def test_parquet_cut_short_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"logprob_engine": [-1.0] * 5000, "logprob_trainer": [-1.0] * 5000}), path)
    whole = path.read_bytes()
    for size in (4, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(UsageError, match=r"damaged|unfinished"):
            load(path)
    path.write_bytes(whole[:200] + bytes(len(whole) - 400) + whole[-200:])
    with pytest.raises(UsageError):
        load(path)


def test_a_sparse_file_of_ten_gigabytes_ends_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    with path.open("wb") as file:
        file.write((LINE.format(0, 0.01) * 5).encode())
        file.truncate(10 << 30)
        file.seek((10 << 30) - 1)
        file.write(b"\n")
    assert load(path).series[0].values["abs_mean"].tolist() == [0.01]
    with path.open("wb") as file:
        file.truncate(10 << 30)
    with pytest.raises(UsageError, match=r"no text|neither text"):
        load(path)


def test_mixed_encodings_in_one_log_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(
        b"\xff\x00caf\xe9 \xc3\xa9\n"
        + LINE.format(0, 0.5).encode()
        + "ünïcode\n".encode("utf-16-le")
        + LINE.format(1, 0.25).encode()
    )
    assert load(path).series[0].values["abs_mean"].tolist() == [0.5, 0.25]


@pytest.mark.parametrize(
    "content", [b"", b"\n\n \n", b"\x00" * 5000, b"\x7fELF\x00\x00\x01" * 900, b"{" * 100_000, b"[" * 100_000]
)
def test_what_holds_nothing_is_one_line_and_exit_code_2(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    assert run(["gap", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "zerogap: error:" in captured.err
    assert str(path) in captured.err


def test_control_sequences_and_markup_are_inert_in_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "evil\x1b[2Jname.jsonl"
    path.write_text(
        '{"sample": "\\u001b]0;owned\\u0007<script>", "logprob_engine": [-1.0, -2.0, -1.0, -3.0], '
        '"logprob_trainer": [-5.0, -2.0, -9.0, -1.0], "host": "[red]\\u202eevil"}\n',
        encoding="utf-8",
    )
    run(["gap", str(path)])
    captured = capsys.readouterr()
    for text in (captured.out, captured.err):
        assert "\x1b" not in text
        assert "\x07" not in text
        assert "\u202e" not in text


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_no_bytes_make_the_parsers_raise(data: bytes) -> None:
    LogParser().feed(b"gap diff kl prob " + data + b"\n")
    list(fields(data))


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=200))
def test_no_text_makes_the_facts_raise(text: str) -> None:
    from zerogap.gap.diagnoses.stated import diagnose_facts
    from zerogap.gap.facts import Facts

    facts = Facts()
    facts.add_text(text)
    diagnose_facts(facts)


def test_a_fifo_and_a_folder_without_anything_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="not a regular file"):
        load(tmp_path / "pipe")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="empty folder"):
        load(tmp_path / "empty")


def test_a_log_that_grows_while_it_is_read_may_end_in_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"step": 0, "gap/mean": 0.5}\n{"step": 1, "gap/me', encoding="utf-8")
    loaded = load(path)
    assert loaded.series[0].values["abs_mean"].tolist() == [0.5]
    assert any("cut off" in note for note in loaded.notes)
    path.write_text(
        '{"step": 0, "gap/mean": 0.5}\n{"step": 1, "gap/me\n{"step": 2, "gap/mean": 0.5}\n', encoding="utf-8"
    )
    with pytest.raises(UsageError, match="line 2 is no JSON"):
        load(path)
