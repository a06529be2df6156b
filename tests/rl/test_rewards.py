import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerogap.errors import UsageError
from zerogap.rl.records import read_records
from zerogap.rl.reward_journal import RewardJournal, score
from zerogap.rl.reward_process import clean_environment
from zerogap.rl.rewards import RewardJob, RewardOutcome, RewardPool, event_counts

pytestmark = pytest.mark.usefixtures("here")
BEHAVE = "sample_rewards:behave"


def job(completion: str, index: int = 0, answer: object = "", **fields: object) -> RewardJob:
    return RewardJob("train", 4, index, 1, "12+34=", completion, answer, fields)


def jobs(*completions: str) -> list[RewardJob]:
    return [job(completion, index) for index, completion in enumerate(completions)]


def pool(function: str = BEHAVE, workers: int = 2, limit: float = 20.0, on_error: float = -0.25) -> RewardPool:
    return RewardPool(function, workers, limit, on_error)


def test_rewards_come_in_the_order_of_the_jobs() -> None:
    with pool("sample_rewards:length", workers=3) as rewards:
        outcomes = rewards.score(jobs(*("x" * size for size in range(300))))
        assert [outcome.value for outcome in outcomes] == [float(size) for size in range(300)]
        assert {outcome.kind for outcome in outcomes} == {"ok"}
        assert rewards.score([]) == []


def test_every_failure_is_a_counted_event_with_the_defined_reward_and_spares_its_neighbours() -> None:
    bad = ["raise", "exit", "die", "killed", "nan", "inf", "none", "text"]
    with pool() as rewards:
        outcomes = rewards.score(jobs(*(item for name in bad for item in (name, "fine"))))
    assert [outcome.kind for outcome in outcomes[::2]] == ["raised"] * 2 + ["died"] * 2 + ["not_finite"] * 4
    assert [outcome.value for outcome in outcomes[::2]] == [-0.25] * 8
    assert [(outcome.kind, outcome.value) for outcome in outcomes[1::2]] == [("ok", 1.0)] * 8
    assert outcomes[0].detail == "ValueError: bad answer"
    assert "code 7" in outcomes[4].detail
    assert "code -9" in outcomes[6].detail
    assert event_counts(outcomes) == {
        "reward/raised": 2,
        "reward/timed_out": 0,
        "reward/not_finite": 4,
        "reward/died": 2,
    }


def test_a_hang_of_any_kind_ends_at_the_limit_and_costs_one_reward(tmp_path: Path) -> None:
    mark = tmp_path / "calls"
    names = ["hang", "fine", "hold", "fine", "stubborn", "stopped", "fine"]
    started = time.monotonic()
    with pool(limit=0.6) as rewards:
        outcomes = rewards.score([job(name, index, mark=str(mark)) for index, name in enumerate(names)])
    assert [outcome.kind for outcome in outcomes] == ["timed_out" if name != "fine" else "ok" for name in names]
    assert all(0.6 <= outcome.seconds < 5 for outcome in outcomes if outcome.kind == "timed_out")
    assert time.monotonic() - started < 30
    assert mark.read_bytes() == b"." * len(names)  # each function call was made once


def test_what_a_reward_started_ends_with_it(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    with pool(limit=1.5) as rewards:
        assert rewards.score([job("child", answer=str(note))])[0].kind == "timed_out"
        assert _gone(int(note.read_text()))


def test_prints_of_a_reward_go_to_the_log_and_cannot_forge_an_answer(tmp_path: Path) -> None:
    log = tmp_path / "rewards.log"
    with pool(workers=1) as rewards:
        rewards.check()
        assert rewards.score(jobs("print"))[0].value == 1.0
        rewards.log_to(log)  # a worker that runs already, then a new one
        outcomes = rewards.score(jobs("print", "die", "print"))
    assert [outcome.value for outcome in outcomes] == [1.0, -0.25, 1.0]
    assert log.read_text().count("noise on stdout") == 2


def test_numbers_of_other_types() -> None:
    with pool(workers=1) as rewards:
        assert [outcome.value for outcome in rewards.score(jobs("true", "numpy"))] == [1.0, 0.5]


def test_workers_have_no_torch_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    monkeypatch.setenv("DATABASE_URL", "postgres://me:hunter2@host/db")
    monkeypatch.setenv("ZEROGAP_TEST_SETTING", "visible")
    with pool(workers=1) as rewards:
        assert [outcome.value for outcome in rewards.score(jobs("torch?", "environment"))] == [0.0, 2.0]


def test_what_a_reward_starts_has_the_search_path_of_the_person(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "mine")
    with pool(workers=1) as rewards:
        assert rewards.score([job("path", answer="mine")])[0].value == 1.0


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "MYPASSWD", "SSH_AUTH_SOCK", "api_key"],
)
def test_secrets_are_dropped_by_name(name: str) -> None:
    assert clean_environment({name: "x", "PATH": "/bin"}) == {"PATH": "/bin"}


@pytest.mark.parametrize("value", ["hf_abcdefghijkl", "ghp_0123456789abcdef", "https://me:pw@host/x"])
def test_secrets_are_dropped_by_value(value: str) -> None:
    assert clean_environment({"SETTING": value, "PATH": "/bin"}) == {"PATH": "/bin"}


def test_harmless_variables_stay() -> None:
    harmless = dict.fromkeys(["PWD", "PATH", "HOME", "TOKENIZERS_PARALLELISM", "KEYBOARD", "MONKEY"], "x")
    harmless |= {"HTTP_PROXY": "http://proxy:3128", "LANG": "sk-SK"}
    assert clean_environment(harmless) == harmless


def test_fields_reach_the_function_that_names_them() -> None:
    call = RewardJob("eval", 0, 0, 0, ({"role": "user", "content": "hi"},), "", 1, {"level": 3, "unasked": 1})
    with pool("sample_rewards:sees_fields", workers=1) as rewards:
        assert rewards.score([call])[0].value == 4.0


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("no_such_module:f", "no module 'no_such_module'"),
        ("sample_rewards:behav", "did you mean 'behave'"),
        ("sample_rewards:NUMBER", "is not a function"),
        ("sample_rewards:two_arguments", "takes 2 positional"),
        ("broken_module:f", "importing 'broken_module' failed: ZeroDivisionError"),
        ("needy_module:f", "needs 'no_such_package_xyz'"),
        ("dying_module:f", "ended while importing"),
    ],
)
def test_a_function_that_cannot_be_had_is_one_line_before_the_run(
    reference: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_module.py").write_text("1 / 0")
    (tmp_path / "needy_module.py").write_text("import no_such_package_xyz")
    (tmp_path / "dying_module.py").write_text("import os; os._exit(1)")
    monkeypatch.syspath_prepend(tmp_path)
    with pool(reference) as rewards, pytest.raises(UsageError, match=words) as caught:
        rewards.check()
    assert "\n" not in str(caught.value)
    assert reference in str(caught.value)


def test_check_then_score() -> None:
    with pool() as rewards:
        rewards.check()
        rewards.check()
        assert rewards.score(jobs("fine"))[0].kind == "ok"


def test_the_journal_replays_recorded_outcomes_and_calls_only_the_rest(tmp_path: Path) -> None:
    mark, path = tmp_path / "calls", tmp_path / "rewards.jsonl"
    first = [job("fine", 0, mark=str(mark)), job("raise", 1, mark=str(mark))]
    with pool() as rewards:
        journal = RewardJournal(path)
        before = score(rewards, journal, first)
        journal.close()
        with path.open("a") as torn:
            torn.write('{"phase": "train", "st')  # as a killed run leaves it
        journal = RewardJournal(path)
        after = score(rewards, journal, [*first, job("fine", 2, mark=str(mark)), job("other", 1, mark=str(mark))])
        journal.close()
    assert [(o.kind, o.value, o.detail) for o in after[:2]] == [(o.kind, o.value, o.detail) for o in before]
    assert [outcome.replayed for outcome in after] == [True, True, False, False]
    assert mark.read_bytes() == b"...."
    assert len(list(read_records(path))) == 4
    assert RewardJournal(path, from_step=5).recorded(first[0]) is None


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_replayed_reward_has_the_same_bits(value: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        journal = RewardJournal(Path(folder) / "rewards.jsonl")
        journal.record([job("x")], [RewardOutcome("ok", value, 0.1)])
        journal.close()
        back = RewardJournal(Path(folder) / "rewards.jsonl").recorded(job("x"))
    assert back is not None
    assert back.value.hex() == value.hex()


_CALLER = """
import sys
from zerogap.rl.rewards import RewardJob, RewardPool
with RewardPool("sample_rewards:behave", 2, 600.0, 0.0) as pool:
    pool.check()
    print("ready", flush=True)
    pool.score([RewardJob("train", 0, i, 0, "", "hang", "") for i in range(4)])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_end_of_the_run_leaves_no_worker(number: signal.Signals) -> None:
    caller = subprocess.Popen(
        [sys.executable, "-c", _CALLER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert caller.stdout is not None
    assert caller.stdout.readline() == b"ready\n"
    deadline = time.monotonic() + 20
    children: list[psutil.Process] = []
    while len(children) < 2 and time.monotonic() < deadline:
        children = psutil.Process(caller.pid).children(recursive=True)
        time.sleep(0.05)
    assert len(children) == 2
    os.kill(caller.pid, number)
    caller.wait(timeout=20)
    assert all(_gone(child.pid) for child in children)


def _gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False
