"""What the loop needs of a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from zerogap.errors import UsageError

Message = dict[str, str]  # {"role": ..., "content": ...}


@dataclass(frozen=True)
class Prompt:
    """One question.

    Attributes:
        name: where it comes from, such as ``data.jsonl:12``; for error lines and the samples file.
        content: plain text, or chat messages for the tokenizer's chat template.
        answer: what the reward function compares with; any JSON value.
        fields: further values that the reward function receives by name.
    """

    name: str
    content: str | tuple[Message, ...]
    answer: Any
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The prompt for a reader: chat messages one per line as ``role: content``."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(f"{message['role']}: {message['content']}" for message in self.content)


class Task(Protocol):
    """Prompts as a pure function of the step, and the function that judges completions."""

    @property
    def reward(self) -> str:
        """The reward function as ``module:function`` (see ``zerogap.rl.rewards``)."""
        ...

    @property
    def digest(self) -> str:
        """Hex digest of what the training prompts are made from, beside the configuration's own keys."""
        ...

    def train_prompts(self, step: int) -> list[Prompt]:
        """Return the prompts of training step ``step`` (from 0): the same list at every call, in every process."""
        ...

    def all_train_prompts(self) -> Sequence[Prompt]:
        """Return prompts as long, in tokens, as any that `train_prompts` returns at any step; checked beforehand."""
        ...

    def eval_prompts(self) -> list[Prompt]:
        """Return the held-out prompts; the same list at every call, independent of the seed."""
        ...


class PromptTokenizer(Protocol):
    """The part of a tokenizer that turns prompts into tokens."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a plain text."""
        ...

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of chat messages, ready for the assistant's turn."""
        ...


def encode_prompt(prompt: Prompt, tokenizer: PromptTokenizer, max_positions: int) -> list[int]:
    """Return the prompt's token ids.

    Args:
        prompt: the question.
        tokenizer: the model's tokenizer.
        max_positions: longest prompt plus completion, tokens.

    Raises:
        UsageError: no tokens, or no room for even one generated token.
    """
    if isinstance(prompt.content, str):
        ids = tokenizer.encode(prompt.content)
    else:
        ids = tokenizer.encode_chat([dict(message) for message in prompt.content])
    if not ids:
        raise UsageError(f"{prompt.name}: the prompt has no tokens; remove it")
    if len(ids) >= max_positions:
        raise UsageError(
            f"{prompt.name}: the prompt has {len(ids)} tokens and the context {max_positions}, "
            "so that nothing can be generated; shorten or remove it"
        )
    return ids
