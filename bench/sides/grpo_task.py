"""The GRPO step that both sides run: prompts, and rewards that differ within every group."""

from __future__ import annotations

_ITEMS = (
    ("apples", "market", "basket"),
    ("books", "library", "shelf"),
    ("coins", "garden", "jar"),
    ("stamps", "post office", "album"),
    ("shells", "beach", "bucket"),
    ("pencils", "school", "drawer"),
    ("marbles", "playground", "pouch"),
    ("tickets", "station", "wallet"),
)
PROMPTS = tuple(
    f"Anna brings {12 + number} {what} from the {where} and puts {5 + number} of them into her {into}. "
    f"How many {what} does she still hold in her hands? Answer:"
    for number, (what, where, into) in enumerate(_ITEMS)
)


def reward_of(number: int) -> float:
    """Return the reward of the sample with this number in the batch.

    In groups of 8 none equals its group's mean: every sequence has a gradient, so that neither side may leave one out.
    """
    return float(number % 8)
