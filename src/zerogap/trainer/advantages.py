"""Group-relative advantages: what a response earned compared with the other responses to its prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

AdvantageMethod = Literal["grpo", "dr_grpo"]

# Keeps GRPO's quotient finite for groups whose rewards differ by next to nothing.
STD_EPSILON = 1e-6


@dataclass(frozen=True)
class GroupAdvantages:
    """Advantages in the shape of the rewards, and how many groups taught nothing.

    Attributes:
        advantages: one list per group, in the order of its rewards.
        groups_without_variance: groups whose rewards are all the same; all their advantages are exactly 0.
    """

    advantages: list[list[float]]
    groups_without_variance: int


def group_advantages(rewards: Sequence[Sequence[float]], method: AdvantageMethod = "grpo") -> GroupAdvantages:
    """Return the advantages of groups of rewards; a group is the samples of one prompt.

    * ``grpo``: ``A_i = (r_i - mean(r)) / (std(r) + 1e-6)``, DeepSeekMath (arXiv 2402.03300, section 4.1.2). The
      paper does not say which standard deviation; this is the sample one (divided by n - 1).
    * ``dr_grpo``: ``A_i = r_i - mean(r)``, Dr. GRPO (arXiv 2503.20783, section 3.2): dividing by the deviation weighs
      up prompts that are nearly always or nearly never solved.

    Args:
        rewards: finite rewards; groups may differ in size, a group of one has no variance.
        method: ``"grpo"`` or ``"dr_grpo"``.
    """
    advantages = [_group(list(group), method) for group in rewards]
    flat = sum(not _varies(group) for group in rewards)
    return GroupAdvantages(advantages, flat)


def _varies(group: Sequence[float]) -> bool:
    return len(group) > 1 and min(group) != max(group)


def _group(rewards: list[float], method: AdvantageMethod) -> list[float]:
    assert all(math.isfinite(reward) for reward in rewards), f"rewards must be finite here: {rewards}"
    if not _varies(rewards):
        # Asked for by equality: the rounded mean of equal rewards need not equal them.
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if method == "dr_grpo":
        return centred
    deviation = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - 1))
    return [c / (deviation + STD_EPSILON) for c in centred]
