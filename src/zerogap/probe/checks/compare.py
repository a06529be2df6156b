"""Comparing answers that ought to be the same bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from zerogap.probe.ask import Answer, first_difference, same_bits


def figures(reference: Answer, others: Sequence[Answer]) -> dict[str, Any]:
    """Return how the others differ from the reference.

    ``equal`` of ``of`` answers hold the same bits; log-probs are compared up to the first token that differs, since
    after it the contexts differ.
    """
    sizes: list[float] = []
    compared = equal_values = 0
    first: int | None = None
    tokens_differ = 0
    for other in others:
        at = first_difference(reference, other)
        if at is not None:
            first = at if first is None else min(first, at)
        tokens_differ += reference.tokens != other.tokens
        for position in range(min(len(reference.logprobs), len(other.logprobs))):
            if reference.tokens[: position + 1] != other.tokens[: position + 1]:
                break
            one, two = reference.logprobs[position], other.logprobs[position]
            compared += 1
            equal_values += reference.words[position] == other.words[position]
            if one is not None and two is not None and math.isfinite(one - two):
                sizes.append(abs(one - two))
    return {
        "of": len(others),
        "equal": sum(same_bits(reference, other) for other in others),
        "tokens_differ": tokens_differ,
        "first_difference": first,
        "logprobs_compared": compared,
        "logprobs_equal": equal_values,
        "max_abs": max(sizes, default=None),
        "mean_abs": sum(sizes) / len(sizes) if sizes else None,
    }


def words(numbers: dict[str, Any]) -> str:
    """Return the figures as a sentence for people."""
    if numbers["equal"] == numbers["of"]:
        return f"{numbers['of']} of {numbers['of']} equal, bit for bit"
    text = f"{numbers['equal']} of {numbers['of']} equal; first difference at token {numbers['first_difference']}"
    if numbers["tokens_differ"]:
        text += f", other tokens in {numbers['tokens_differ']}"
    if numbers["logprobs_compared"]:
        share = numbers["logprobs_equal"] / numbers["logprobs_compared"]
        text += f"; {share:.0%} of the log-probs bit-equal"
    if numbers["max_abs"]:
        text += f", mean abs {numbers['mean_abs']:.2g}, max {numbers['max_abs']:.2g}"
    return text
