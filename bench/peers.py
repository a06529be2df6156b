"""Rollout and training speed against Hugging Face transformers, in turn in one process: one table of ratios.

    python bench/peers.py MODEL_FOLDER [--sequences 1 8 32] [--new-tokens 32] [--rounds 3]

Both sides run float32 on the same threads. Ours returns the exact log-prob of every token; theirs returns none in
generation. A figure is the best of the rounds, which alternate between the two sides.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import transformers
from rich.console import Console
from rich.table import Table

from zerogap.engine import Engine, EngineConfig, Request, SamplingParams
from zerogap.models.rows import PackedCache, Rows
from zerogap.models.tokenizer import load_tokenizer
from zerogap.models.weights import load_decoder
from zerogap.ops import portable as ops

PROMPT_TOKENS = 32


def best(ours: Callable[[], None], theirs: Callable[[], None], rounds: int) -> tuple[float, float]:
    """Return the shortest time of each side in seconds, run in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for side, run in enumerate((ours, theirs)):
            began = time.perf_counter()
            run()
            times[side].append(time.perf_counter() - began)
    return min(times[0]), min(times[1])


def rollout(folder: Path, model: torch.nn.Module, sequences: int, new_tokens: int, rounds: int) -> tuple[float, float]:
    engine = Engine(load_decoder(folder), load_tokenizer(folder), EngineConfig(kv_bytes=2**29))
    prompts = torch.randint(model.config.vocab_size, (sequences, PROMPT_TOKENS))
    step = 0

    def ours() -> None:
        nonlocal step
        step += 1
        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
        done = engine.generate([Request((step, i, 0), tuple(row), params) for i, row in enumerate(prompts.tolist())])
        assert sum(len(one.tokens) for one in done) == sequences * new_tokens

    def theirs() -> None:
        with torch.inference_mode():
            model.generate(prompts, do_sample=True, max_new_tokens=new_tokens, min_new_tokens=new_tokens, top_k=0)

    return best(ours, theirs, rounds)


def training(folder: Path, model: torch.nn.Module, sequences: int, length: int, rounds: int) -> tuple[float, float]:
    decoder = load_decoder(folder)
    tokens = torch.randint(model.config.vocab_size, (sequences, length))
    scored = torch.arange(sequences * length).view(sequences, length)[:, :-1].flatten()
    targets = tokens[:, 1:].flatten()

    def ours() -> None:
        hidden = decoder.hidden(Rows.packed(tokens.tolist()), PackedCache())[scored]
        settings = ops.SamplerRows.uniform_settings(len(scored))
        ops.token_logprobs(hidden, decoder.lm_head_weight, targets, settings).logprob_R.mean().backward()
        decoder.zero_grad()

    def theirs() -> None:
        logits = model(tokens).logits[:, :-1].flatten(0, 1)
        torch.log_softmax(logits, -1).gather(1, targets.unsqueeze(1)).mean().backward()
        model.zero_grad()

    return best(ours, theirs, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    model = transformers.AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32)
    model.generation_config.pad_token_id = 0
    table = Table("what", "ours tok/s", "transformers tok/s", "ratio")

    def row(what: str, tokens: int, times: tuple[float, float]) -> None:
        table.add_row(what, *(f"{tokens / seconds:,.0f}" for seconds in times), f"{times[1] / times[0]:.2f}")

    for count in options.sequences:
        tokens = count * options.new_tokens
        row(
            f"generate, {count} sequences",
            tokens,
            rollout(options.folder, model, count, options.new_tokens, options.rounds),
        )
    row("forward + backward, 8 x 128", 8 * 128, training(options.folder, model, 8, 128, options.rounds))
    Console().print(f"{options.folder.name}, float32, {torch.get_num_threads()} threads, torch {torch.__version__}")
    Console().print(table)


if __name__ == "__main__":
    main()
