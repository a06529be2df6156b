"""Custom rollouts: ``task.rollout = "module:function"`` decides what is generated, with turns, tools, and a loss mask.

The function is ``rollout(context, prompt) -> Transcript``. An example with a tool:

    from zerogap.rl.custom import Transcript

    def rollout(context, prompt):
        transcript = Transcript(context.encode_prompt(prompt))
        transcript.add_completion(context.generate(transcript.tokens, stop=("</call>",)))
        transcript.add_tokens(context.encode(run_tool(transcript.completions[-1].text)))
        transcript.add_completion(context.generate(transcript.tokens))
        return transcript

Only tokens that the engine sampled can be trained on, each with the log-prob that was recorded when it was sampled; so
a completion can only be added to exactly the tokens that it continued.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from zerogap.errors import UsageError
from zerogap.rl.functions import describe, load_function
from zerogap.rl.lockstep import Cancelled
from zerogap.rl.tasks.base import Prompt


class SampledTokens(Protocol):
    """What the transcript needs of an engine's completion (``zerogap.engine.Completion`` has it)."""

    prompt: tuple[int, ...]
    tokens: list[int]
    logprobs: list[float]
    text: str
    finish_reason: Any
    weights_version: int
    cached_tokens: int


class RolloutContext(Protocol):
    """What a rollout function can do; one context belongs to one sample of one prompt."""

    def generate(self, prompt_ids: Sequence[int], **params: Any) -> SampledTokens:
        """Continue ``prompt_ids`` with the engine; each call of a sample has random numbers of its own.

        Args:
            prompt_ids: all tokens so far.
            params: ``max_tokens``, ``min_tokens`` and ``stop`` replace those of the section [rollout] (or [eval]);
                temperature and the kept set stay, since a sequence is trained under one sampler. ``max_tokens`` is cut
                to the `room` there is; a completion that it ends has ``finish_reason`` "length".

        Raises:
            UsageError: no room at all, or a parameter that is wrong; it ends the run.
        """
        ...

    def room(self, tokens: Sequence[int]) -> int:
        """Return how many tokens the context can still take after ``tokens``, inserted ones included."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens added."""
        ...

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a task's prompt."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        ...


@dataclass
class Transcript:
    """One rollout: the prompt, then sampled and inserted tokens in turn.

    Attributes:
        prompt_ids: tokens of the prompt; at least one.
        response_ids: all tokens after it.
        logprobs: nats, as sampled; 0 for inserted tokens, which is never read; [response].
        loss_mask: True = sampled and trained on; [response].
        completions: the added completions, in order.
    """

    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    completions: list[SampledTokens] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """Prompt and response so far: what the next completion continues."""
        return [*self.prompt_ids, *self.response_ids]

    @property
    def sampled_mask(self) -> list[bool]:
        """Where the engine sampled the token, whether it is trained on or not; [response]."""
        mask = [False] * len(self.response_ids)
        for completion in self.completions:
            start = len(completion.prompt) - len(self.prompt_ids)
            mask[start : start + len(completion.tokens)] = [True] * len(completion.tokens)
        return mask

    @property
    def cached_tokens(self) -> int | list[int]:
        """Prompt tokens from the prefix cache: one number for one completion, else that of each token's; [response]."""
        if len(self.completions) == 1:
            return self.completions[0].cached_tokens
        cached = [0] * len(self.response_ids)
        for completion in self.completions:
            start = len(completion.prompt) - len(self.prompt_ids)
            cached[start : start + len(completion.tokens)] = [completion.cached_tokens] * len(completion.tokens)
        return cached

    @property
    def text(self) -> str:
        """Text of all sampled turns, joined by line ends; what the reward function gets."""
        return "\n".join(completion.text for completion in self.completions)

    def add_completion(self, completion: SampledTokens, train: bool = True) -> None:
        """Append what the engine sampled.

        Args:
            completion: what ``context.generate(transcript.tokens)`` returned.
            train: False = part of the context only.

        Raises:
            UsageError: it continued other tokens, or other weights sampled it than the turns before.
        """
        if list(completion.prompt) != self.tokens:
            raise UsageError(
                "rollout: the completion continues other tokens than the transcript holds, so that its log-probs would "
                "not be those of this sequence; generate from transcript.tokens"
            )
        if self.completions and self.completions[0].weights_version != completion.weights_version:
            raise UsageError("rollout: the turns were sampled by different weights versions; start the rollout again")
        self.response_ids += completion.tokens
        self.logprobs += completion.logprobs
        self.loss_mask += [train] * len(completion.tokens)
        self.completions.append(completion)

    def add_tokens(self, ids: Sequence[int]) -> None:
        """Append tokens that were not sampled, such as a tool's answer; they are never trained on.

        Raises:
            UsageError: something that is no token id.
        """
        if not all(type(token) is int and token >= 0 for token in ids):
            raise UsageError(f"rollout: add_tokens takes token ids of 0 or more, not {list(ids)[:8]!r}")
        self.response_ids += ids
        self.logprobs += [0.0] * len(ids)
        self.loss_mask += [False] * len(ids)

    @property
    def truncated(self) -> bool:
        """Whether the last completion ended at its token limit."""
        return bool(self.completions) and self.completions[-1].finish_reason == "length"


RolloutFunction = Callable[[RolloutContext, Prompt], Transcript]


def load_rollout(reference: str) -> RolloutFunction:
    """Return the function that ``task.rollout`` names, with its results checked.

    Raises:
        UsageError: it cannot be imported; at a call: it raised, or returned no transcript that could be trained on.
    """
    function = load_function(reference, "task.rollout")

    def checked(context: RolloutContext, prompt: Prompt) -> Transcript:
        where = f"task.rollout = '{reference}' on {prompt.name}"
        try:
            transcript = function(context, prompt)
        except (UsageError, Cancelled):
            raise
        except BaseException as error:  # also SystemExit: what a rollout does must not end the run as if it were done
            raise UsageError(f"{where}: raised {describe(error)}") from error
        if not isinstance(transcript, Transcript):
            raise UsageError(f"{where}: returned {type(transcript).__name__}; it must return a Transcript")
        if not transcript.prompt_ids or not transcript.completions:
            raise UsageError(f"{where}: the transcript has no prompt or no completion; add at least one completion")
        lengths = {len(transcript.response_ids), len(transcript.logprobs), len(transcript.loss_mask)}
        if len(lengths) != 1:
            raise UsageError(f"{where}: the transcript's columns differ in length; change it only by its add_ methods")
        for column, kind in ((transcript.logprobs, float), (transcript.loss_mask, bool)):
            if not all(type(value) is kind for value in column):
                raise UsageError(
                    f"{where}: the transcript holds something that is no {kind.__name__}; "
                    "change it only by its add_ methods"
                )
        masks = zip(transcript.loss_mask, transcript.sampled_mask, strict=False)
        wrong = next((i for i, (trained, sampled) in enumerate(masks) if trained and not sampled), None)
        if wrong is not None:
            raise UsageError(
                f"{where}: loss_mask[{wrong}] is True where nothing was sampled, so that there is no log-prob to train "
                "on; change it only by the transcript's add_ methods, or to False"
            )
        return transcript

    return checked
