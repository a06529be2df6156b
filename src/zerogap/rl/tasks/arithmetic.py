"""Two-digit addition: ``12+34=`` is answered ``46`` and then the end-of-sequence token.

Held-out questions are disjoint from training by construction: a pair of operands is held out if and only if the
first byte of the BLAKE2b hash of ``a+b`` is below 26 (about 10 %).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from zerogap.rl.config import Config
from zerogap.rl.tasks.base import Prompt

SMALLEST, LARGEST = 10, 99
_HELD_OUT_BELOW = 26
EXACT_MATCH = "zerogap.rl.tasks.scoring:exact_match"


def is_held_out(a: int, b: int) -> bool:
    """Return whether the question ``a+b`` belongs to the held-out set."""
    return hashlib.blake2b(f"{a}+{b}".encode()).digest()[0] < _HELD_OUT_BELOW


@cache
def held_out_pairs() -> tuple[tuple[int, int], ...]:
    """Return all held-out pairs in a fixed shuffled order (by hash), so that any first part is a fair sample."""
    operands = range(SMALLEST, LARGEST + 1)
    pairs = [(a, b) for a in operands for b in operands if is_held_out(a, b)]
    return tuple(sorted(pairs, key=lambda pair: hashlib.blake2b(f"order {pair[0]}+{pair[1]}".encode()).digest()))


def train_pair(seed: int, step: int, index: int) -> tuple[int, int]:
    """Return the pair of training question ``index`` of ``step``: uniform over the pairs that are not held out."""
    count = LARGEST - SMALLEST + 1
    attempt = 0
    while True:
        digest = hashlib.blake2b(f"{seed} {step} {index} {attempt}".encode(), digest_size=16).digest()
        a, b = divmod(int.from_bytes(digest, "little") % (count * count), count)
        if not is_held_out(SMALLEST + a, SMALLEST + b):
            return SMALLEST + a, SMALLEST + b
        attempt += 1


def question(a: int, b: int) -> Prompt:
    """Return the prompt of one addition."""
    return Prompt(name=f"arithmetic:{a}+{b}", content=f"{a}+{b}=", answer=str(a + b))


@dataclass(frozen=True)
class ArithmeticTask:
    """The built-in task."""

    seed: int
    prompts_per_step: int
    eval_count: int
    reward: str = EXACT_MATCH

    @classmethod
    def from_config(cls, config: Config) -> ArithmeticTask:
        """Return the task with the configuration's numbers of prompts."""
        return cls(
            config.run.seed, config.rollout.prompts_per_step, config.eval.prompts, config.task.reward or EXACT_MATCH
        )

    @property
    def digest(self) -> str:
        """Hex digest of the questions that are not held out; they come from nothing but this file."""
        return hashlib.blake2b(repr(held_out_pairs()).encode(), digest_size=16).hexdigest()

    def train_prompts(self, step: int) -> list[Prompt]:
        """Return the questions of ``step``; two of them may be equal, as in any sample."""
        return [question(*train_pair(self.seed, step, index)) for index in range(self.prompts_per_step)]

    def all_train_prompts(self) -> Sequence[Prompt]:
        """Return questions with every operand once in each place: a tokenizer's longest is among them.

        Their own tokens are what a plus sign separates, so the thousands of pairs need not all be encoded.
        """
        return [question(a, SMALLEST + LARGEST - a) for a in range(SMALLEST, LARGEST + 1)]

    def eval_prompts(self) -> list[Prompt]:
        """Return the first ``eval_count`` held-out questions."""
        return [question(a, b) for a, b in held_out_pairs()[: self.eval_count]]
