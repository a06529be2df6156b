"""One question to an engine and its answer, the same for every kind of engine."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field, replace
from typing import Any

Token = int | str  # an id where the engine gives ids, else the token's text
Prompt = str | tuple[int, ...]
NEUTRAL: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
SAMPLING = tuple(NEUTRAL)


@dataclass(frozen=True)
class Ask:
    """What to generate and how.

    Attributes:
        prompt: text or token ids.
        max_tokens: tokens to generate.
        temperature: 0 is greedy. None, here and below: not sent, so that the engine's default rules.
        top_p, top_k, min_p: truncation; 1, 0 and 0 are off.
        repetition_penalty, frequency_penalty, presence_penalty: 1, 0 and 0 are off.
        alternatives: log-probs of that many most likely tokens at each position.
        cold: ask that no prefix cache serves this.
    """

    prompt: Prompt
    max_tokens: int = 8
    temperature: float | None = 0.0
    top_p: float | None = 1.0
    top_k: int | None = 0
    min_p: float | None = 0.0
    repetition_penalty: float | None = 1.0
    frequency_penalty: float | None = 0.0
    presence_penalty: float | None = 0.0
    seed: int | None = None
    alternatives: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = True
    cold: bool = False

    def but(self, **changes: Any) -> Ask:
        """Return the question with some values replaced."""
        return replace(self, **changes)

    def inheriting(self, **changes: Any) -> Ask:
        """Return the question with every sampling value left to the engine except those given."""
        return replace(self, **{**dict.fromkeys(SAMPLING), **changes})

    def sampling(self) -> dict[str, float | int]:
        """Return the sampling values that are sent."""
        return {name: value for name in SAMPLING if (value := getattr(self, name)) is not None}


@dataclass(frozen=True)
class Answer:
    """What an engine gave for one sequence.

    Attributes:
        tokens: generated tokens; ids where the engine gives them.
        logprobs: as read, one per position that the engine gave; None where it gave null.
        top: at each position token -> log-prob of the most likely ones.
        finish: the finish reason as the engine says it.
        claimed: number of generated tokens by the engine's own count, None when not told.
        cached: prompt tokens that came from a cache, None when not told.
        prompt_tokens: ids of the prompt as the engine took it, when told.
    """

    text: str
    tokens: tuple[Token, ...]
    logprobs: tuple[float | None, ...]
    top: tuple[dict[Token, float | None], ...] = ()
    finish: str = ""
    claimed: int | None = None
    cached: int | None = None
    prompt_tokens: tuple[int, ...] | None = None
    problems: tuple[str, ...] = field(default=())

    @property
    def words(self) -> tuple[bytes | None, ...]:
        """The log-probs as float64 words, so that NaN never equals anything by accident and -0.0 is not 0.0."""
        return tuple(None if value is None else struct.pack("<d", value) for value in self.logprobs)


def same_bits(one: Answer, other: Answer) -> bool:
    """Whether two answers hold the same tokens and log-prob words; NaN and infinities are equal to nothing."""
    return first_difference(one, other) is None


def first_difference(one: Answer, other: Answer) -> int | None:
    """Return the first position where tokens or log-probs differ, None if nowhere."""
    for position in range(max(len(one.tokens), len(other.tokens), len(one.logprobs), len(other.logprobs))):
        if one.tokens[position : position + 1] != other.tokens[position : position + 1]:
            return position
        if one.words[position : position + 1] != other.words[position : position + 1]:
            return position
        value = one.logprobs[position] if position < len(one.logprobs) else None
        if value is not None and not math.isfinite(value):
            return position
    return None
