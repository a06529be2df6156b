"""A real TRL run on the CPU: a tiny model, a rollout_func whose log-probs come from generation, and the callback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

trl = pytest.importorskip("trl", reason="TRL is not installed")
pytest.importorskip("datasets", reason="TRL needs datasets")
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

import zerogap
from zerogap.cli import run
from zerogap.errors import UsageError
from zerogap.integrations.trl import GapCallback

MODEL = Path(zerogap.__file__).parent / "data" / "tiny-qwen3"
STEPS, PROMPTS, SAMPLES = 3, ["12+34=", "50+41="], 4


def rollout(broken: bool) -> Any:
    """Generate with Hugging Face and return the log-probs of the distribution each token was drawn from."""

    @torch.no_grad()
    def generate(prompts: list[str], trainer: Any) -> dict[str, Any]:
        tokenizer, model = trainer.processing_class, trainer.model
        made: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        for prompt in prompts:
            ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
            out = model.generate(ids, do_sample=True, top_k=0, max_new_tokens=8, min_new_tokens=8, output_logits=True,
                                 return_dict_in_generate=True, pad_token_id=tokenizer.pad_token_id or 0)  # fmt: skip
            tokens = out.sequences[0, ids.shape[1] :]
            logprobs = torch.stack(out.logits, 1)[0].log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
            if broken:
                logprobs = logprobs.roll(1)
            made["prompt_ids"].append(ids[0].tolist())
            made["completion_ids"].append(tokens.tolist())
            made["logprobs"].append(logprobs.tolist())
        return made

    return generate


def train(folder: Path, callback: GapCallback, *, broken: bool = False, attach: bool = True) -> Any:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    arguments = trl.GRPOConfig(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=SAMPLES, num_generations=SAMPLES,
        max_completion_length=8, logging_steps=1, save_steps=STEPS, report_to=[], use_cpu=True, bf16=False,
        learning_rate=1e-4, disable_tqdm=True, seed=1,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=model, processing_class=tokenizer, args=arguments, rollout_func=rollout(broken), callbacks=[callback],
        reward_funcs=lambda completions, **_: [float(len(set(str(c)))) for c in completions],
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * 8}),
    )  # fmt: skip
    if attach:
        callback.attach(trainer)
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GapCallback]:
    folder = tmp_path_factory.mktemp("trl")
    callback = GapCallback(folder / "gap.parquet")
    train(folder, callback)
    return folder, callback


def test_a_healthy_run_is_healthy_and_every_trained_token_is_compared(finished: tuple[Path, GapCallback]) -> None:
    _, callback = finished
    verdict = callback.report()
    assert verdict.status == "healthy", verdict.summary
    assert verdict.numbers is not None
    assert verdict.numbers.compared == STEPS * SAMPLES * 8
    assert 0 < verdict.numbers.mean_abs < 1e-3


def test_the_table_and_the_trainer_state_are_read_by_the_command(
    finished: tuple[Path, GapCallback], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, callback = finished
    assert run(["gap", str(folder / "gap.parquet"), "--json"]) == 0
    table = json.loads(capsys.readouterr().out)["sources"][0]
    assert table["numbers"]["compared"] == callback.report().numbers.compared  # type: ignore[union-attr]
    state = next(folder.glob("checkpoint-*/trainer_state.json"))
    assert run(["gap", str(state), "--json"]) == 0
    (series,) = json.loads(capsys.readouterr().out)["sources"][0]["series"]
    assert series["steps"] == [1, 2, 3]
    assert np.isfinite(series["values"]["abs_mean"]).all()


def test_shifted_logprobs_stop_the_run(tmp_path: Path) -> None:
    callback = GapCallback(stop=True)
    trainer = train(tmp_path, callback, broken=True)
    assert trainer.state.global_step == 1
    assert callback.report().status == "fault"
    assert "OFF_BY_ONE" in {f.code for f in callback.report().findings}


def test_another_trainer_is_refused_in_one_line() -> None:
    with pytest.raises(UsageError, match="GRPOTrainer of TRL"):
        GapCallback().attach(object())
    assert issubclass(GapCallback, TrainerCallback)
