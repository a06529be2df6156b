"""Prompts from a JSONL file: one object per line with a prompt (text or chat messages), an answer, more fields."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from zerogap.errors import UsageError, nearest
from zerogap.rl.config import Config, TaskSection
from zerogap.rl.tasks.base import Message, Prompt

_DEEPEST = 100  # levels of nesting of a line; every later reader and writer must manage them too
_ROLES = ("system", "user", "assistant", "tool")


def read_prompts(path: Path, task: TaskSection) -> list[Prompt]:
    """Return the prompts of a JSONL file; blank lines are skipped.

    Raises:
        UsageError: names the file, the line and what is missing or wrong; an empty file is refused.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file; it was named as a data set (task.path or task.eval_path)") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: byte {error.start} is not UTF-8; save the data set as UTF-8") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    # Not splitlines(): U+2028 and its like may stand inside a JSON text.
    lines = enumerate(text.split("\n"), start=1)
    prompts = [_parse(line, f"{path}:{number}", task) for number, line in lines if line.strip()]
    if not prompts:
        raise UsageError(f"{path}: has no prompts; give at least one JSON object with {task.prompt_key!r}")
    return prompts


@lru_cache(maxsize=2)  # a step reads one epoch, or two at their border
def epoch_order(count: int, seed: int, epoch: int) -> tuple[int, ...]:
    """Return a permutation of ``range(count)`` that depends on the arguments only.

    The raw Philox stream is one that numpy promises to keep; its own ``shuffle`` is not.
    """
    raw = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(count)
    return tuple(np.argsort(raw, kind="stable").tolist())


@dataclass(frozen=True)
class JsonlTask:
    """Prompts of a file in shuffled epochs, and held-out prompts of another."""

    train: Sequence[Prompt]
    held_out: Sequence[Prompt]
    reward: str
    seed: int
    prompts_per_step: int
    shuffle: bool = True

    @classmethod
    def from_config(cls, config: Config) -> JsonlTask:
        """Read the files that the configuration names."""
        task = config.task
        assert task.path is not None
        assert task.reward is not None
        held_out = [] if task.eval_path is None else read_prompts(Path(task.eval_path), task)
        return cls(
            train=read_prompts(Path(task.path), task),
            held_out=held_out[: config.eval.prompts],
            reward=task.reward,
            seed=config.run.seed,
            prompts_per_step=config.rollout.prompts_per_step,
            shuffle=task.shuffle,
        )

    @property
    def digest(self) -> str:
        """Hex digest of every training prompt with its answer and fields, in file order."""
        whole = hashlib.blake2b(digest_size=16)
        for prompt in self.train:
            whole.update(json.dumps([prompt.content, prompt.answer, dict(prompt.fields)]).encode() + b"\n")
        return whole.hexdigest()

    def train_prompts(self, step: int) -> list[Prompt]:
        """Return the prompts of ``step``; epochs follow each other without a gap, also inside a step."""
        first = step * self.prompts_per_step
        return [self._at(position) for position in range(first, first + self.prompts_per_step)]

    def all_train_prompts(self) -> Sequence[Prompt]:
        """Return the file's prompts, in its order."""
        return self.train

    def eval_prompts(self) -> list[Prompt]:
        """Return the held-out prompts in file order."""
        return list(self.held_out)

    def _at(self, position: int) -> Prompt:
        epoch, offset = divmod(position, len(self.train))
        return self.train[epoch_order(len(self.train), self.seed, epoch)[offset] if self.shuffle else offset]


def _parse(line: str, where: str, task: TaskSection) -> Prompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}: is not JSON ({error.msg} at column {error.colno})") from None
    except RecursionError:
        raise UsageError(f"{where}: is nested too deep; at most {_DEEPEST} levels are read") from None
    except ValueError:
        raise UsageError(f"{where}: holds an integer of thousands of digits; write it as a text") from None
    if _depth(record) > _DEEPEST:
        raise UsageError(f"{where}: is nested too deep; at most {_DEEPEST} levels are read")
    if not isinstance(record, dict):
        raise UsageError(f"{where}: must be a JSON object with {task.prompt_key!r} and {task.answer_key!r}")
    for key, setting in ((task.prompt_key, "task.prompt_key"), (task.answer_key, "task.answer_key")):
        if key not in record:
            raise UsageError(f"{where}: {key!r} is missing{nearest(key, record)}; add it or set {setting}")
    content = _content(record[task.prompt_key], f"{where}: {task.prompt_key!r}", task.chat)
    fields = {key: value for key, value in record.items() if key not in (task.prompt_key, task.answer_key)}
    return Prompt(name=where, content=content, answer=record[task.answer_key], fields=fields)


def _depth(value: Any) -> int:
    """Return the levels of nesting of a JSON value; 0 for a text or a number."""
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [part for item in level for part in (item.values() if isinstance(item, dict) else item)]
    return depth


def _content(value: Any, where: str, chat: bool) -> str | tuple[Message, ...]:
    if isinstance(value, str):
        if not value:
            raise UsageError(f"{where} is empty; give a text or chat messages")
        return ({"role": "user", "content": _text(value, where)},) if chat else _text(value, where)
    if not isinstance(value, list) or not value:
        raise UsageError(f"{where} must be a text or a list of chat messages")
    for index, message in enumerate(value):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise UsageError(f"{where}: message {index} must be an object with exactly 'role' and 'content'")
        if message["role"] not in _ROLES or not isinstance(message["content"], str):
            raise UsageError(f"{where}: message {index} needs a role of {', '.join(_ROLES)} and a text as content")
        _text(message["content"], f"{where}: message {index}")
    return tuple(value)


def _text(value: str, where: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{where}: character {error.start} is half of a surrogate pair; write the whole character"
        ) from None
    return value
