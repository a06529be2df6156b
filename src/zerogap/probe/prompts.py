"""What the probe asks: fixed harmless texts, and texts that no engine has seen before."""

from __future__ import annotations

import random
import secrets

_WORDS = (
    "amber", "anchor", "autumn", "barley", "basket", "beacon", "birch", "bottle", "bridge", "candle", "canyon",
    "carbon", "castle", "cedar", "circle", "cloud", "copper", "coral", "cotton", "crystal", "dawn", "desert",
    "dragon", "eagle", "ember", "engine", "falcon", "feather", "fern", "field", "flame", "forest", "fossil",
    "garden", "glacier", "granite", "harbor", "hazel", "horizon", "island", "ivory", "jasmine", "juniper", "kernel",
    "lantern", "lemon", "linen", "lotus", "maple", "marble", "meadow", "mirror", "morning", "mountain", "needle",
    "north", "oak", "ocean", "olive", "opal", "orchard", "otter", "paper", "pearl", "pebble", "pepper", "pine",
    "planet", "pocket", "prairie", "quartz", "quiet", "rain", "raven", "reed", "river", "saddle", "salmon", "sand",
    "shadow", "silver", "spring", "stone", "storm", "summer", "sunset", "thistle", "thunder", "timber", "turtle",
    "valley", "velvet", "violet", "walnut", "water", "willow", "winter", "yellow", "zephyr",
)  # fmt: skip

VICTIM = "The old keeper of the lighthouse wrote in his book every evening. Tonight he wrote that the sea was"
OPEN = "Here is a list of things that I like, in no order at all:"  # many continuations are likely
REPEATING = "one two three four one two three four one two three four one two"
OTHERS = (
    "In the middle of the night the train stopped, and",
    "A recipe for bread needs flour, water and",
    "The committee met on Tuesday to discuss the new bridge. It was decided that",
    "She opened the letter and read:",
)


def fresh(words: int, seed: int | None = None) -> str:
    """Return a text of that many words: without a seed one that was never sent before."""
    source = random.Random(secrets.randbits(64) if seed is None else seed)
    return " ".join(source.choice(_WORDS) for _ in range(words))


def fillers(count: int, longest: int = 90) -> list[str]:
    """Return prompts of mixed lengths that keep a batch busy; the same ones for the same count."""
    source = random.Random(count)
    return [fresh(source.randint(2, longest), seed=1000 * count + number) for number in range(count)]
