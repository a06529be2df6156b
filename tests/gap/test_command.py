"""The verb: JSON, exit codes, wrong arguments, comparing, following, and that torch is never loaded."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from zerogap.cli import run
from zerogap.gap import Recorder, compare
from zerogap.gap.follow import follow
from zerogap.gap.judge import Options

LINE = "step {}: {{'train/train_rollout_logprob_abs_diff': {}, 'train/lr-pg_0': {}}}\n"


@pytest.fixture(autouse=True)
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROGAP_BASELINES", str(tmp_path / "none.toml"))


def log(path: Path, values: list[float], lr: float = 1e-6) -> str:
    path.write_text("".join(LINE.format(n, v, lr) for n, v in enumerate(values)), encoding="utf-8")
    return str(path)


def test_json_is_alone_on_stdout_sorted_and_versioned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["gap", log(tmp_path / "a.log", [0.01, 0.011]), "--json"])
    text = capsys.readouterr().out
    body = json.loads(text)
    assert (body["schema"], body["schema_version"]) == ("zerogap.gap", 1)
    assert text == json.dumps(body, sort_keys=True) + "\n"


def test_every_finding_has_what_the_design_asks_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = log(tmp_path / "a.log", [0.01, 0.2, 0.2])
    assert run(["gap", path, "--json"]) == 1
    finding = json.loads(capsys.readouterr().out)["sources"][0]["findings"][0]
    assert {"name", "status", "expected", "observed", "evidence", "hint", "recheck", "confidence", "confirm"} <= set(
        finding
    )
    command = finding["recheck"].split()
    assert run([*command[1:], "--json"]) == 1
    assert [f["name"] for f in json.loads(capsys.readouterr().out)["sources"][0]["findings"]] == [finding["name"]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing-here.log"], "no such file"),
        ([], "name a log"),
        (["{log}", "--only", "sampler/truncatio"], "did you mean 'sampler/truncation'"),
        (["{log}", "--map", "logprob_engine"], "write COLUMN=THEIRS"),
        (["{log}", "--map", "logprob_engin=x"], "did you mean 'logprob_engine'"),
        (["{log}", "--set", "top_p"], "write KEY=VALUE"),
        (["{log}", "--noise-floor", "-1"], "positive number"),
        (["{log}", "--baseline", "nope"], "no such baseline"),
        (["{log}", "--plot", "x.pdf"], ".svg or .png"),
        (["{log}", "--plot", "no-folder/x.svg"], "does not exist"),
        (["{log}", "--save-table", "t.parquet"], "per-token log-probs"),
        (["{log}", "{log}", "--follow"], "exactly one log or run folder"),
        (["--facts", "nothing.toml"], "cannot be read"),
        (["save-baseline", "{log}"], "save-baseline RUN NAME"),
    ],
)
def test_wrong_input_is_one_line_that_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    path = log(tmp_path / "a.log", [0.01, 0.011])
    before = set(tmp_path.iterdir())
    assert run(["gap", *(a.format(log=path) for a in arguments)]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert set(tmp_path.iterdir()) == before


def test_a_table_with_one_side_says_which_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text('{"sample": 0, "rollout_log_probs": [-1.0, -2.0]}\n', encoding="utf-8")
    assert run(["gap", str(path)]) == 3
    assert "--map logprob_trainer=NAME" in capsys.readouterr().out


def test_a_web_page_and_a_map_for_a_log_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "a.html"
    page.write_text("<!doctype html><p>step 0: gap: 0.0</p>", encoding="utf-8")
    assert run(["gap", str(page)]) == 2
    assert "a web page" in capsys.readouterr().err
    assert run(["gap", log(tmp_path / "a.log", [0.01, 0.01]), "--map", "logprob_engine=x"]) == 2
    assert "without columns" in capsys.readouterr().err


def test_two_runs_are_compared_and_the_step_where_they_part_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = log(tmp_path / "a.log", [0.010, 0.018, 0.015, 0.014])
    b = log(tmp_path / "b.log", [0.010, 0.018, 0.201, 0.19])
    assert run(["gap", a, b, "--json"]) == 1
    body = json.loads(capsys.readouterr().out)
    (comparison,) = body["comparisons"]
    assert comparison["first_apart"] == 2
    assert {row["name"] for row in comparison["rows"]} == {"abs_mean", "lr"}
    run(["gap", a, b])
    assert "effect size" in capsys.readouterr().out


def test_columns_of_one_csv_are_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.csv"
    path.write_text("step,gap_sleep_off,gap_sleep_on\n1,0.010,0.010\n2,0.018,0.018\n3,0.015,0.201\n", encoding="utf-8")
    assert run(["gap", str(path), "--json"]) == 1
    body = json.loads(capsys.readouterr().out)
    assert [s["label"].rsplit(":", 1)[1] for s in body["sources"][0]["series"]] == ["sleep_off", "sleep_on"]
    assert body["comparisons"][0]["first_apart"] == 3


def test_metrics_and_baselines_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["gap", "--metrics"]) == 0
    text = capsys.readouterr().out
    assert "train_rollout_logprob_abs_diff" in text
    assert "turns NaN and inf into 0" in text
    assert run(["gap", "--baselines", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["baselines"][0]["name"] == "gb10-qwen3-0.6b"


def test_facts_alone_are_judged(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["gap", "--set", "logprobs_mode=raw", "--set", "top_p=0.9", "--set", "gap=0.011", "--json"]) == 1
    codes = [f["code"] for f in json.loads(capsys.readouterr().out)["sources"][0]["findings"]]
    assert codes[0] == "RAW_LOGPROBS_WITH_TRUNCATION"


def test_a_live_log_is_followed_until_it_leaves_its_range(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "live.log"
    log(path, [0.0145])

    def write() -> None:
        for step, value in enumerate((0.015, 0.0148, 0.0201, 0.0203), start=1):
            time.sleep(0.1)
            with path.open("a") as file:
                line = LINE.format(step, value, 1e-6)
                file.write(line[:20])
                file.flush()
                time.sleep(0.02)
                file.write(line[20:])

    writer = threading.Thread(target=write)
    writer.start()
    code = follow(path, Options(gpu="GB10", model="Qwen3-0.6B"), seconds=20)
    writer.join()
    assert code == 1
    text = capsys.readouterr().err
    assert "in range 0.0136 to 0.0164" in text
    assert "step 4" in text
    assert "out of range" in text


def test_following_ends_when_nothing_comes(tmp_path: Path) -> None:
    path = tmp_path / "live.log"
    log(path, [0.0145, 0.0146])
    assert follow(path, Options(gpu="GB10", model="Qwen3-0.6B"), seconds=0.2) == 0
    path.write_text("nothing yet\n", encoding="utf-8")
    assert follow(path, Options(), seconds=0.2) == 3
    log(path, [0.0, 0.0, 1e-7])
    assert follow(path, Options(), seconds=0.2, contract=True) == 1


def test_the_verbs_never_load_torch(tmp_path: Path) -> None:
    path = log(tmp_path / "a.log", [0.01, 0.011])
    code = (
        "import sys; from zerogap.cli import run; "
        f"run(['gap', {path!r}]); run(['report', {path!r}, '-o', {str(tmp_path / 'r.html')!r}]); "
        "import zerogap.gap; assert 'torch' not in sys.modules; assert 'transformers' not in sys.modules"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr


def test_compare_takes_arrays_rows_and_torch_tensors() -> None:
    rng = np.random.default_rng(0)
    engine = -rng.exponential(1, (4, 30)).astype(np.float32)
    trainer = np.minimum(engine + rng.normal(0, 0.01, engine.shape), 0).astype(np.float32)
    mask = np.ones((4, 30), dtype=bool)
    mask[:, 20:] = False
    whole = compare(engine, trainer, mask=mask)
    rows = compare([r[:20] for r in engine], [r[:20] for r in trainer])
    assert whole.mean == pytest.approx(rows.mean, rel=1e-12)
    assert whole.numbers.masked_out == 40
    assert compare(engine[0], trainer[0]).numbers.compared == 30
    torch = pytest.importorskip("torch")
    tensors = compare(torch.tensor(engine), torch.tensor(trainer).requires_grad_(), mask=torch.tensor(mask))
    assert tensors.numbers.mean_abs == whole.numbers.mean_abs
    half = compare(torch.tensor(engine).bfloat16(), torch.tensor(engine), contract="c")
    assert half.status == "fault"


@pytest.mark.parametrize(
    ("engine", "trainer", "said"),
    [
        (np.zeros((2, 3)), np.zeros((2, 4)), r"logprob_trainer has shape \(2, 4\), logprobs_engine \(2, 3\)"),
        ([[0.0, 0.0]], [[0.0]], "row 0"),
        ([[0.0], [0.0]], [[0.0]], "1 rows"),
    ],
)
def test_shapes_that_differ_are_named(engine: object, trainer: object, said: str) -> None:
    from zerogap.errors import UsageError

    with pytest.raises(UsageError, match=said):
        compare(engine, trainer)
    with pytest.raises(UsageError, match="did you mean 'kept_mass'"):
        compare(np.zeros(2), np.zeros(2), kept_mas=np.ones(2))


def test_a_recorder_writes_what_the_command_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    recorder = Recorder(limit=500)
    for step in range(6):
        engine = -rng.exponential(1, (4, 30)).astype(np.float32)
        recorder.add(engine, np.minimum(engine + rng.normal(0, 0.01, engine.shape), 0), step=step)
    assert recorder.tokens <= 500
    recorder.write(tmp_path / "gap.parquet")
    assert run(["gap", str(tmp_path / "gap.parquet"), "--json"]) == 0
    (series,) = json.loads(capsys.readouterr().out)["sources"][0]["series"]
    assert series["steps"] == [2, 3, 4, 5]


def test_the_reference_page_is_up_to_date() -> None:
    from zerogap.gap.pages import reference_page

    page = Path(__file__).parents[2] / "docs" / "gap-reference.md"
    assert page.read_text(encoding="utf-8") == reference_page(), "run scripts/make_gap_page.py"


def test_the_function_is_not_hidden_by_a_module() -> None:
    """``zerogap.gap.compare`` stays the function after the command's modules were imported."""
    import zerogap.gap
    import zerogap.gap.command

    assert callable(zerogap.gap.compare)


def test_a_binary_file_is_refused_by_its_own_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "run.log"
    source.write_bytes(bytes(range(256)))
    assert run(["gap", str(source)]) == 2
    assert capsys.readouterr().err.startswith(f"zerogap: error: {source}: not a text file")
    assert run(["gap", "--facts", str(source)]) == 2
    assert capsys.readouterr().err.startswith(f"zerogap: error: --facts {source}: not a text file")
