"""One sequence in the engine, the events it yields and what it leaves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from zerogap.engine.params import Key, SamplingParams
from zerogap.engine.stops import TextTail

FinishReason = Literal["stop", "length", "abort"]
TopLogprobs = tuple[tuple[int, float], ...]
"""(token id, log-prob) of the most probable tokens: highest first, equal ones by lower id."""


@dataclass(slots=True)
class Completion:
    """A finished sequence.

    Attributes:
        key: the request's key.
        prompt: its token ids.
        tokens: generated token ids, to the one that ended it.
        logprobs: log-prob of each generated token as it was sampled: float32 values, held exactly by Python floats.
        finish_reason: ``stop`` (stop id or string), ``length`` (max_tokens) or ``abort``.
        text: generated text without the stop id or string.
        top_logprobs: per token the most probable tokens, if the request asked for them.
        cached_tokens: prompt tokens taken from the prefix cache at first admission.
        weights_version: version of the weights that sampled every token.
        params: as used, with the tokenizer's end tokens among the stop ids.
    """

    key: Key
    prompt: tuple[int, ...]
    tokens: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    text: str
    top_logprobs: list[TopLogprobs] | None
    cached_tokens: int
    weights_version: int
    params: SamplingParams


class TokenEvent(NamedTuple):
    """One generated token.

    Attributes:
        key: the request's key.
        token: its id.
        logprob: as sampled, nats, a float32 value.
        text: text that became certain with this token; empty unless text was asked for (``Engine.add``, ``stream``).
        top_logprobs: the most probable tokens at this position, if asked for.
        completion: the whole sequence, with its last token.
    """

    key: Key
    token: int
    logprob: float
    text: str
    top_logprobs: TopLogprobs | None
    completion: Completion | None


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence that waits or runs.

    Attributes:
        tokens: prompt and generated token ids.
        prompt_len: how many of them are the prompt's.
        params: with the tokenizer's end tokens among the stop ids.
        number: its place in the schedule trace.
        tail: follows the text when stop strings or streaming need it at every token.
        computed: leading tokens whose keys and values stand in ``block_table``'s pages.
        block_table: pages in order of position.
        page_keys: chained keys of the leading full pages, as far as they were needed.
    """

    key: Key
    tokens: list[int]
    prompt_len: int
    params: SamplingParams
    number: int
    tail: TextTail | None = None
    stops: frozenset[int] = frozenset()
    computed: int = 0
    block_table: list[int] = field(default_factory=list)
    page_keys: list[bytes] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    cached_tokens: int | None = None

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_len
