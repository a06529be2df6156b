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


def last_number(prompt: Any, completion: str, answer: Any, **fields: Any) -> float:
    """Return 1.0 if the last number in the completion equals the answer (as numbers, without commas), else 0.0."""
    found = _NUMBER.findall(completion)
    return float(bool(found) and float(found[-1].replace(",", "")) == float(str(answer).replace(",", "")))
