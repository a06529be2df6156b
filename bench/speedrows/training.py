"""Training speed against transformers, a whole GRPO step against TRL, and the memory of a step."""

from __future__ import annotations

from typing import Any

from measure import Row, Side
from speedrows.bench import GRPO_SAMPLES, GRPO_TOKENS, Bench

SEQUENCES, LENGTH = 8, 256
MEMORY_LIMIT = 4_000_000_000


def train(bench: Bench) -> Row:
    row = _train(bench, "train", "transformers")
    row.what = f"training forward + backward with log-probs, {SEQUENCES} x {row.extra['length']}"
    row.target = 1.15
    return row


def tax_train(bench: Bench) -> Row:
    row = _train(bench, "tax-train", "torch-ops")
    row.what = f"same trainer, exact ops against torch's own, {SEQUENCES} x {row.extra['length']}"
    return row


def _train(bench: Bench, name: str, other: str) -> Row:
    length = 64 if bench.short else LENGTH

    def ask(side: Side, number: int) -> dict[str, Any]:
        return side.ask(do="train", sequences=SEQUENCES, length=length, seed=number)

    row = bench.in_turn(name, "", ["ours", other], ask, lambda side: ask(side, -1))
    row.tokens = SEQUENCES * length
    row.floor_s = bench.machine.floor(0, bench.costs.train_flops(SEQUENCES, length))
    row.extra["length"] = length
    return row


def grpo(bench: Bench) -> list[Row]:
    """One step of both; generation and training of the same steps as rows of their own."""
    new_tokens = bench.scaled(GRPO_TOKENS)

    def ask(side: Side, number: int) -> dict[str, Any]:
        return side.ask(do="grpo", samples=GRPO_SAMPLES, new_tokens=new_tokens)

    whole = bench.in_turn(
        "grpo",
        f"one GRPO step, 8 prompts x 8 samples x {new_tokens} tokens",
        ["ours", "trl"],
        ask,
        lambda s: ask(s, -1),
    )
    whole.target = 2.0
    answers = whole.extra["answers"]
    sizes = {(one["prompt_tokens"], one["new_tokens"]) for given in answers.values() for one in given}
    if len(sizes) > 1:
        whole.problems.append(f"the sides did not run the same step: prompt and new tokens {sorted(sizes)}")
    different = sum(one["sequences_different"] for one in answers.get("ours", []))
    whole.note = f"our sequences with a token whose bits differ between engine and trainer: {different}"
    rows = [whole]
    for part, words in (("generate_s", "its generation"), ("train_s", "its training and update")):
        values = {name: [one[part] for one in given] for name, given in answers.items()}
        rows.append(Row(f"grpo-{part.removesuffix('_s')}", words, values.pop("ours", []), values))
    return rows


def memory(bench: Bench) -> Row:
    """The peak of resident memory of a process that does training steps, everything in it counted."""
    bench.end("ours-memory")  # a fresh process: nothing but the trainer shall be in it
    sequences, length, micro = (4, 64, 128) if bench.short else (8, 256, 1024)

    def ask(side: Side, number: int) -> dict[str, Any]:
        return side.ask(do="peak", sequences=sequences, length=length, seed=number, micro_batch_rows=micro)

    row = bench.in_turn(
        "memory",
        f"peak memory of a training step, micro-batches of {micro} tokens",
        ["ours-memory"],
        ask,
        lambda s: None,
        value="peak_bytes",
    )
    row.extra |= {"unit": "bytes", "limit_bytes": MEMORY_LIMIT}
    if row.ours:
        row.extra["holds"] = max(row.ours) < MEMORY_LIMIT
        row.note = f"to be under {MEMORY_LIMIT / 1e9:.0f} GB"
    bench.end("ours-memory")
    return row
