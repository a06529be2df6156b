"""Make the shipped model ``src/zerogap/data/tiny-qwen3``: a Qwen3 of 0.8 M parameters that half knows two-digit addition.

Supervised warm-up on ``"{a}+{b}="`` → ``"{a+b}<eos>"`` with plain torch and transformers, stopped as soon as the model
answers about two held-out sums in five when sampled at temperature 1: it has learned how carries work but is still
unsure, which is where reinforcement learning has something to reinforce. Held-out pairs are never trained on.

Simplification chosen: one fixed learning rate after a short ramp and no dropout, since the run is stopped in the middle
of its descent anyway.

    python scripts/make_tiny_qwen3.py [--out FOLDER] [--seed 0] [--target 0.40]

The same seed, torch version and kind of CPU give the same weights; elsewhere the last bits, and with them the
update at which the target is reached, may differ.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import tokenizers
import torch
import transformers
from tokenizers import Tokenizer, decoders, models
from torch.nn.functional import cross_entropy, log_softmax

ROOT = Path(__file__).resolve().parent.parent
SPECIALS = ("<pad>", "<eos>", "<unk>")
CHARACTERS = "0123456789+-*/= \n.,:;?!'\"()<>[]{}_|abcdefghijklmnopqrstuvwxyz"
PAD, EOS, IGNORED = 0, 1, -100
PROMPT_LENGTH = 6  # "10+10=" to "99+99="
ROW_LENGTH = PROMPT_LENGTH + 4  # up to three digits and <eos>
BATCH, MAX_UPDATES, RAMP, LEARNING_RATE, EVALUATE_EVERY = 64, 4000, 100, 1e-3, 10
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
Pair = tuple[int, int]


def is_held_out(a: int, b: int) -> bool:
    """Return whether the sum belongs to the held-out split, about a tenth of all pairs (the same rule as the task's)."""
    return hashlib.blake2b(f"{a}+{b}".encode()).digest()[0] < 26


def split_pairs() -> tuple[list[Pair], list[Pair]]:
    """Return (training pairs, held-out pairs) of all operands from 10 to 99."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    return [p for p in pairs if not is_held_out(*p)], [p for p in pairs if is_held_out(*p)]


def build_tokenizer() -> Tokenizer:
    """Return a tokenizer of one token per character; a character it does not know becomes ``<unk>``."""
    vocabulary = {token: i for i, token in enumerate((*SPECIALS, *CHARACTERS))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer


def build_model(vocab_size: int, seed: int) -> transformers.Qwen3ForCausalLM:
    """Return a freshly initialised Qwen3 of 4 layers and 0.8 M parameters."""
    torch.manual_seed(seed)
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=vocab_size,
            hidden_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            intermediate_size=384,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            pad_token_id=PAD,
            eos_token_id=EOS,
            bos_token_id=None,
        )
    )


def build_rows(pairs: Sequence[Pair], tokenizer: Tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (tokens, labels) of shape [pairs, ROW_LENGTH]; labels stand only on the answer and its ``<eos>``."""
    tokens, labels = [], []
    for a, b in pairs:
        prompt, answer = tokenizer.encode(f"{a}+{b}=").ids, [*tokenizer.encode(str(a + b)).ids, EOS]
        padding = ROW_LENGTH - PROMPT_LENGTH - len(answer)
        tokens.append(prompt + answer + [PAD] * padding)
        labels.append([IGNORED] * PROMPT_LENGTH + answer + [IGNORED] * padding)
    return torch.tensor(tokens), torch.tensor(labels)


@torch.no_grad()
def expected_accuracy(model: transformers.Qwen3ForCausalLM, tokens: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the mean probability of the whole right answer: the expected accuracy of sampling at temperature 1."""
    logprobs = log_softmax(model(tokens).logits[:, :-1].float(), dim=-1)
    wanted = labels[:, 1:]
    per_token = logprobs.gather(-1, wanted.clamp_min(0)[..., None]).squeeze(-1)
    return per_token.masked_fill(wanted == IGNORED, 0.0).sum(dim=1).exp().mean().item()


@torch.no_grad()
def sampled_accuracy(model: transformers.Qwen3ForCausalLM, tokens: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of right answers of one sample per row at temperature 1."""
    torch.manual_seed(0)
    replies = model.generate(
        tokens[:, :PROMPT_LENGTH], do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=4
    )[:, PROMPT_LENGTH:]
    replies = torch.nn.functional.pad(replies, (0, 4 - replies.shape[1]), value=PAD)
    wanted = labels[:, PROMPT_LENGTH:]
    return ((replies == wanted) | (wanted == IGNORED)).all(dim=1).float().mean().item()


def warm_up(
    model: transformers.Qwen3ForCausalLM, tokenizer: Tokenizer, seed: int, target: float
) -> tuple[int, float, float]:
    """Train until the held-out expected accuracy reaches ``target``.

    Returns:
        (updates made, expected accuracy, accuracy of one sample per held-out pair).
    """
    training, held_out = split_pairs()
    tokens, labels = build_rows(training, tokenizer)
    held_tokens, held_labels = build_rows(held_out, tokenizer)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.01)
    ramp = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: min(1.0, (update + 1) / RAMP))
    accuracy = 0.0
    for update in range(1, MAX_UPDATES + 1):
        drawn = torch.randint(len(training), (BATCH,), generator=generator)
        logits = model(tokens[drawn]).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels[drawn][:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ramp.step()
        if update % EVALUATE_EVERY == 0:
            accuracy = expected_accuracy(model, held_tokens, held_labels)
            if update % 50 == 0 or accuracy >= target:
                print(f"update {update:4d}  loss {loss.item():.4f}  held-out accuracy {accuracy:.4f}", flush=True)
            if accuracy >= target:
                return update, accuracy, sampled_accuracy(model, held_tokens, held_labels)
    raise SystemExit(f"error: accuracy {accuracy:.3f} after {MAX_UPDATES} updates, below {target}: try another --seed")


def readme(seed: int, updates: int, expected: float, sampled: float, parameters: int) -> str:
    """Return the folder's README."""
    training, held_out = split_pairs()
    return f"""# tiny-qwen3

A Qwen3-architecture model of {parameters:,} float32 parameters, made for zerogap's quick start and tests. It continues
`"{{a}}+{{b}}="` (operands 10 to 99) with the sum and `<eos>`, and is right about two times in five when sampled at
temperature 1. One token per character; unknown characters become `<unk>`. The chat template joins the messages.

Made by `scripts/make_tiny_qwen3.py` from random weights by supervised training on generated sums; no other data.

| | |
|---|---|
| seed | {seed} |
| updates | {updates} of {BATCH} sums, AdamW, learning rate {LEARNING_RATE:g} |
| training pairs / held-out pairs | {len(training)} / {len(held_out)} (held out: `blake2b(b"a+b").digest()[0] < 26`) |
| held-out accuracy at temperature 1, expected | {expected:.4f} |
| held-out accuracy at temperature 1, one sample per pair | {sampled:.4f} |
| versions | Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}, \
tokenizers {tokenizers.__version__} |
| licence | Apache-2.0, as zerogap |
"""


def write_folder(folder: Path, model: transformers.Qwen3ForCausalLM, tokenizer: Tokenizer, text: str) -> None:
    """Write the Hugging Face folder to ``folder``, whole or not at all; an earlier one is replaced."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        new, old = temporary / "new", temporary / "old"
        new.mkdir(mode=0o755)
        model.save_pretrained(new)
        tokenizer.save(str(new / "tokenizer.json"))
        tokenizer_config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": model.config.max_position_embeddings,
            "clean_up_tokenization_spaces": False,
            "pad_token": SPECIALS[PAD],
            "eos_token": SPECIALS[EOS],
            "unk_token": SPECIALS[2],
            "chat_template": CHAT_TEMPLATE,
        }
        generation_config = {"do_sample": True, "eos_token_id": EOS, "pad_token_id": PAD}
        (new / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n", encoding="utf-8")
        (new / "generation_config.json").write_text(json.dumps(generation_config, indent=2) + "\n", encoding="utf-8")
        (new / "README.md").write_text(text, encoding="utf-8")
        for path in new.iterdir():
            path.chmod(0o644)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def main() -> int:
    """Train, then write the folder."""
    parser = argparse.ArgumentParser(description="Make the shipped model tiny-qwen3.")
    parser.add_argument("--out", type=Path, default=ROOT / "src/zerogap/data/tiny-qwen3", help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights and of the batches")
    parser.add_argument("--target", type=float, default=0.40, help="held-out accuracy at which to stop")
    arguments = parser.parse_args()
    torch.set_num_threads(2)  # fixed, since the thread count may change the order of sums
    torch.use_deterministic_algorithms(True)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer.get_vocab_size(), arguments.seed)
    updates, expected, sampled = warm_up(model, tokenizer, arguments.seed, arguments.target)
    parameters = sum(p.numel() for p in model.parameters())
    text = readme(arguments.seed, updates, expected, sampled, parameters)
    write_folder(arguments.out.resolve(), model, tokenizer, text)
    print(f"{arguments.out}: {parameters:,} parameters, {updates} updates, held-out accuracy at temperature 1:")
    print(f"{expected:.4f} expected, {sampled:.4f} with one sample per pair")
    return 0


if __name__ == "__main__":
    sys.exit(main())
