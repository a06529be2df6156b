"""``zerogap check`` as a person and a program use it: exit codes, JSON, notes, errors of one line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import zerogap
from zerogap.cli import run
from zerogap.contracts.check import check
from zerogap.contracts.report import redacted, store_check
from zerogap.contracts.rules import Verdict
from zerogap.contracts.verdict import how_to_learn
from zerogap.facts.fact import Fact, Facts

MILES = "miles/qwen3-dense-v1"
SOURCE = Path(zerogap.__file__).parents[1]


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = run(["check", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, err = _run(capsys, "--json", *arguments)
    assert err == ""
    body: dict[str, Any] = json.loads(out)
    assert (body["schema"], body["schema_version"], body["exit_code"]) == ("zerogap.check", 1, code)
    assert out == json.dumps(body, sort_keys=True) + "\n", "sorted keys, one object, nothing else"
    return body


def _requirement(body: dict[str, Any], name: str, contract: str = MILES) -> dict[str, Any]:
    found = next(item for item in body["contracts"] if item["name"] == contract)
    row: dict[str, Any] = next(item for item in found["requirements"] if item["name"] == name)
    return row


# -- the seed's case


def test_the_seed_gb10(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _run(capsys, "--gpu", "GB10", "--model", "Qwen3-0.6B", "--contract", MILES)
    assert code == 1
    for words in ("FlashAttention 3", "12.1", "8.0 to 9.0", "SM>=80 and SM<=90", "a normal run, not a bit-exact one"):
        assert words in out
    assert "zerogap/exact" in out
    body = _json(capsys, "--gpu", "GB10", "--model", "Qwen3-0.6B", "--contract", MILES)
    assert _requirement(body, "engine-gpu")["status"] == "no"
    assert _requirement(body, "engine-gpu")["assumed"] == ["gpu.engine.capability"]
    assert "flashinfer" in body["contracts"][0]["instead"]
    offered = [row["contract"] for row in body["contracts"][0]["alternatives"] if row["verdict"] != "no"]
    assert offered[0] == "zerogap/exact"


def test_the_seed_h200_is_unknown_until_the_software_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    base = ("--gpu", "H200", "--model", "Qwen3-4B", "--contract", MILES)
    body = _json(capsys, *base)
    assert body["exit_code"] == 3
    missing = [name for name in body["missing"] if name.startswith("software.")]
    assert {
        "software.sglang",
        "software.flash_attn_3",
        "software.sgl_kernel_fa3",
        "software.miles",
        "software.torch",
    } <= set(missing)
    code, out, _ = _run(capsys, *base)
    assert code == 3
    assert all(name in out for name in missing)
    code, out, _ = _run(capsys, *base, "--stack", "miles-2026-08")
    assert code == 0
    assert "assumed:" in out
    assert "software.flash_attn_3 = 3.0.0" in out
    stated = [
        "software.sglang=0.5.17",
        "software.torch=2.11.0",
        "software.torch_cuda=13.0",
        "software.miles=0.0.2",
        "software.sglang_true_on_policy=true",
        "software.sgl_kernel=0.4.5",
        "software.sgl_kernel_fa3=true",
        "software.flash_attn_3=3.0.0",
        "software.transformers=5.3.0",
        "software.deep_gemm=2.1",
    ]
    code, _, _ = _run(capsys, *base, *(word for text in stated for word in ("--assume", text)))
    assert code == 0
    code, _, _ = _run(capsys, "--gpu", "H200", "--model", "Qwen3-4B")
    assert code == 3, "without a contract, too"
    code, _, _ = _run(capsys, "--gpu", "H200", "--model", "Qwen3-4B", "--stack", "miles-2026-08")
    assert code == 0


def test_the_seed_other_model_and_other_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    body = _json(capsys, "--gpu", "H200", "--model", "Qwen3-8B", "--contract", MILES)
    assert body["exit_code"] == 1
    assert _requirement(body, "model")["status"] == "no"
    body = _json(capsys, "--gpu", "A100", "--model", "Qwen3-4B", "--contract", MILES)
    assert body["exit_code"] == 1
    assert "outside of the documented contract (Hopper)" in _requirement(body, "engine-hopper")["says"]
    body = _json(capsys, "--gpu", "L40S", "--model", "Qwen3-4B", "--contract", MILES)
    assert "no FlashAttention 3 kernel for 8.6 and 8.9" in _requirement(body, "engine-hopper")["says"]


def test_trainer_and_engine_on_different_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    base = ("--model", "Qwen3-4B", "--contract", MILES, "--stack", "miles-2026-08")
    body = _json(capsys, "--gpu", "engine=H20", "--gpu", "trainer=H100", *base)
    assert body["exit_code"] == 0
    assert _requirement(body, "same-gpu")["status"] == "warn"
    assert _json(capsys, "--gpu", "engine=H100", "--gpu", "trainer=B200", *base)["exit_code"] == 1
    assert _json(capsys, "--gpu", "H100", "--gpu", "RTX 4090", *base)["exit_code"] == 1


# -- this machine


def test_this_machine_without_options(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerogap.facts.gpu._nvidia", lambda: ([], "", {}))
    monkeypatch.setattr("zerogap.facts.gpu._amd", lambda: ([], ""))
    monkeypatch.setattr("zerogap.facts.gpu._apple", lambda: ([], ""))
    code, out, _ = _run(capsys)
    assert code == 3
    assert "machine: no GPU" in out
    assert "only zerogap/exact (on the CPU) can hold here" in out
    body = _json(capsys, "--model", "Qwen3-0.6B")
    verdicts = {item["name"]: item["verdict"] for item in body["contracts"]}
    assert {name for name, verdict in verdicts.items() if verdict != "no"} == {"zerogap/exact"}
    assert body["missing"] == ["certificate.holds"]
    assert "measure it there: zerogap certify --model Qwen3-0.6B" in _run(capsys, "--model", "Qwen3-0.6B")[1]
    assert "zerogap certify --model 'my models/one'" in how_to_learn(
        "certificate.holds", Facts({"model.path": Fact("my models/one", "--model")})
    )
    assert "zerogap certify --model FOLDER_OR_NAME" in how_to_learn("certificate.holds", Facts({}))
    assert body["facts"]["zerogap.backend"]["value"] in ("cpu-native", "cpu-portable")
    assert _json(capsys, "--model", "Qwen3-0.6B", "--assume", "certificate.holds=true")["exit_code"] == 0
    assert _json(capsys, "--model", "Qwen3-0.6B", "--assume", "certificate.holds=false")["exit_code"] == 1


# -- launches


LEGACY = (
    "NCCL_ALGO=Ring CUBLAS_WORKSPACE_CONFIG=:4096:8 python3 /root/miles/train.py "
    "--hf-checkpoint /m/Qwen3-4B --train-backend fsdp --sglang-rl-on-policy-target fsdp --sglang-attention-backend fa3 "
    "--attn-implementation flash_attention_3 --true-on-policy-mode "
)
CONTRACT = LEGACY.replace(
    "--sglang-rl-on-policy-target fsdp", "--sglang-true-on-policy-contract qwen3_dense_true_on_policy_v1"
)
TRAPS = {
    "legacy flag": (LEGACY, "contract-flag", "skips the trainer's precision hook"),
    "rollout log-probs": (CONTRACT + "--use-rollout-logprobs", "old-logprobs", "0 by definition"),
    "temperature": (
        CONTRACT + "--recompute-logprobs-via-prefill --rollout-temperature 0.8",
        "temperature",
        "at temperature 1",
    ),
    "earlier attention wins not": (
        CONTRACT + "--attn-implementation flash_attention_2",
        "trainer-attention",
        "flash_attention_2",
    ),
    "asynchronous": (CONTRACT + "--recompute-logprobs-via-prefill --fully-async", "not-async", "refused"),
    "skipped forward": (CONTRACT + "--skip-actor-forward-only", "actor-forward", "refused"),
    "fp16": (CONTRACT + "--fp16", "precision", "float16"),
    "pipeline in the engine": (CONTRACT + "--sglang-pp-size 2", "layout-engine", "pipeline 2"),
    "context parallel FSDP": (CONTRACT + "--context-parallel-size 2", "layout-fsdp", "degree 2"),
    "triton": (CONTRACT + "--sglang-attention-backend triton", "engine-attention", "triton"),
    "not on": (CONTRACT.replace("--true-on-policy-mode ", ""), "mode", "normal run"),
    "evaluation engines": (CONTRACT + "--eval-sglang-attention-backend fa3", "eval-engine-attention", "second"),
}


@pytest.mark.parametrize("title", TRAPS)
def test_traps_of_a_launch(title: str) -> None:
    text, name, words = TRAPS[title]
    gpu = "GB10" if title == "evaluation engines" else "H200"
    report = check(gpu=gpu, launch=text, stack="miles-2026-08")
    assert report.decisive == (MILES,), "the launch asks for it"
    finding = next(item for item in report.judgements[0].findings if item.id == name)
    assert finding.verdict is Verdict.NO
    assert words in finding.says
    assert report.exit_code == 1


def test_a_launch_that_keeps_the_contract() -> None:
    report = check(gpu="H200", launch=CONTRACT, stack="miles-2026-08")
    assert [
        item.id for item in report.judgements[0].findings if item.verdict is not Verdict.YES and item.level == "require"
    ] == []
    assert report
    assert report.exit_code == 0
    rescored = check(gpu="H200", launch=CONTRACT + "--recompute-logprobs-via-prefill", stack="miles-2026-08")
    warning = next(item for item in rescored.judgements[0].findings if item.id == "rescored")
    assert "decode, which sampled the tokens" in warning.says
    assert rescored.exit_code == 0, "a warning changes no verdict"


def test_a_launch_on_the_gb10_names_the_assertion() -> None:
    report = check(gpu="GB10", launch=CONTRACT, stack="miles-2026-08")
    prints = {item.prints for item in report.judgements[0].findings if item.verdict is Verdict.NO}
    assert any("FlashAttention v3 Backend requires SM>=80 and SM<=90" in text for text in prints)


def test_fixes_are_what_the_checker_accepts() -> None:
    report = check(gpu="H200", launch=LEGACY, stack="miles-2026-08")
    finding = next(item for item in report.judgements[0].findings if item.id == "contract-flag")
    assert "--sglang-true-on-policy-contract qwen3_dense_true_on_policy_v1" in finding.hint
    on_gb10 = check(gpu="GB10", launch=CONTRACT, stack="miles-2026-08", contracts=MILES)
    for item in on_gb10.judgements[0].findings:
        assert "--attention-backend triton" not in item.hint, "Triton would break the contract, so it is no fix"


def test_a_launch_that_asks_for_nothing() -> None:
    report = check(gpu="H200", launch="python3 /root/miles/train.py --train-backend fsdp --hf-checkpoint /m/Qwen3-4B")
    assert report.exit_code == 1
    report = check(gpu="H200", launch="trl grpo --model_name_or_path Qwen/Qwen3-4B")
    assert any("asks for no promise" in note for note in report.notes)
    assert report.exit_code == 1


def test_a_hidden_value_is_unknown_and_named() -> None:
    report = check(
        gpu="H200",
        launch=CONTRACT + "--rollout-temperature ${T:-1} --recompute-logprobs-via-prefill",
        stack="miles-2026-08",
    )
    assert report.exit_code == 3
    assert report.missing == ("rollout.temperature",)
    finding = next(item for item in report.judgements[0].findings if item.id == "temperature")
    assert "${T:-1}" in finding.missing["rollout.temperature"]


def test_a_hidden_model_is_named() -> None:
    report = check(gpu="H200", launch=CONTRACT.replace("/m/Qwen3-4B", "${MODEL}"), stack="miles-2026-08")
    assert report.exit_code == 3
    finding = next(item for item in report.judgements[0].findings if item.id == "model")
    assert "${MODEL}" in finding.missing["model.name"]


def test_duplicate_flags_are_told() -> None:
    report = check(gpu="H200", launch=CONTRACT + "--sglang-attention-backend fa3 --sglang-attention-backend triton")
    assert any("the last wins over" in note for note in report.notes)


# -- against a log


def test_against_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "run.log"
    log.write_text(
        "server_args=ServerArgs(model_path='/m/Qwen3-4B', attention_backend='triton', "
        "enable_deterministic_inference=True, "
        "true_on_policy_contract='qwen3_dense_true_on_policy_v1', tp_size=1, dtype='auto')\n"
    )
    body = _json(capsys, "--gpu", "H200", "--stack", "miles-2026-08", "--against", str(log), "--", *CONTRACT.split())
    assert body["exit_code"] == 1
    assert [(row["fact"], row["planned"], row["resolved"]) for row in body["differences"]] == [
        ("engine.attention_backend", "fa3", "triton")
    ]
    log.write_text(log.read_text().replace("'triton'", "'fa3'"))
    body = _json(capsys, "--gpu", "H200", "--stack", "miles-2026-08", "--against", str(log), "--", *CONTRACT.split())
    assert (body["differences"], body["exit_code"]) == ([], 0)
    assert body["compared"] > 5
    log.write_text("nothing of interest\n")
    assert _run(capsys, "--against", str(log))[0] == 2


# -- only, list, collect, explain


def test_only(capsys: pytest.CaptureFixture[str]) -> None:
    base = ("--gpu", "GB10", "--model", "Qwen3-4B", "--contract", MILES)
    body = _json(capsys, *base, "--only", "model")
    assert body["exit_code"] == 0
    assert [item["name"] for item in body["contracts"][0]["requirements"]] == ["model"]
    assert _json(capsys, *base, "--only", "engine-gpu")["exit_code"] == 1
    code, _, err = _run(capsys, *base, "--only", "engine-gpus")
    assert code == 2
    assert "did you mean 'engine-gpu'" in err


def test_only_a_fault(capsys: pytest.CaptureFixture[str]) -> None:
    base = ("--gpu", "H100", "--assume", "probe.seed_ignored=/v1/completions")
    assert _json(capsys, *base, "--only", "SEED_IGNORED")["exit_code"] == 1, "a warning that is asked about decides"
    assert _json(capsys, "--gpu", "H100", "--only", "SEED_IGNORED")["exit_code"] == 0
    assert _json(capsys, *base)["exit_code"] == 3


def test_recheck_commands_give_the_same_answer(capsys: pytest.CaptureFixture[str]) -> None:
    import shlex

    body = _json(capsys, "--gpu", "GB10", "--model", "Qwen3-0.6B", "--contract", MILES)
    for row in body["contracts"][0]["requirements"]:
        words = shlex.split(row["recheck"])
        assert words[:2] == ["zerogap", "check"]
        again = _json(capsys, *words[2:])
        assert again["contracts"][0]["requirements"][0]["status"] == row["status"]


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _run(capsys, "--list")
    assert code == 0
    assert MILES in out
    code, out, _ = _run(capsys, "--list", "--json")
    assert {row["name"] for row in json.loads(out)["contracts"]} >= {MILES, "zerogap/exact"}


def test_collect_and_check_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _run(capsys, "--collect")
    assert code == 0
    file = tmp_path / "facts.json"
    file.write_text(out)
    body = _json(capsys, "--facts", str(file), "--model", "Qwen3-0.6B")
    here = _json(capsys, "--model", "Qwen3-0.6B")
    assert {item["name"]: item["verdict"] for item in body["contracts"]} == {
        item["name"]: item["verdict"] for item in here["contracts"]
    }
    assert body["facts"]["software.python"]["source"].startswith("facts.json: ")
    assert _run(capsys, "--collect", "--gpu", "H100")[0] == 2


def test_explain_shows_evidence_and_sources(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = _run(
        capsys, "--gpu", "H200", "--model", "Qwen3-4B", "--contract", MILES, "--stack", "miles-2026-08", "--explain"
    )
    assert "yes     engine-gpu" in out
    assert "read in:" in out
    assert "recheck:" in out
    assert "(assumed: software.flash_attn_3)" in out


# -- wrong input


WRONG = [
    (["--gpu", "H10"], "did you mean 'H100'"),
    (["--gpu", ""], "--gpu"),
    (["--contract", "miles/qwen3"], "did you mean 'miles/qwen3-dense-v1'"),
    (["--assume", "software.flash_atn_3=3"], "did you mean 'software.flash_attn_3'"),
    (["--assume", "engine.tp=two"], "engine.tp is a integer"),
    (["--assume", "x"], "FACT=VALUE"),
    (["--stack", "miles"], "known are miles-2026-08"),
    (["--python", "/nowhere/python"], "no such file"),
    (["--facts", "/nowhere.json"], "/nowhere.json"),
    (["--launch", "/nowhere.sh"], "no such file"),
    (["--launch", "/"], "no such file"),
    (["--model", "./nowhere"], "no model folder"),
    (["--model", ""], "--model"),
    (["--contracts", "/nowhere"], "no such folder"),
    (["--against", "/nowhere.log"], "no such file"),
    (["--only", "nothing"], "--only"),
    (["GB10"], "GB10"),
    (["--gpus", "H100"], "--gpus"),
    (["--launch", "/etc/hostname", "--", "vllm", "serve", "m"], "once"),
    (["--", "echo", "hello"], "'echo'"),
    (["--gpu", "a\nb"], "--gpu"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=[" ".join(row[0]) for row in WRONG])
def test_wrong_input_gives_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = _run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert words in err
    assert len(err.strip().splitlines()) == 1
    assert "Traceback" not in err


def test_text_of_a_launch_is_inert_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = _run(
        capsys,
        "--gpu",
        "H200",
        "--",
        "python",
        "train.py",
        "--train-backend",
        "fsdp",
        "--hf-checkpoint",
        "x\x1b[31m/Qwen3-4B\x1b]0;t\x07",
        "--sglang-attention-backend",
        "\x1b[2J",
        "--explain",
        "--true-on-policy-mode",
    )
    assert "\x1b" not in out
    assert "\x07" not in out


def test_a_terminal_gets_colours_and_wrapped_lines() -> None:
    from io import StringIO

    from rich.console import Console

    from zerogap.contracts.schema import built_in
    from zerogap.contracts.show import print_contracts, print_report

    for explain in (False, True):
        screen = StringIO()
        console = Console(file=screen, force_terminal=True, width=80, markup=False, highlight=False)
        print_report(check(gpu="GB10", model="Qwen3-0.6B", contracts=MILES), console, explain=explain)
        print_report(check(gpu="GB10"), console, explain=explain)
        print_contracts(built_in(), console)
        lines = re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue()).split("\n")
        assert max(len(line) for line in lines) <= 80
        assert "\x1b[1;31m" in screen.getvalue()


def test_secrets_are_redacted(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "env",
        "HF_TOKEN=hf_abc",
        "ray",
        "job",
        "submit",
        '--runtime-env-json={"env_vars": {"WANDB_API_KEY": "abc123"}}',
        "--",
        "python",
        "train.py",
        "--train-backend",
        "fsdp",
        "--wandb-key",
        "abc123",
        "--input-key",
        "prompt",
        "--max-tokens-per-gpu",
        "9216",
        "--true-on-policy-mode",
    ]
    _, out, err = _run(capsys, "--gpu", "H200", "--json", "--", *words)
    assert "abc123" not in out + err
    assert "hf_abc" not in out + err
    shown = redacted(words)
    assert shown[shown.index("--wandb-key") + 1] == "***"
    assert shown[shown.index("--input-key") + 1] == "prompt"
    assert shown[shown.index("--max-tokens-per-gpu") + 1] == "9216"


# -- as a library, and without torch


def test_the_library_call_and_its_stored_report(tmp_path: Path) -> None:
    report = zerogap.check(model="Qwen3-4B", gpu="GB10", contracts=MILES)
    assert not report
    assert report.exit_code == 1
    path = store_check(report, tmp_path)
    assert json.loads(path.read_text())["verdict"] == "no"
    assert [item.name for item in tmp_path.iterdir()] == ["check.json"]
    with pytest.raises(AttributeError):
        zerogap.nothing  # noqa: B018


PROBE = """
import sys
for name in ("torch", "transformers", "safetensors", "tokenizers", "huggingface_hub"):
    sys.modules[name] = None          # as if it were not installed
from zerogap.cli import run
code = run(["check", *sys.argv[1:]])
heavy = ("torch", "transformers", "pyarrow", "matplotlib", "numpy")
loaded = [name for name in heavy if sys.modules.get(name) is not None]
print(loaded, file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize("arguments", [["--gpu", "GB10", "--model", "Qwen3-4B"], [], ["--collect"]])
def test_no_torch_is_imported_or_needed(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    assert done.returncode in (0, 3)
    assert done.stderr.strip() == "[]"


PEAK = """
from zerogap.cli import run
run(["check", "--gpu", "GB10", "--model", "Qwen3-4B"])
import re, sys
print(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1], file=sys.stderr)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
def test_memory_stays_small() -> None:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, "-c", PEAK], capture_output=True, text=True, timeout=60, check=True, env=environment
    )
    assert int(done.stderr) < 80 * 1024, "80 MB"


def test_the_bash_guard(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    zerogap_here = f"{sys.executable} -m zerogap"
    script.write_text(
        f'#!/bin/bash\n{zerogap_here} check --gpu GB10 --launch "$0" >/dev/null || exit 1\ntouch started\n'
        f"{CONTRACT.replace('python3 /root', 'echo /root')}\n"
    )
    done = subprocess.run(
        ["bash", str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    assert done.returncode == 1
    assert done.stderr == ""
    assert not (tmp_path / "started").exists()
