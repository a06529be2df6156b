"""Generated tokens per second, with log-probs, against every engine at hand; and against torch's own ops in ours."""

from __future__ import annotations

from typing import Any

from measure import Row, Side
from speedrows.bench import Bench

PROMPT_TOKENS = 32
TARGETS = {1: 1.1, 8: 1.8, 32: 1.6, 64: 1.5}
TAX_SEQUENCES = (8, 32)


def rollout(bench: Bench, sequences: int) -> Row:
    row = _row(bench, f"rollout-{sequences}", ["ours", "vllm", "llama.cpp-f32", "transformers"], sequences)
    row.target = TARGETS[sequences]
    return row


def rollout_16bit(bench: Bench) -> Row:
    row = _row(bench, "rollout-16bit", ["ours-bf16", "llama.cpp-f16", "llama.cpp-bf16"], 1, weight_bytes=2)
    row.target = 1.1
    return row


def tax(bench: Bench, sequences: int) -> Row:
    row = _row(bench, f"tax-rollout-{sequences}", ["ours", "torch-ops"], sequences)
    row.what = f"same engine, exact ops against torch's own, {sequences} sequences"
    row.target = 1.5
    return row


def threads(bench: Bench) -> list[Row]:
    """Ours on one thread and on all, as speed-ups over one thread."""
    found = []
    for sequences in (1, 8, 32):
        row = _row(bench, f"threads-rollout-{sequences}", ["ours", "ours-1-thread"], sequences)
        row.what = f"our engine on {bench.threads} threads against 1, {sequences} sequences"
        found.append(row)
    row = bench.in_turn(
        "threads-train", "our training step likewise, 8 x 256", ["ours", "ours-1-thread"], _train, _train
    )
    return [*found, row]


def _train(side: Side, number: int = -1) -> dict[str, Any]:
    return side.ask(do="train", sequences=8, length=256, seed=number)


def _row(bench: Bench, name: str, sides: list[str], sequences: int, weight_bytes: int = 4) -> Row:
    new_tokens = bench.scaled(128)

    def ask(side: Side, number: int) -> dict[str, Any]:
        seed = 1000 * sequences + number
        return side.ask(
            do="generate", sequences=sequences, prompt_tokens=PROMPT_TOKENS, new_tokens=new_tokens, seed=seed
        )

    def warm(side: Side) -> object:
        return ask(side, -1)  # a whole one, so that every side has touched the memory it works in

    row = bench.in_turn(name, f"{sequences} sequences x {new_tokens} tokens with log-probs", sides, ask, warm)
    row.tokens = sequences * new_tokens
    row.floor_s = bench.costs.rollout_floor(bench.machine, sequences, PROMPT_TOKENS, new_tokens, weight_bytes)
    return row
