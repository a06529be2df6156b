"""What every side of a comparison shares: one process that loads once and answers JSON lines on standard input.

Standard library only, since each side runs in an environment of its own. A request is an object with ``do`` (the name
of what is asked) and its arguments; the answer is an object too, ``{"error": …}`` if it cannot be had.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

Answer = dict[str, Any]
LOWEST_ID = 1000  # token ids from here on are ordinary words where the vocabulary is large


def take_stdout() -> TextIO:
    """Return the channel for answers; whatever else this process prints goes to standard error from now on."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return channel


def say(channel: TextIO, answer: Mapping[str, Any]) -> None:
    channel.write(json.dumps(answer) + "\n")
    channel.flush()


def next_request() -> dict[str, Any] | None:
    """Return the next request; None when there will be no more."""
    line = sys.stdin.readline()
    return json.loads(line) if line else None


def answer_one(verbs: Mapping[str, Callable[..., Answer]], request: dict[str, Any]) -> Answer:
    """Return the answer to one request; an exception becomes one line."""
    verb = verbs.get(request.pop("do"))
    if verb is None:
        return {"error": "this side has no such thing"}
    try:
        return verb(**request)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def serve(channel: TextIO, verbs: Mapping[str, Callable[..., Answer]], about: Mapping[str, Any]) -> None:
    """Say that this side is ready, then answer until standard input closes."""
    say(channel, {"ready": True, **about})
    while (request := next_request()) is not None:
        say(channel, answer_one(verbs, request))


def prompts(sequences: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Return token ids that are the same on every side and new for every seed, so that no prefix cache has them."""
    numbers = random.Random(seed)
    lowest = min(LOWEST_ID, vocabulary // 2)
    return [[numbers.randrange(lowest, vocabulary) for _ in range(length)] for _ in range(sequences)]


class Watch:
    """Seconds between its making and `seconds`."""

    def __init__(self) -> None:
        self.began = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began


@contextmanager
def timed(answer: Answer, name: str = "seconds"):
    """Add the seconds of the body to an answer."""
    watch = Watch()
    yield
    answer[name] = answer.get(name, 0.0) + watch.seconds
