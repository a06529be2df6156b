"""Reward functions that need nothing but Python; they are examples of the signature too."""

from __future__ import annotations

import re
from typing import Any

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def exact_match(prompt: Any, completion: str, answer: Any, **fields: Any) -> float:
    """Return 1.0 if the completion is the answer, character for character, else 0.0."""
    return float(completion == str(answer))


def stripped_match(prompt: Any, completion: str, answer: Any, **fields: Any) -> float:
    """Return 1.0 if completion and answer are equal without surrounding white space, else 0.0."""
    return float(completion.strip() == str(answer).strip())


def near_number(prompt: Any, completion: str, answer: Any, **fields: Any) -> float:
    """Return 1 / (1 + d) with d between the completion's first number and the answer; 0.0 without a number.

    Partial credit for a model that is seldom right, so that the samples of a prompt differ.
    """
    found = _NUMBER.findall(completion)
    return 1.0 / (1.0 + abs(_value(found[0]) - _value(answer))) if found else 0.0


def last_number(prompt: Any, completion: str, answer: Any, **fields: Any) -> float:
    """Return 1.0 if the last number in the completion equals the answer (as numbers, without commas), else 0.0."""
    found = _NUMBER.findall(completion)
    return float(bool(found) and _value(found[-1]) == _value(answer))


def _value(text: Any) -> float:
    return float(str(text).replace(",", ""))
