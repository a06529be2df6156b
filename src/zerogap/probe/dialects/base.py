"""What every kind of engine is asked through: one class per HTTP dialect, all with the same questions."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zerogap.probe.ask import Answer, Ask, Prompt, Token
from zerogap.probe.client import Client
from zerogap.probe.limits import BadAnswerError, UnsupportedError


@dataclass(frozen=True)
class Engine:
    """What answered at the address.

    Attributes:
        kind: "vllm", "sglang", "llama.cpp", "tgi", "zerogap" or "openai" (some other OpenAI-style server).
        version: as the engine says it, "" when it does not.
        model: the name to send.
        facts: what the engine told of itself and where it was read, for the report and for the advice.
    """

    kind: str
    version: str
    model: str
    facts: Mapping[str, Any]


class Dialect:
    """How one kind of engine is asked.

    Attributes:
        endpoints: generating endpoints by name; the first is the default.
        has_ids: prompts may be token ids and answers hold token ids.
        alternatives: most alternatives that can be asked for at a position.
        penalties: repetition, frequency and presence penalties can be asked for.
        health: path of the health check.
        salted: whether ``Ask.cold`` can be honoured.
    """

    endpoints: tuple[str, ...] = ()
    has_ids = True
    alternatives = 20
    penalties = True
    health = "/health"
    salted = False
    several = True

    def __init__(self, client: Client, engine: Engine) -> None:
        self.client = client
        self.engine = engine

    async def generate(
        self, ask: Ask, *, endpoint: str = "", count: int = 1, stream: bool = False, timeout_s: float | None = None
    ) -> list[Answer]:
        """Return ``count`` answers to one request.

        Raises:
            ProbeError: no usable answer.
        """
        raise NotImplementedError

    async def score(self, ids: Sequence[int], temperature: float = 1.0) -> tuple[float | None, ...]:
        """Return the engine's own log-prob of every token of ``ids`` by prefill; the first is None.

        Raises:
            UnsupportedError: this kind of engine cannot.
        """
        raise UnsupportedError(f"{self.engine.kind} does not score a given text")

    async def tokenize(self, text: str) -> tuple[int, ...]:
        """Return the token ids of ``text`` as the engine makes them, without special tokens.

        Raises:
            UnsupportedError: this kind of engine cannot.
        """
        raise UnsupportedError(f"{self.engine.kind} does not tokenize on request")

    def wrong_requests(self) -> list[tuple[str, str, Any]]:
        """Return (what is wrong, path, body) of requests that can never succeed and harm nothing."""
        raise NotImplementedError


_salts = itertools.count()
_SALT = secrets.token_hex(8)


def salt() -> str:
    """Return a text that no request held before."""
    return f"{_SALT}-{next(_salts)}"


def ids_or_text(prompt: Prompt) -> list[int] | str:
    """Return the prompt as JSON holds it."""
    return prompt if isinstance(prompt, str) else list(prompt)


def number(value: Any) -> float | None:
    """Return a log-prob as read: a number, also one that is not finite or written as text; None for null.

    Raises:
        BadAnswerError: it is something else.
    """
    if value is None:
        return None
    if isinstance(value, str) and value.lower().lstrip("+-") in ("nan", "inf", "infinity"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadAnswerError(f"a log-prob is {type(value).__name__} {str(value)[:40]!r}, not a number")
    return float(value)


def as_list(value: Any, what: str) -> list[Any]:
    """Return ``value`` if it is a list, an empty list for null.

    Raises:
        BadAnswerError: it is something else.
    """
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadAnswerError(f"{what} is {type(value).__name__}, not a list")
    return value


def as_dict(value: Any, what: str) -> dict[str, Any]:
    """Return ``value`` if it is an object.

    Raises:
        BadAnswerError: it is something else.
    """
    if not isinstance(value, dict):
        raise BadAnswerError(f"{what} is {type(value).__name__}, not an object")
    return value


def as_count(value: Any) -> int | None:
    """Return a non-negative integer, None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def as_ids(value: Any, what: str) -> tuple[int, ...] | None:
    """Return token ids, None when there are none.

    Raises:
        BadAnswerError: the list holds something else.
    """
    if value is None:
        return None
    items = as_list(value, what)
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        raise BadAnswerError(f"{what} holds something that is no token id")
    return tuple(items)


def tops(pairs: Iterable[tuple[Token, Any]]) -> dict[Token, float | None]:
    """Return one position's alternatives."""
    return {token: number(value) for token, value in pairs}
