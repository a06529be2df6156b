"""The examples of docs/tasks.md run."""

import re
from pathlib import Path
from typing import Any

import pytest

from zerogap.rl.config_load import load_config
from zerogap.rl.custom import Transcript, load_rollout
from zerogap.rl.rewards import RewardJob, RewardPool
from zerogap.rl.tasks import Prompt, make_task

PAGE = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


class _Context:
    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        return self.encode(str(prompt.content))

    def generate(self, prompt_ids: list[int], **params: Any) -> Any:
        class Completion:
            prompt, tokens, logprobs = tuple(prompt_ids), [1, 2], [-1.0, -2.0]
            text, finish_reason, weights_version = "x", "stop", 0

        return Completion()


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, code in zip(("my_rewards.py", "my_rollouts.py"), blocks("python"), strict=True):
        assert name in code
        Path(name).write_text(code)
    for name in ("train.jsonl", "held_out.jsonl"):
        Path(name).write_text(blocks("jsonl")[0])
    Path("run.toml").write_text('[run]\ndir = "r"\nsteps = 1\n[model]\npath = "p"\n' + blocks("toml")[0])

    task = make_task(load_config(Path("run.toml")))
    with RewardPool(task.reward, 1, 20.0, 0.0) as pool:
        prompts = task.eval_prompts()
        jobs = [
            RewardJob("eval", 0, index, 0, prompt.content, " 7", prompt.answer, prompt.fields)
            for index, prompt in enumerate(prompts)
        ]
        assert [outcome.value for outcome in pool.score(jobs)] == [2.0, 1.0]

    transcript = load_rollout("my_rollouts:with_hint")(_Context(), Prompt("n", "ab", ""))  # type: ignore[arg-type]
    assert isinstance(transcript, Transcript)
    assert sum(transcript.loss_mask) == 4
    assert len(transcript.response_ids) == 4 + len(" The answer is ")


def test_the_numbers_of_the_page() -> None:
    from zerogap.rl.tasks.arithmetic import held_out_pairs

    assert f"({len(held_out_pairs())} of the 8,100 pairs)" in PAGE
