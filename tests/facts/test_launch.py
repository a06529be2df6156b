"""Launch commands in every dialect; what only a run would tell is unknown, and nothing is run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zerogap.errors import UsageError
from zerogap.facts.fact import EachOf, Facts
from zerogap.facts.launch import read_command, read_launch, read_text

MILES_SH = """#!/usr/bin/env bash
set -euxo pipefail
pkill -9 sglang || true
export PYTHONUNBUFFERED=1
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
NVLINK=$(nvidia-smi topo -m | grep -c NV)
if [ "$NVLINK" -gt 0 ]; then HAS_NVLINK=1; else HAS_NVLINK=0; fi

CKPT_ARGS=(
   --hf-checkpoint /root/Qwen3-4B   # the trained model
   --ref-load "/root/my models/Qwen3-4B"
)
ROLLOUT_ARGS=( --rollout-temperature 1 --rollout-batch-size 32 --rollout-shuffle )
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 2
   --sglang-attention-backend fa3
   --sglang-enable-deterministic-inference
   --sglang-true-on-policy-contract qwen3_dense_true_on_policy_v1
   # --sglang-disable-radix-cache
)
TRAIN_ARGS=(
   --train-backend fsdp
   --attn-implementation flash_attention_2
   --true-on-policy-mode --recompute-logprobs-via-prefill --deterministic-mode
)
TRAIN_ARGS+=( --attn-implementation flash_attention_3 )
ENV_JSON="{
  \\"env_vars\\": {
    \\"PYTHONPATH\\": \\"/root/Megatron-LM/:${HERE}\\",
    \\"NCCL_ALGO\\": \\"Ring\\",
    \\"CUBLAS_WORKSPACE_CONFIG\\": \\":4096:8\\",
    \\"HAS_NVLINK\\": \\"${HAS_NVLINK}\\"
  }
}"
ray start --head --num-gpus 8
ray job submit --address="http://127.0.0.1:8265" \\
   --runtime-env-json="${ENV_JSON}" \\
   -- python3 train.py --colocate \\
   ${CKPT_ARGS[@]} "${ROLLOUT_ARGS[@]}" ${SGLANG_ARGS[@]} ${TRAIN_ARGS[@]} \\
   --wandb-key ${WANDB_API_KEY} "$@" 2>&1 | tee run.log
"""


def _value(facts: Facts, name: str) -> object:
    return facts[name].value if name in facts else f"unknown: {facts.unknown.get(name)}"


def _check(facts: Facts, **wanted: object) -> None:
    got = {name: _value(facts, name.replace("__", ".")) for name in wanted}
    assert got == wanted


def test_miles_bash_with_arrays(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(MILES_SH)
    facts = read_launch(script)
    _check(
        facts,
        launch__framework="miles",
        engine__kind="sglang",
        engine__attention_backend="fa3",
        engine__deterministic=True,
        engine__contract="qwen3_dense_true_on_policy_v1",
        engine__tp=2,
        engine__prefill_only_deterministic=True,
        engine__prefix_cache=True,
        engine__model="/root/Qwen3-4B",
        trainer__backend="fsdp",
        trainer__attention="flash_attention_3",
        trainer__true_on_policy=True,
        trainer__use_rollout_logprobs=False,
        rollout__temperature=1.0,
        env__NCCL_ALGO="Ring",
        env__CUBLAS_WORKSPACE_CONFIG=":4096:8",
    )
    lines = MILES_SH.split("\n")
    first, last = (index for index, line in enumerate(lines, 1) if "--attn-implementation" in line)
    assert facts["trainer.attention"].source.startswith(f"run.sh line {last}: ")
    assert f"the last wins over flash_attention_2 (run.sh line {first})" in facts["trainer.attention"].source
    backend = next(index for index, line in enumerate(lines, 1) if "fa3" in line)
    assert facts["engine.attention_backend"].source.startswith(f"run.sh line {backend}: ")


def test_the_earlier_of_two_flags_does_not_count() -> None:
    facts = read_text("python train.py --train-backend fsdp --rollout-temperature 0.8 --rollout-temperature=1.0")
    _check(facts, rollout__temperature=1.0)
    assert "0.8" in facts["rollout.temperature"].source


def test_exec_line_of_a_log() -> None:
    log = (
        "(RolloutManager pid=7) [2026-10-17 21:03:01.123 main] x.py:1 - starting\n"
        "\x1b[36m(main pid=9)\x1b[0m [2026-10-17 21:03:02] exec_command.py:18 - EXEC: pkill -9 sglang; true\n"
        "[2026-10-17 21:03:03.001 main] exec_command.py:19 - EXEC: export A=1 && ray job submit "
        '--runtime-env-json=\'{"env_vars": {"NCCL_ALGO": "allreduce:tree"}}\' -- python3 /root/miles/train.py '
        "--hf-checkpoint /m/Qwen3-0.6B --train-backend fsdp --sglang-rl-on-policy-target fsdp\n"
        "  --sglang-attention-backend fa3 \\\n"
        "[2026-10-17 21:04:00] other line --sglang-attention-backend triton\n"
    )
    facts = read_text(log, "run.log")
    _check(
        facts,
        launch__framework="miles",
        engine__rl_on_policy_target="fsdp",
        engine__deterministic=True,
        engine__attention_backend="fa3",
        engine__contract="none",
        env__NCCL_ALGO="allreduce:tree",
    )


def test_argv_after_train_py() -> None:
    facts = read_command(
        [
            "python3",
            "train.py",
            "--hf-checkpoint",
            "/m/Qwen3-4B",
            "--train-backend",
            "megatron",
            "--bf16",
            "--context-parallel-size",
            "4",
            "--cp-comm-type",
            "a2a",
            "--true-on-policy-mode",
        ]
    )
    _check(facts, trainer__backend="megatron", trainer__cp=4, trainer__cp_comm_type="a2a", trainer__true_on_policy=True)
    _check(facts, engine__deterministic=True, trainer__dtype="bfloat16", launch__framework="miles")


def test_sglang_server_arguments_of_a_log() -> None:
    line = (
        "[2026-03-12 08:21:25] INFO engine.py:177: server_args=ServerArgs(model_path='Qwen/Qwen3-4B', "
        "attention_backend='flashinfer', decode_attention_backend=None, enable_deterministic_inference=True, "
        "tokenizer_path='x', disable_radix_cache=True, tp_size=4, speculative_algorithm=None, "
        "rl_on_policy_target=None, cuda_graph_bs=[1, 2, 4], "
        "preferred={'a': (1, 2)}, kv_cache_dtype='auto')"
    )
    facts = read_text(line, "engine.log")
    _check(
        facts,
        launch__framework="sglang",
        engine__kind="sglang",
        engine__attention_backend="flashinfer",
        engine__decode_attention_backend="unset",
        engine__deterministic=True,
        engine__prefix_cache=False,
        engine__tp=4,
        engine__speculative="none",
        engine__rl_on_policy_target="none",
    )
    assert facts["engine.tp"].source == "engine.log line 1: --tp-size 4"


def test_several_engines_of_a_log_stand_side_by_side() -> None:
    line = "(SGLangEngine pid={}) server_args=ServerArgs(model_path='m', attention_backend='{}', tp_size=2)\n"
    facts = read_text(line.format(1, "fa3") + line.format(2, "triton") + line.format(3, "fa3"), "run.log")
    assert facts["engine.attention_backend"].value == EachOf(("fa3", "triton"))
    assert facts["engine.tp"].value == 2


def test_vllm_engine_lines_of_a_log() -> None:
    log = (
        "(APIServer pid=1) INFO 06-01 21:51:24 [utils.py:278] non-default args: {'model_tag': 'Qwen/Qwen3-8B', "
        "'compilation_config': {'mode': <CompilationMode.VLLM_COMPILE: 3>, 'pass_config': {'enable_sp': True}}, "
        "'tensor_parallel_size': 4, 'attention_backend': 'TRITON_ATTN'}\n"
        "(EngineCore pid=2) INFO 06-01 21:51:30 [core.py:74] Initializing a V1 LLM engine (v0.32.0) with config: "
        "model='Qwen/Qwen3-8B', dtype=torch.bfloat16, tensor_parallel_size=4, quantization=None, kv_cache_dtype=auto, "
        "enable_prefix_caching=True, compilation_config={'pass_config': {'fuse_allreduce_rms': False}}\n"
    )
    facts = read_text(log, "vllm.log")
    _check(
        facts,
        engine__kind="vllm",
        engine__tp=4,
        engine__attention_backend="TRITON_ATTN",
        engine__sequence_parallel=True,
        engine__dtype="bfloat16",
        engine__fuse_allreduce_rms=False,
        software__vllm="0.32.0",
    )
    assert "engine.deterministic" not in facts, "the environment of the engine is not in the log"


def test_vllm_command() -> None:
    facts = read_command(
        [
            "env",
            "VLLM_BATCH_INVARIANT=1",
            "/opt/v/bin/vllm",
            "serve",
            "Qwen/Qwen3-8B",
            "-tp",
            "2",
            "--compilation-config.pass_config.fuse_allreduce_rms=false",
            "--no-enable-prefix-caching",
        ]
    )
    _check(
        facts, engine__deterministic=True, engine__tp=2, engine__fuse_allreduce_rms=False, engine__prefix_cache=False
    )
    _check(facts, engine__model="Qwen/Qwen3-8B", env__VLLM_BATCH_INVARIANT="1")


def test_vllm_image() -> None:
    facts = read_text(
        "docker run --gpus all -e VLLM_BATCH_INVARIANT=1 vllm/vllm-openai:v0.32.0 --model Qwen/Qwen3-8B -tp 2"
    )
    _check(facts, engine__kind="vllm", engine__deterministic=True, engine__model="Qwen/Qwen3-8B", engine__tp=2)


def test_trl_yaml_and_command(tmp_path: Path) -> None:
    config = tmp_path / "grpo.yaml"
    config.write_text(
        "model_name_or_path: Qwen/Qwen3-0.6B\nuse_vllm: true\nvllm_mode: colocate\nbf16: true\n"
        "temperature: 0.7\ntop_k: 20\n"
    )
    facts = read_launch(config)
    _check(
        facts,
        launch__framework="trl",
        engine__kind="vllm",
        rollout__temperature=0.7,
        rollout__top_k=20,
        rollout__top_p=1.0,
    )
    _check(facts, trainer__dtype="bfloat16", engine__model="Qwen/Qwen3-0.6B")
    script = tmp_path / "run.sh"
    script.write_text(f"accelerate launch -m x trl grpo --config {config.name} --temperature 1.0\n")
    facts = read_launch(script)
    _check(facts, launch__framework="trl", engine__kind="vllm", rollout__temperature=1.0, rollout__top_k=20)
    script.write_text("trl grpo --config elsewhere.yaml --temperature 1.0\n")
    facts = read_launch(script)
    _check(facts, rollout__temperature=1.0)
    assert "elsewhere.yaml" in facts.unknown["rollout.top_k"]


def test_trl_by_its_flags() -> None:
    facts = read_text(
        "accelerate launch train_grpo.py --use_vllm true --vllm_mode server "
        "--attn_implementation kernels-community/vllm-flash-attn3"
    )
    _check(facts, launch__framework="trl", engine__kind="vllm", trainer__attention="kernels-community/vllm-flash-attn3")


def test_verl_overrides() -> None:
    facts = read_text(
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\\n"
        "  actor_rollout_ref.model.path=Qwen/Qwen3-4B-Base actor_rollout_ref.actor.strategy=fsdp2 \\\n"
        '  "actor_rollout_ref.rollout.name=sglang" actor_rollout_ref.rollout.tensor_model_parallel_size=4 \\\n'
        "  actor_rollout_ref.rollout.temperature=0.6 ++actor_rollout_ref.rollout.top_p=0.9 \\\n"
        "  +actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=fa3\n"
    )
    _check(
        facts,
        launch__framework="verl",
        engine__kind="sglang",
        engine__tp=4,
        engine__attention_backend="fa3",
        engine__model="Qwen/Qwen3-4B-Base",
        trainer__backend="fsdp",
        rollout__temperature=0.6,
        rollout__top_p=0.9,
    )


def test_verl_configuration_file(tmp_path: Path) -> None:
    config = tmp_path / "ppo.yaml"
    config.write_text("actor_rollout_ref:\n  rollout: {name: vllm, temperature: 1.0}\n  model: {path: x/Qwen3-4B}\n")
    _check(read_launch(config), launch__framework="verl", engine__kind="vllm", rollout__temperature=1.0)


def test_snapshots_of_launches() -> None:
    blocks = (
        '### 0\npkill -9 sglang; true\n\n### 1\nexport X=1 && ray job submit\n  --address="http://127.0.0.1:8265"\n'
        '  --runtime-env-json=\'{"env_vars": {"NCCL_ALGO": "Ring"}}\'\n  -- python3 <REPO_ROOT>/train.py \n'
        "  --hf-checkpoint /root/models/Qwen3-4B \n  --train-backend fsdp\n  --sglang-attention-backend fa3\n"
    )
    _check(read_text(blocks, "execute.txt"), engine__attention_backend="fa3", env__NCCL_ALGO="Ring")
    listed = ("ray", "job", "submit", "--", "python3", "train.py", "--train-backend", "fsdp", "--rollout-top-p", "0.9")
    words = "# returncode: 0\n\n### 0\n" + "\n".join(f'"{word}"' for word in listed)
    _check(read_text(words, "x.sh.txt"), trainer__backend="fsdp", rollout__top_p=0.9)


def test_server_groups_are_resolved(tmp_path: Path) -> None:
    (tmp_path / "groups.yaml").write_text(
        "sglang:\n  - name: actor\n    update_weights: true\n    server_groups:\n"
        "      - {worker_type: prefill, num_gpus: 4, overrides: {attention_backend: fa3}}\n"
        "      - {worker_type: decode, num_gpus: 4, overrides: {attention_backend: triton, tp_size: 2}}\n"
        "  - name: reward\n    update_weights: false\n    server_groups:\n"
        "      - {worker_type: regular, overrides: {attention_backend: flashinfer}}\n"
    )
    script = tmp_path / "run.sh"
    script.write_text(
        "python train.py --train-backend fsdp --sglang-attention-backend fa3 --sglang-config groups.yaml\n"
    )
    facts = read_launch(script)
    assert facts["engine.attention_backend"].value == EachOf(("fa3", "triton"))
    assert "only some of them" in facts.unknown["engine.tp"]
    script.write_text(
        "python train.py --train-backend fsdp --sglang-attention-backend fa3 --sglang-config ${WHERE}/g.yaml\n"
    )
    assert "not read" in read_launch(script).unknown["engine.attention_backend"]


def test_evaluation_engines_are_a_second_set() -> None:
    facts = read_text(
        "python train.py --train-backend fsdp --sglang-attention-backend triton --eval-sglang-attention-backend fa3"
    )
    _check(facts, engine__attention_backend="triton", eval_engine__attention_backend="fa3")


HIDDEN = {
    "default of a variable": ("T=${T:-1}\npython train.py --train-backend fsdp --rollout-temperature $T", "${T:-1}"),
    "variable that nothing sets": ("python train.py --train-backend fsdp --rollout-temperature $T", "$T"),
    "command substitution": ("python train.py --train-backend fsdp --rollout-temperature $(cat t)", "$(cat t)"),
    "back quotes": ("python train.py --train-backend fsdp --rollout-temperature `cat t`", "`…`"),
    "set under a condition": (
        "T=1\nif true; then T=2; fi\npython train.py --train-backend fsdp --rollout-temperature $T",
        "condition",
    ),
    "set after &&": (
        "T=1\n[ -f x ] && T=2\npython train.py --train-backend fsdp --rollout-temperature $T",
        "condition",
    ),
    "loop variable": (
        "for T in 1 2; do\npython train.py --train-backend fsdp --rollout-temperature $T\ndone",
        "loop variable T",
    ),
    "read from a file": ("read T < x\npython train.py --train-backend fsdp --rollout-temperature $T", "read"),
    "eval": ('T=1\neval "$X"\npython train.py --train-backend fsdp --rollout-temperature $T', "eval"),
    "a source that is not there": (
        "T=1\nsource other.sh\npython train.py --train-backend fsdp --rollout-temperature $T",
        "source",
    ),
    "an array that is not there": ("python train.py --train-backend fsdp ${A[@]}", "${A[@]}"),
    "an array set under a condition": (
        "if x; then A=(--rollout-temperature 2); fi\npython train.py --train-backend fsdp ${A[@]}",
        "array A",
    ),
    "words after it": ("python train.py --train-backend fsdp --rollout-temperature 1 ${EXTRA_ARGS}", "${EXTRA_ARGS}"),
    "a quoted word in the place of a flag": (
        'python train.py --train-backend fsdp --rollout-temperature 1 "$X"',
        "$X",
    ),
    "the first word": ("python train.py $X --train-backend fsdp", "$X"),
    "not a number": ("python train.py --train-backend fsdp --rollout-temperature warm", "number"),
    "no value": ("python train.py --train-backend fsdp --rollout-temperature", "no value"),
    "pattern expansion": ("T=1.0x\npython train.py --train-backend fsdp --rollout-temperature ${T%x}", "${T%x}"),
    "arithmetic": ("python train.py --train-backend fsdp --rollout-temperature $((1+1))", "$((1+1))"),
    "two commands that differ": (
        "python train.py --train-backend fsdp --rollout-temperature 1\n"
        "python train.py --train-backend fsdp --rollout-temperature 2",
        "differ",
    ),
}


@pytest.mark.parametrize("title", HIDDEN)
def test_what_only_a_run_would_tell_is_unknown(title: str) -> None:
    text, reason = HIDDEN[title]
    facts = read_text(text, "run.sh")
    assert "rollout.temperature" not in facts
    assert reason in facts.unknown["rollout.temperature"]


def test_flags_that_no_array_hides_are_known() -> None:
    facts = read_text("python train.py ${MODEL_ARGS[@]} --train-backend fsdp --rollout-temperature 1")
    _check(facts, trainer__backend="fsdp", rollout__temperature=1.0)
    assert "${MODEL_ARGS[@]}" in facts.unknown["trainer.use_rollout_logprobs"], "it may hold any flag"


def test_a_further_value_of_a_flag_hides_no_flags() -> None:
    facts = read_text(
        "python train.py --train-backend fsdp --eval-prompt-data aime $DATA --load ${DIR}/x --rollout-temperature 1"
    )
    _check(facts, trainer__use_rollout_logprobs=False, rollout__temperature=1.0)
    facts = read_text("vllm serve $MODEL -tp 2")
    _check(facts, engine__tp=2, engine__sequence_parallel=False)
    assert "$MODEL" in facts.unknown["engine.model"]


def test_a_secret_value_hides_no_flags() -> None:
    facts = read_text("python train.py --train-backend fsdp --wandb-key $WANDB_API_KEY --rollout-temperature 1")
    _check(facts, trainer__use_rollout_logprobs=False, rollout__temperature=1.0)


def test_known_expansions() -> None:
    text = 'A=1\nB="${A}"\nC=${B:-2}\nD=( x "$A y" )\nE=${D[1]}\nF=${A:+5}\npython train.py --train-backend fsdp'
    _check(read_text(f"{text} --rollout-temperature $C --rollout-top-k $F"), rollout__temperature=1.0, rollout__top_k=5)
    _check(read_text(f'{text} ${{D[@]+"${{D[@]}}"}} --rollout-temperature 1'), rollout__temperature=1.0)


def test_source_of_a_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "qwen3.sh").write_text("MODEL_ARGS=( --swiglu --num-layers 36 )\n")
    script = tmp_path / "run.sh"
    script.write_text(
        'HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"\nsource "${HERE}/models/qwen3.sh"\n'
        "python train.py ${MODEL_ARGS[@]} --train-backend megatron\n"
    )
    _check(read_launch(script), trainer__backend="megatron", trainer__use_rollout_logprobs=False)


def test_commands_inside_commands(tmp_path: Path) -> None:
    (tmp_path / "inner.sh").write_text('python train.py --train-backend fsdp --rollout-temperature "$1"\n')
    outer = tmp_path / "outer.sh"
    outer.write_text(
        "main() {\n  docker run -e NCCL_ALGO=Ring image bash -c 'cd /x && python train.py --train-backend fsdp'\n"
        "}\nmain\n"
    )
    _check(read_launch(outer), trainer__backend="fsdp")
    outer.write_text("bash inner.sh 1.0\n")
    assert "$1" in read_launch(outer).unknown["rollout.temperature"]


def test_trainer_and_engine_in_one_script() -> None:
    facts = read_text(
        "VLLM_BATCH_INVARIANT=1 vllm serve Qwen/Qwen3-4B -tp 2 &\n"
        "accelerate launch grpo.py --use_vllm --vllm_mode server --temperature 1.0 --bf16\n"
    )
    _check(
        facts,
        launch__framework="trl",
        engine__kind="vllm",
        engine__tp=2,
        engine__deterministic=True,
        rollout__temperature=1.0,
    )


def test_slime_and_a_train_py_of_nobody() -> None:
    _check(
        read_text("python3 /root/slime/train.py --rollout-top-p 0.9 --hf-checkpoint /m"),
        launch__framework="slime",
        rollout__top_p=0.9,
    )
    facts = read_text("python3 train.py --rollout-top-p 0.9 --hf-checkpoint /m --sglang-mem-fraction-static 0.7")
    assert "nothing names either" in facts.unknown["launch.framework"]
    with pytest.raises(UsageError, match="no launch command"):
        read_text("python3 train.py --epochs 3")


def test_json_of_a_running_server(tmp_path: Path) -> None:
    file = tmp_path / "server_info.json"
    file.write_text(
        json.dumps({"server_args": {"model_path": "/m/Qwen3-4B", "attention_backend": "fa3", "tp_size": 2}})
    )
    _check(read_launch(file), launch__framework="sglang", engine__attention_backend="fa3", engine__tp=2)


@pytest.mark.parametrize("program", ["python -m sglang.launch_server --model-path m", "vllm serve m"])
def test_300_flags(program: str) -> None:
    flags = " ".join(
        f"--some-flag-{index} value{index}" if index % 2 else f"--some-switch-{index}" for index in range(300)
    )
    facts = read_text(f"{program} {flags} --attention-backend triton --tp 2 {flags}")
    _check(facts, engine__attention_backend="triton", engine__tp=2)


def test_errors_name_the_place(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"run.sh line 2: a double quote opened here is never closed"):
        read_text('A=1\npython train.py --train-backend "fsdp\n', "run.sh")
    with pytest.raises(UsageError, match="no such file"):
        read_launch(tmp_path / "nothing.sh")
    python = tmp_path / "run_qwen3.py"
    python.write_text("execute_train('--train-backend fsdp')")
    with pytest.raises(UsageError, match=r"zerogap.check\(launch=train_args\)"):
        read_launch(python)
