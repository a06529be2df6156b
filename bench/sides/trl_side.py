"""The side of TRL's GRPO trainer: python trl_side.py MODEL_FOLDER.

The trainer's own loop runs; between two optimiser steps it waits here for the next request. Its best form for this
size: the whole rollout in one generation, no pass for old log-probs, no reference model, all activations kept.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from grpo_task import PROMPTS, reward_of
from jsonlines import Answer, next_request, say, take_stdout

PER_FORWARD = 8  # sequences


def main(folder: str, samples: int, new_tokens: int) -> None:
    channel = take_stdout()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    waiter = _Waiter(channel)

    def reward(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        waiter.prompt_tokens = sum(len(tokenizer(prompt)["input_ids"]) for prompt in prompts)
        waiter.new_tokens = sum(map(len, completion_ids))
        return [reward_of(number) for number in range(len(prompts))]

    with tempfile.TemporaryDirectory() as scratch:
        config = trl.GRPOConfig(
            output_dir=scratch,
            per_device_train_batch_size=PER_FORWARD,
            gradient_accumulation_steps=len(PROMPTS) * samples // PER_FORWARD,
            num_generations=samples,
            max_completion_length=new_tokens,
            generation_kwargs={"min_new_tokens": new_tokens},
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            beta=0.0,
            num_iterations=1,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            optim="adamw_torch",
            max_steps=10**6,
            shuffle_dataset=False,
            gradient_checkpointing=False,
            use_cpu=True,
            bf16=False,
            save_strategy="no",
            report_to=[],
            logging_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = trl.GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
            processing_class=tokenizer,
            callbacks=[waiter],
        )
        generate = trainer._generate

        def timed_generate(*arguments: Any, **more: Any) -> Any:
            began = time.perf_counter()
            done = generate(*arguments, **more)
            waiter.generate_s += time.perf_counter() - began
            return done

        trainer._generate = timed_generate
        say(channel, {"ready": True, "trl": trl.__version__, "torch": torch.__version__})
        trainer.train()


class _Waiter(transformers.TrainerCallback):
    """Holds the trainer between steps until the next request, and answers it after the step."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.generate_s = 0.0
        self.began = 0.0
        self.prompt_tokens = 0
        self.new_tokens = 0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if next_request() is None:
            os._exit(0)  # the trainer has no way to stop here that would not first run the step
        self.generate_s = 0.0
        self.began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        seconds = time.perf_counter() - self.began
        answer: Answer = {"seconds": seconds, "generate_s": self.generate_s, "train_s": seconds - self.generate_s}
        say(self.channel, answer | {"prompt_tokens": self.prompt_tokens, "new_tokens": self.new_tokens})


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
