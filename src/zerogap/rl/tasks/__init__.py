"""Tasks: what is asked (training and held-out prompts) and which function judges the answer."""

from __future__ import annotations

from zerogap.rl.config import Config
from zerogap.rl.tasks.arithmetic import ArithmeticTask
from zerogap.rl.tasks.base import Prompt, Task
from zerogap.rl.tasks.jsonl import JsonlTask

__all__ = ["ArithmeticTask", "JsonlTask", "Prompt", "Task", "make_task"]


def make_task(config: Config) -> Task:
    """Return the task that ``config.task.name`` names.

    Raises:
        UsageError: unreadable, malformed or empty data.
    """
    if config.task.name == "arithmetic":
        return ArithmeticTask.from_config(config)
    return JsonlTask.from_config(config)
