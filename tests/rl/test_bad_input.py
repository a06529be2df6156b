"""Everything that a person can get wrong: one line, exit code 2, nothing half-written; failing rewards are counted."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_run import QUICKSTART, arguments, error_line, leftovers, train, weights

import zerogap.cli
import zerogap.rl.command
import zerogap.rl.loop
import zerogap.signals
from zerogap.cli import main, run
from zerogap.models.hub import resolve_model
from zerogap.rl.metrics import MetricsWriter
from zerogap.rl.records import read_records
from zerogap.rl.run_folder import LOCK_FILE, FolderLock
from zerogap.threads import thread_count

pytestmark = pytest.mark.usefixtures("here")
EXACT = "task.reward=zerogap.rl.tasks.scoring:exact_match"
GOOD = '{"prompt": "12+34=", "answer": "46"}'


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The command sets the thread count of the process; other tests keep theirs."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def refused(folder: Path, capsys: pytest.CaptureFixture[str], *extra: str, config: Path | str = QUICKSTART) -> str:
    """Run; expect one line and no run folder; return the line."""
    assert train(folder, *extra, config=config) == 2
    assert not folder.exists(), "refused before anything was written"
    return error_line(capsys)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no such file; give a run configuration"),
        (b"\xff\xfe", "is not UTF-8"),
        (b"[run", "is not valid TOML"),
        (b"", "section [run] is missing; it needs dir and steps"),
        (b"[run]\ndir = 3\nsteps = 1\n[model]\npath = 'x'", "run.dir = 3: must be a text"),
        (b"[runn]\n", "no section [runn]; did you mean 'run'?"),
        (b"run = 3", "run must be a table"),
    ],
)
def test_configuration_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, words: str
) -> None:
    path = tmp_path / "run.toml"
    if content is not None:
        path.write_bytes(content)
    assert run(["train", str(path)]) == 2
    line = error_line(capsys)
    assert str(path) in line
    assert words in line


def test_configuration_that_is_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is a folder" in refused(tmp_path / "run", capsys, config=tmp_path)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("nonsense", "must be section.key=value"),
        ("run=3", "must be section.key=value"),
        ("gapp.gate=warn", "did you mean 'gap'"),
        ("rollout.temprature=1", "did you mean 'temperature'"),
        ("train.learning_rate=-1", "must be a number, above 0"),
        ("train.learning_rate=nan", "must be a number, above 0"),
        ("train.learning_rate='fast'", "must be a number"),
        ("train.weight_decay=1e300", "at most 100"),
        ("train.clip_high=1e308", "at most"),
        ("reward.on_error=1e308", "at most"),
        ("rollout.temperature=0", "greedy"),
        ("rollout.temperature=1e-320", "divided by it overflow"),
        ("eval.temperature=1e-320", "divided by it overflow"),
        ("rollout.prompts_per_step=100000000000", "at most 1048576"),
        ("rollout.prompts_per_step=1000000", "sequences per step"),
        ('rollout.stop=["\\ufffd"]', "U+FFFD"),
        ('run.dir="a\\u0000b"', "NUL"),
        ("model.dtype=int8", "'float32'"),
        ("model.dtype=float16", "must be 'float32' or 'bfloat16'"),
        ("engine.kv_bytes=0", "at least 1"),
        ("engine.kv_bytes=1", "KV memory: 0 pages"),
        ("engine.num_pages=1", "one sequence of 12 tokens needs 3 pages"),
        ("engine.num_pages=1000000000000", "memory: the run needs"),
        ("rollout.max_tokens=507", "need 513 positions, the context has 512; lower rollout.max_tokens"),
        ("model.max_positions=5", "the prompt has 6 tokens and the context 5"),
        ("model.max_positions=513", "the model has 512"),
        ("model.path=/nowhere/model", "does not exist"),
        ("model.path=builtin:tiny", "no built-in model 'tiny'"),
        ("model.path=~nobody_of_this_name/x", "home"),
        ("task.reward=no_such_module:f", "no module 'no_such_module'"),
        ("task.rollout=sample_rollouts:nothing", "has no 'nothing'"),
    ],
)
def test_value(tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, words: str) -> None:
    assert words in refused(tmp_path / "run", capsys, override)


def test_evaluation_that_does_not_fit_the_context_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(tmp_path / "run", capsys, "eval.every=1", "eval.max_tokens=507")
    assert "lower eval.max_tokens" in line


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("", "has no prompts"),
        (GOOD + "\n{", ":2: is not JSON"),
        (GOOD + '\n{"prompt": "1+1=", "answer": ' + "9" * 5000 + "}", ":2: holds an integer of thousands of digits"),
        ('{"prompt": "1+1=", "answer": ' + "[" * 900 + "]" * 900 + "}", ":1: is nested too deep"),
        ('{"prompt": "1\\ud800+1=", "answer": "2"}', "half of a surrogate pair"),
        ('{"prompt": "' + "1" * 600 + '", "answer": "2"}', "the prompt has 600 tokens and the context 512"),
    ],
)
def test_data_set(tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: str, words: str) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(lines)
    line = refused(tmp_path / "run", capsys, "task.name=jsonl", f"task.path={data}", EXACT)
    assert words in line
    assert str(data) in line


@pytest.mark.parametrize("path", ["/nowhere.jsonl", "/tmp", "x" * 300])
def test_data_set_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str) -> None:
    assert path[:50] in refused(tmp_path / "run", capsys, "task.name=jsonl", f"task.path={path}", EXACT)


UP = "model.layers.1.mlp.up_proj.weight"
CONFIG = "config.json"


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / "model.safetensors"
        state = load_file(path)
        change(state)
        save_file(state, path, metadata={"format": "pt"})

    return spoil


def values(**changes: object) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / CONFIG
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return spoil


def content(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(data) and None


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100_000])


def small_vocabulary(folder: Path) -> None:
    tensors(lambda s: [s.__setitem__(k, s[k][:4].clone()) for k in s if "embed" in k or "lm_head" in k])(folder)
    values(vocab_size=4)(folder)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (truncate, "is it truncated?"),
        (content("model.safetensors", b""), "is it truncated?"),
        (tensors(lambda s: s[UP].view(-1)[3].fill_(float("nan"))), f"{UP} holds NaN"),
        (tensors(lambda s: s.update({UP: s[UP][1:].clone()})), "has shape [383, 128], config.json asks for [384, 128]"),
        (tensors(lambda s: s.pop(UP)), f"1 tensors are missing, the first is {UP}"),
        (tensors(lambda s: s.update({UP: s[UP].to(torch.int8)})), "quantised"),
        (content(CONFIG, b"{"), "not readable as JSON"),
        (content(CONFIG, b"[]"), "expected a JSON object"),
        (values(model_type="mixtral"), "'mixtral' is not supported"),
        (values(logit_softcap=3.0), "logit_softcap = 3.0 is not known"),
        (values(hidden_size=2**20, intermediate_size=2**22), "memory: the run needs"),
        (values(vocab_size=10**13), "memory: the run needs"),
        (values(rms_norm_eps=float("inf")), "rms_norm_eps must be a positive number"),
        (values(layer_types=5), "layer_types must be a list"),
        (values(tie_word_embeddings="no"), "tie_word_embeddings must be true or false"),
        (values(rope_parameters=[1]), "rope settings must be a JSON object"),
        (values(rope_parameters={"rope_type": ["x"], "rope_theta": 1e4}), "rope type ['x'] is not supported"),
        (values(rope_parameters={"rope_theta": 0}), "rope_theta must be a positive number"),
        (values(rope_parameters={"rope_theta": "x"}), "rope_theta must be a positive number"),
        (values(rope_parameters={"rope_type": "linear", "factor": 0}), "factor must be a positive number"),
        (content("tokenizer.json", b"{}"), "not a readable tokenizer"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer.json"),
        (small_vocabulary, "belong to different models"),
    ],
)
def test_model_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], None], words: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(resolve_model("builtin:tiny-qwen3"), model)
    spoil(model)
    line = refused(tmp_path / "run", capsys, f"model.path={model}")
    assert words in line


@pytest.mark.parametrize("name", ["file", "file/below", "n" * 300, "/proc/nothing/here"])
def test_run_folder_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (tmp_path / "file").write_text("mine")
    assert train(tmp_path / name) == 2
    assert "set another run.dir" in error_line(capsys)
    assert (tmp_path / "file").read_text() == "mine"


def test_run_folder_of_others_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    assert train(tmp_path) == 2
    assert "exists and holds no run but 'thesis.tex'" in error_line(capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_what_a_run_killed_at_its_start_left_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_text("123\n")
    (tmp_path / ".config.toml.abc.tmp").write_text("half")
    assert train(tmp_path) == 0
    assert leftovers(tmp_path) == []


def test_a_second_run_in_the_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path) == 0
    capsys.readouterr()
    other = FolderLock(tmp_path)
    with other:
        other.take()
        assert train(tmp_path, "--resume", "auto", steps=2) == 2
        assert f"a run is at work there (process {os.getpid()})" in error_line(capsys)
    assert train(tmp_path, "--resume", "auto", steps=2) == 0


def test_two_runs_that_begin_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"

    def set_up_beside_another(config: object, resume: str | None) -> object:
        monkeypatch.undo()
        monkeypatch.chdir(Path(__file__).parent)
        assert train(folder) == 0
        capsys.readouterr()
        return set_up(config, resume)

    set_up = zerogap.rl.command.set_up
    monkeypatch.setattr(zerogap.rl.command, "set_up", set_up_beside_another)
    monkeypatch.setattr(zerogap.rl.command, "holds_run", lambda folder: False)
    assert train(folder) == 2
    assert "holds a run already" in error_line(capsys)


@pytest.mark.parametrize(
    ("function", "event"),
    [
        ("raises", "raised"),
        ("raises_megabytes", "raised"),
        ("hangs", "timed_out"),
        ("nan", "not_finite"),
        ("beyond_float32", "not_finite"),
        ("unprintable", "raised"),
        ("killed", "died"),
    ],
)
def test_failing_reward_is_a_counted_event(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], function: str, event: str
) -> None:
    extra = ["rollout.prompts_per_step=2", "rollout.samples_per_prompt=2", "reward.time_limit_s=0.2"]
    assert train(tmp_path / "run", f"task.reward=bad_rewards:{function}", *extra) == 0
    assert capsys.readouterr().err == ""
    (record,) = read_records(tmp_path / "run" / "metrics.jsonl")
    assert record[f"reward/{event}"] == 4
    assert record["reward/mean"] == 0
    assert (tmp_path / "run" / "rewards.jsonl").stat().st_size < 10_000


def test_reward_that_prints_megabytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "run", "task.reward=bad_rewards:prints_megabytes", "--json") == 0
    output = capsys.readouterr()
    assert output.out.count("\n") == 1
    assert output.err == ""
    assert (tmp_path / "run" / "rewards.log").stat().st_size > 10_000_000


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("raises", "raised KeyError: 'boo'"),
        ("exits", "raised SystemExit"),
        ("interrupts", "raised KeyboardInterrupt"),
        ("nothing_at_all", "returned NoneType; it must return a Transcript"),
        ("no_completion", "has no prompt or no completion"),
        ("asks_for_text", "max_tokens: must be 1 or more, not 'x'"),
        ("asks_without_room", "after 512 tokens, the context has 512; end the rollout while context.room"),
        ("wrong_stop", "stop_strings: must be a tuple of texts, not 5"),
        ("wrong_ids", "must be token ids"),
        ("unknown_id", "has token id 1000000000"),
        ("inserts_text", "add_tokens takes token ids"),
        ("inserts_unknown_id", "the vocabulary is 0..63"),
        ("inserts_too_much", "the context 512; end the rollout earlier"),
        ("tampers", "is no float"),
    ],
)
def test_failing_rollout(tmp_path: Path, capsys: pytest.CaptureFixture[str], function: str, words: str) -> None:
    assert train(tmp_path / "run", f"task.rollout=sample_rollouts:{function}") == 2
    assert words in error_line(capsys)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_rollout_that_hangs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "run", "task.rollout=sample_rollouts:hangs", "rollout.time_limit_s=0.3") == 2
    line = error_line(capsys)
    assert "task.rollout on arithmetic:" in line
    assert "over 0.3 s" in line


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert train(folder, steps=2) == 0
    return folder


@pytest.fixture
def old(finished: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may spoil."""
    return Path(shutil.copytree(finished, tmp_path / "old"))


def test_run_folder_that_holds_a_run(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def state() -> list[tuple[Path, int]]:
        return sorted((path, path.stat().st_mtime_ns) for path in old.rglob("*") if path.name != LOCK_FILE)

    before = state()
    assert train(old, steps=2) == 2
    assert "holds a run already; continue it with --resume auto" in error_line(capsys)
    assert state() == before


def put(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(data) and None


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (put("checkpoints/step-000002/model/model.safetensors", b"x"), "was truncated or altered"),
        (lambda old: (old / "checkpoints/step-000002/state.json").unlink(), "state.json is missing"),
        (lambda old: (old / "checkpoints/step-000009").mkdir(), "an older one can be tried: --resume"),
        (put("config.toml", b"x"), "config.toml: is not valid TOML"),
        (put("metrics.jsonl", b'{"step":0}\n{"st\n'), "metrics.jsonl:2: is damaged"),
        (put("metrics.jsonl", b"\xff\xfe\n"), "metrics.jsonl:1: is damaged"),
        (put("metrics.jsonl", b"{}\n"), "it has no step"),
        (put("rewards.jsonl", b'{"step":5}\n'), "a line of step 5 is damaged"),
        (put("rewards.jsonl", b"[]\n"), "rewards.jsonl:1: is damaged"),
    ],
)
def test_damaged_run(old: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], None], words: str) -> None:
    spoil(old)
    assert train(old, "--resume", "auto", steps=3) == 2
    assert words in error_line(capsys)
    assert leftovers(old) == []


def test_torn_last_line_of_the_metrics(old: Path) -> None:
    path = old / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert train(old, "--resume", "auto", steps=3) == 0
    assert [record["step"] for record in read_records(path)] == [0, 2]


def test_strange_names_beside_the_checkpoints(old: Path) -> None:
    (old / "checkpoints" / "step-²").mkdir()
    assert train(old, "--resume", "auto", steps=3) == 0


@pytest.mark.parametrize("where", ["", "nowhere", "/tmp"])
def test_resume_from_what_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str) -> None:
    assert train(tmp_path / "run", "--resume", where) == 2
    assert "no checkpoint in" in error_line(capsys)
    assert not (tmp_path / "run").exists()


def test_resume_with_another_configuration(old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, source in ((old, "auto"), (tmp_path / "new", str(old / "checkpoints" / "step-000002"))):
        assert train(folder, "--resume", source, "train.learning_rate=1e-5", steps=3) == 2
        assert "train.learning_rate: 0.0003, now 1e-05" in error_line(capsys)
    (old / "config.toml").unlink()
    assert train(tmp_path / "new", "--resume", source, "train.learning_rate=1e-5", steps=3) == 2
    assert "belongs to a run of another configuration" in error_line(capsys)


def test_resume_with_another_model_under_the_same_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, folder = tmp_path / "model", tmp_path / "run"
    shutil.copytree(resolve_model("builtin:tiny-qwen3"), model)
    assert train(folder, f"model.path={model}") == 0
    capsys.readouterr()
    values(rms_norm_eps=0.1)(model)
    assert train(folder, f"model.path={model}", "--resume", "auto", steps=2) == 2
    assert "config.json differs" in error_line(capsys)


@pytest.mark.parametrize("asked", ["abc", "-3", "0", "3.5", "1000000", "³"])
def test_thread_counts_that_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: str
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert f"OMP_NUM_THREADS='{asked}'" in refused(tmp_path / "run", capsys)


def test_current_folder_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert "the current folder no longer exists" in refused(tmp_path / "run", capsys)


@pytest.mark.parametrize(("asked", "count"), [("3", 3), ("2,4", 2), (" 5 ", 5)])
def test_thread_counts(monkeypatch: pytest.MonkeyPatch, asked: str, count: int) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert thread_count() == count


def test_limit_of_the_address_space(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 2**28, hard))
    try:
        line = refused(tmp_path / "run", capsys, "engine.num_pages=100000")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert "memory: the run needs" in line


def test_memory_that_runs_out_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(zerogap.rl.loop, "accumulate", lambda *_: torch.empty(2**56))
    assert train(tmp_path / "run") == 2
    assert "the system gave no more" in error_line(capsys)


def test_libraries_that_are_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "zerogap.rl.command", None)
    assert "pip install 'zerogap[train]'" in refused(tmp_path / "run", capsys)


def test_a_fault_of_ours_is_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise AssertionError("a fault")

    monkeypatch.setattr(zerogap.rl.loop, "accumulate", fails)
    monkeypatch.setattr(zerogap.signals, "ignore", lambda: None)
    monkeypatch.setattr(zerogap.cli, "prepare_streams", lambda: None)
    with pytest.raises(SystemExit) as ended:
        main(arguments(tmp_path / "run"))
    assert ended.value.code == 3
    assert "AssertionError: a fault" in capsys.readouterr().err


# A full disk.


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 32 MB, three checkpoints of the tiny model."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(folder)]
    if mount is None or os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a small file system can be mounted by root only")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path, pages: int) -> Path:
    """Leave so many pages of 4 KB."""
    ballast = disk / "ballast"
    free = os.statvfs(disk)
    with ballast.open("wb") as file:
        file.write(bytes((free.f_bavail - pages) * free.f_bsize))
    return ballast


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Weights and moments of a run of two steps that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert train(folder, "run.checkpoint_every=1", steps=2) == 0
    return weights(folder, 2)


# From the lock file over configuration, rewards, metrics, TensorBoard and samples to the parts of a checkpoint.
@pytest.mark.parametrize(
    "pages",
    [0, 4, 7, 3000, *(pytest.param(p, marks=pytest.mark.slow) for p in (1, 2, 3, 5, 6, 9, 11, 13, 20, 1000, 4000))],
)
def test_full_disk(disk: Path, capsys: pytest.CaptureFixture[str], whole: list[bytes], pages: int) -> None:
    ballast, folder = fill(disk, pages), disk / "run"
    assert train(folder, "run.checkpoint_every=1", steps=2) == 2
    line = error_line(capsys)
    assert "No space left" in line or "disk is full" in line
    assert str(folder) in line
    if folder.exists():
        assert leftovers(folder) == []
        for name in ("metrics.jsonl", "rewards.jsonl"):
            list(read_records(folder / name))
        for path in folder.glob("samples/*"):
            assert len(list(read_records(path))) == 16
    ballast.unlink()
    assert train(folder, "run.checkpoint_every=1", "--resume", "auto", steps=2) == 0
    assert weights(folder, 2) == whole


def test_file_size_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        assert train(tmp_path / "run") == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "cannot save checkpoint" in error_line(capsys)
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


@pytest.mark.parametrize("name", ["metrics.jsonl", "rewards.jsonl", "samples", "tensorboard", "checkpoints"])
def test_something_else_under_a_name_of_the_run(old: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    path = old / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if name.endswith("jsonl"):
        path.mkdir()
    else:
        path.write_text("mine")
    assert train(old, "--resume", "auto", steps=3) == 2
    assert name in error_line(capsys)


def test_metrics_after_a_failed_write_close_in_peace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = MetricsWriter(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            writer.write(0, {"gap/mean": 0.0})
        writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# What only a process of its own shows.


def process(folder: Path, *extra: str, environment: dict[str, str] | None = None, **streams: object) -> tuple[int, str]:
    """Run the command in a process of its own; return its exit code and what it wrote on stderr."""
    paths = os.pathsep.join(path for path in sys.path if path)
    ended = subprocess.run(
        [sys.executable, "-m", "zerogap", *arguments(folder, *extra)],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **(environment or {})},
        stderr=subprocess.PIPE,
        timeout=120,
        **streams,  # type: ignore[arg-type]
    )
    return ended.returncode, ended.stderr.decode()


def test_bare_environment_and_strange_folder_and_closed_stdout(tmp_path: Path) -> None:
    """No HOME, no TERM, a narrow terminal, umask 077, ASCII only, and a reader that goes away."""
    folder = tmp_path / "a run ü 日本"
    read, write = os.pipe()
    os.close(read)
    environment = {"COLUMNS": "20", "NO_COLOR": "1", "PYTHONIOENCODING": "ascii"}
    code, error = process(folder, environment=environment, cwd=tmp_path, stdout=write, umask=0o077)
    os.close(write)
    assert code == 0
    assert error == "zerogap: stdout cannot be written (its reader has gone); the run goes on without it\n"
    assert (folder / "metrics.jsonl").stat().st_mode & 0o777 == 0o600
    assert weights(folder, 1)


def test_json_that_cannot_be_written_is_no_verdict(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        code, error = process(tmp_path / "run", "--json", stdout=full)
    assert code == 2
    assert error == "zerogap: error: stdout: cannot be written (No space left on device); give it a place that can\n"


def test_json_prints_nothing_on_stdout_with_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "run", "run.steps=0", "--json") == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
