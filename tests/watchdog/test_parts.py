"""The small parts: numbers in lines, waits, phases, redaction, lint, the machine, probes' addresses."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerogap.errors import UsageError
from zerogap.watchdog.budgets import Budgets
from zerogap.watchdog.lint import flag, lint, restarts_engines, works_elsewhere
from zerogap.watchdog.machine import Gpus, OomCounter, oom_files
from zerogap.watchdog.metrics import backend_down, non_finite, parse_metrics
from zerogap.watchdog.phases import Phases
from zerogap.watchdog.probes import is_own, parse_url, read_counters
from zerogap.watchdog.redact import HIDDEN, redact, redact_argv
from zerogap.watchdog.rules import load_rules
from zerogap.watchdog.waits import circle, group_edges


def test_metrics_of_all_frameworks():
    assert parse_metrics("{'train/loss': 0.5, 'train/grad_norm': nan, 'x': -inf}")["train/loss"] == 0.5
    assert math.isnan(parse_metrics("{'train/grad_norm': nan}")["train/grad_norm"])
    assert parse_metrics("actor/pg_loss:0.1 - actor/grad_norm:1e-3") == {"actor/pg_loss": 0.1, "actor/grad_norm": 1e-3}
    assert parse_metrics("Time: 34.50s | Loss: 0.0123 | Grad. Norm: 0.1000")["Loss"] == 0.0123
    assert parse_metrics("reward=0.61 empty_tool_responses=0.01") == {"reward": 0.61, "empty_tool_responses": 0.01}


@given(st.dictionaries(st.from_regex(r"[a-z]{1,8}/[a-z_]{1,8}", fullmatch=True), st.floats(width=32), max_size=8))
def test_a_python_dict_is_read_back(values):
    read = parse_metrics(repr(values))
    assert read.keys() == values.keys()
    assert all(read[name] == value or math.isnan(value) for name, value in values.items())


def test_only_losses_and_norms_must_be_finite():
    assert non_finite({"train/loss": math.nan, "eval/score": math.nan}) == ["train/loss"]
    assert non_finite({"train/grad_norm": math.inf, "policy_loss": 1.0}) == ["train/grad_norm"]


def test_a_policy_that_collapses_is_no_dead_backend():
    before, dead = {"reward": 0.6, "tool_error_rate": 0.01}, {"reward": 0.1, "tool_error_rate": 0.9}
    assert backend_down(before, dead) == ("tool_error_rate", "reward")
    assert backend_down(before, {"reward": 0.1, "tool_error_rate": 0.02}) is None
    assert backend_down(before, {"reward": 0.6, "tool_error_rate": 0.9}) is None
    assert backend_down({}, dead) is None


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from("abcdef")), max_size=12))
def test_a_circle_is_closed_and_made_of_edges(edges):
    way = circle(edges)
    if way:
        assert way[0] == way[-1]
        assert all(edge in edges for edge in itertools.pairwise(way))
    else:  # no circle: the edges can be sorted
        left = set(edges)
        while left:
            free = [edge for edge in left if all(other[0] != edge[1] for other in left)]
            assert free
            left -= set(free)


def test_groups():
    assert group_edges("src0,eng0", "eng1") == [("src0", "eng1"), ("eng0", "eng1")]


def test_budgets_are_learnt_and_bounded():
    phases = Phases(load_rules().phases, 0.0)
    assert phases.budget() == 1800
    at = 0.0
    for _ in range(4):
        phases.enter("training", at)
        phases.enter("rollout", at + 100)
        at += 200
    phases.enter("training", at)
    assert phases.budget() == 500
    assert phases.name == "training"
    assert not phases.needs_engine


def test_every_time_scales_and_no_count_does():
    half = Budgets().scaled(0.5)
    assert half.exit_s == Budgets().exit_s / 2
    assert half.retries == Budgets().retries
    assert half.scale == 0.5


SECRETS = [
    ("--api-key sk-verysecret", "sk-verysecret"),
    ("--wandb-key=0123456789abcdef", "0123456789abcdef"),
    ("HF_TOKEN=hf_abcdefghijklmnop", "hf_abcdefghijklmnop"),
    ('{"api_key": "s3cr3tvalue"}', "s3cr3tvalue"),
    ("Authorization: Bearer abc.def-123456", "abc.def-123456"),
    ("postgres://user:hunter2@host/db", "hunter2"),
    ("key AKIAABCDEFGHIJKLMNOP end", "AKIAABCDEFGHIJKLMNOP"),
    ("AWS_SECRET_ACCESS_KEY=abc/def+ghi", "abc/def+ghi"),
    ("token eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSM", "eyJzdWIiOiIx"),
    ("ghp_abcdefghijklmnopqrstuvwxyz012345", "ghp_abcdefghij"),
]


@pytest.mark.parametrize(("text", "secret"), SECRETS)
def test_secrets_go(text, secret):
    assert secret not in redact(text)
    assert HIDDEN in redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "--max-tokens 512 --num-tokens=3",
        "new-token: 8192, #token: 4096, token usage: 0.12",
        "tokenizer=Qwen/Qwen3-0.6B",
        "http://127.0.0.1:30000/generate",
        "--total-token-num 100",
    ],
)
def test_what_is_no_secret_stays(text):
    assert redact(text) == text


def test_a_flag_and_its_value_are_two_words():
    assert redact_argv(["train.py", "--hf-token", "abc", "--lr", "1"]) == [
        "train.py",
        "--hf-token",
        HIDDEN,
        "--lr",
        "1",
    ]


def test_lint_reads_the_last_flag_and_looks_into_shells():
    base = ["python3", "train.py", "--use-fault-tolerance"]
    assert lint(base)
    assert lint([*base, "--rollout-health-check-first-wait", "0"])
    assert not lint([*base, "--rollout-health-check-first-wait", "0", "--rollout-health-check-first-wait=600"])
    assert lint(["bash", "-c", " ".join(base)])
    assert not lint(["python3", "train.py"])
    assert restarts_engines(base)
    assert flag(["--a", "--b", "1"], "--a") == ""


def test_commands_that_work_elsewhere():
    for line in (
        ["ssh", "node", "train"],
        ["/usr/bin/docker", "run", "x"],
        ["bash", "-c", "ray job submit -- python x"],
    ):
        assert works_elsewhere(line)
    assert not works_elsewhere(["python", "train.py", "--name", "x"])


def test_oom_counters_of_both_cgroup_versions(tmp_path):
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "7").mkdir(parents=True)
    for text, file in (
        ("0::/job\n", root / "job" / "memory.events"),
        ("4:memory:/job\n", root / "memory/job/memory.oom_control"),
    ):
        (proc / "7" / "cgroup").write_text(text)
        file.parent.mkdir(parents=True)
        file.write_text("low 0\noom_kill 2\n")
        counter = OomCounter(7, root, proc)
        assert counter.known
        assert counter.new() == []
        file.write_text("low 0\noom_kill 3\n")
        assert counter.new() == [(str(file), 1)]
    assert oom_files(8, root, proc) == []


class Nvml:
    """The few NVML calls that are used, of a GB10: memory unknown, utilisation known, one XID waiting."""

    nvmlEventTypeXidCriticalError = 8

    def __init__(self):
        self.xids = [79]
        self.ecc = 0

    def __getattr__(self, name):
        if name.startswith("nvml"):
            return lambda *arguments: None
        raise AttributeError(name)

    def nvmlDeviceGetCount(self):
        return 1

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlEventSetCreate(self):
        return "events"

    def nvmlEventSetWait_v2(self, events, limit):
        if not self.xids:
            raise RuntimeError("timeout")
        return type("Event", (), {"eventData": self.xids.pop()})

    def nvmlDeviceGetTotalEccErrors(self, handle, kind, counter):
        return self.ecc

    def nvmlDeviceGetUtilizationRates(self, handle):
        return type("Rates", (), {"gpu": 96, "memory": 0})

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [type("Process", (), {"pid": 8123, "usedGpuMemory": None})]


def test_gpu_faults_activity_and_holders():
    nvml = Nvml()
    gpus = Gpus(nvml)
    assert gpus.activity() == ((96.0,), (0.0,))
    assert gpus.faults() == ["Xid 79"]
    assert gpus.faults() == []
    nvml.ecc = 1
    assert "ECC" in gpus.faults()[0]
    assert gpus.holders() == [{"gpu": 0, "pid": 8123, "bytes": None}]


def test_a_machine_without_gpus_says_nothing():
    class Broken:
        def nvmlInit(self):
            raise RuntimeError("no driver")

    gpus = Gpus(Broken())
    assert gpus.activity() == ((), ())
    assert gpus.faults() == []
    assert gpus.holders() == []


@pytest.mark.parametrize(
    ("text", "url"),
    [("127.0.0.1:30000", "http://127.0.0.1:30000"), ("https://h:1/x", "https://h:1"), ("[::1]:80", "http://[::1]:80")],
)
def test_addresses(text, url):
    assert parse_url(text) == url


@pytest.mark.parametrize("text", ["", "host", "http://", "http://host", "http://u:p@h:1", "http://h:abc", "h:70000"])
def test_wrong_addresses(text):
    with pytest.raises(UsageError, match="http://host:port"):
        parse_url(text)


def test_only_own_addresses_of_a_log_are_probed():
    assert is_own("http://127.0.0.1:1")
    assert is_own("http://127.8.9.1:1")
    assert is_own("http://localhost:1")
    assert not is_own("http://10.255.255.254:1")
    assert not is_own("http://example.com:1")


def test_counters_are_summed_over_labels():
    text = (
        'sglang:generation_tokens_total{tp_rank="0"} 5.0\nsglang:generation_tokens_total{tp_rank="1"} 7\n'
        '# HELP vllm:x y\nsglang:token_usage 0.28\nvllm:request_success_total{finished_reason="stop"} 1e2\n'
    )
    assert read_counters(text) == {"sglang:generation_tokens_total": 12.0, "vllm:request_success_total": 100.0}
