"""What a request asks for: sampling parameters and the request itself, checked when they are made."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from zerogap.errors import UsageError

Key: TypeAlias = tuple[int, int, int]
"""(step, prompt, sample): names a sequence and is its place in the random numbers."""

_SEED_LIMIT = 2**63
MIN_TEMPERATURE = 1e-4


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one sequence are drawn and when it ends.

    Attributes:
        temperature: divides the logits; 0 is greedy (evaluation only), its log-probs then stand at temperature 1.
        top_k: keep the k tokens of highest logit; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this; 1 keeps all.
        min_p: keep tokens of at least this share of the highest probability; 0 keeps all.
        max_tokens: generated tokens at most.
        min_tokens: the stop ids cannot be sampled, and stop strings do not count, before this many tokens.
        stop_ids: token ids that end the sequence; they are kept as its last token but are not in its text.
        stop_strings: texts that end the sequence; the text is cut before them, the tokens are kept.
        ignore_eos: do not end at the tokenizer's own end tokens.
        seed: of the counter-based random numbers, beside the request's key and the token's position.
        logprobs: report this many of the most probable tokens at each position.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    logprobs: int = 0

    def __post_init__(self) -> None:
        # Logits divided by less than this overflow float32.
        _number(
            "temperature",
            self.temperature,
            lambda value: value == 0 or MIN_TEMPERATURE <= value < math.inf,
            f"0 (greedy), or {MIN_TEMPERATURE} or more",
        )
        _number("top_p", self.top_p, lambda value: 0 < value <= 1, "above 0 and at most 1 (1 is off)")
        _number("min_p", self.min_p, lambda value: 0 <= value <= 1, "from 0 (off) to 1")
        _integer("top_k", self.top_k, 0, "0 (off) or more")
        _integer("max_tokens", self.max_tokens, 1, "1 or more")
        _integer("min_tokens", self.min_tokens, 0, "from 0 to max_tokens", self.max_tokens)
        _integer("seed", self.seed, 0, "from 0 to 2**63 - 1", _SEED_LIMIT - 1)
        _integer("logprobs", self.logprobs, 0, "0 (off) or more")
        if not isinstance(self.stop_strings, tuple | list):
            raise UsageError(f"stop_strings: must be a tuple of texts, not {self.stop_strings!r}")
        object.__setattr__(self, "stop_ids", tuple(self.stop_ids))
        object.__setattr__(self, "stop_strings", tuple(self.stop_strings))
        for token in self.stop_ids:
            _integer("stop_ids", token, 0, "token ids of 0 or more")
        for text in self.stop_strings:
            # The replacement character stands for bytes that are not text yet, so it cannot be searched for.
            if not isinstance(text, str) or not text or "\ufffd" in text:
                raise UsageError(f"stop_strings: must be texts of at least one character without U+FFFD, not {text!r}")

    def with_eos(self, eos_ids: tuple[int, ...]) -> SamplingParams:
        """Return these parameters with the tokenizer's end tokens among the stop ids, unless they are ignored."""
        added = () if self.ignore_eos else tuple(token for token in eos_ids if token not in self.stop_ids)
        return dataclasses.replace(self, stop_ids=self.stop_ids + added) if added else self


@dataclass(frozen=True)
class Request:
    """One sequence to generate.

    Attributes:
        key: unique among the requests in the engine.
        prompt: token ids, at least one.
        params: how to sample.
    """

    key: Key
    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)

    def __post_init__(self) -> None:
        if len(self.key) != 3:
            raise UsageError(f"key: must be (step, prompt, sample), not {self.key!r}")
        for part in self.key:
            _integer("key", part, 0, "three integers from 0 to 2**32 - 1", 2**32 - 1)
        object.__setattr__(self, "key", tuple(self.key))
        object.__setattr__(self, "prompt", tuple(self.prompt))
        if not self.prompt:
            raise UsageError(f"prompt of request {self.key}: has no tokens; the first row needs at least one")
        if not all(type(token) is int for token in self.prompt):
            raise UsageError(f"prompt of request {self.key}: must be token ids, not {self.prompt[:8]!r}")


def suppressed_ids(params: SamplingParams, generated_index: int) -> tuple[int, ...]:
    """Return the token ids that may not be sampled as generated token number ``generated_index`` (from 0).

    ``params`` are those of the completion (with the end tokens, see ``SamplingParams.with_eos``), so that the
    trainer restricts its distribution as the engine did.
    """
    return params.stop_ids if generated_index < params.min_tokens else ()


def _number(name: str, value: float, holds: Callable[[float], bool], wanted: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not holds(value):
        raise UsageError(f"{name}: must be {wanted}, not {value!r}")


def _integer(name: str, value: int, low: int, wanted: str, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise UsageError(f"{name}: must be {wanted}, not {value!r}")
