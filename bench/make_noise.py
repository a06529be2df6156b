"""Make ``bench/data/smollm2.parquet``: real log-probs of one small model under real faults, for ``bench/diagnoses.py``.

Each row is one sampled token of SmolLM2-135M-Instruct. The columns hold its log-prob in float32 and bfloat16 and
under a forward pass that carries one fault: other weights, other rotary base, other prompt, other sampler. Nothing is
simulated that the model can do itself; ``bench/diagnoses.py`` only picks rows and pairs columns.

    python bench/make_noise.py MODEL_FOLDER        # needs torch and transformers; about an hour on two cores
"""

from __future__ import annotations

import copy
import ctypes
import gc
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

OUT = Path(__file__).parent / "data" / "smollm2.parquet"
QUESTIONS = [
    "Explain why the sky is blue.",
    "A shop sells pens at 3 for 2 dollars. How much do 12 pens cost? Think step by step.",
    "Write a short story about a lighthouse keeper.",
    "Write a Python function that reverses a linked list.",
    "List the planets and one fact about each.",
    "What are the arguments for and against school uniforms?",
    "Describe how bread is made, step by step.",
    "Solve for x: 3x + 7 = 25. Explain every step.",
]
SAMPLES, NEW_TOKENS, TEMPERATURES = 8, 120, (0.6, 0.8, 1.2)
TOP_P, TOP_K, MIN_P, PENALTIES = (0.7, 0.8, 0.9, 0.95), (20,), (0.05,), (1.1, 1.2)


def kept_mask(probs: torch.Tensor, kind: str, value: float) -> torch.Tensor:
    """Which tokens a truncating sampler keeps, for probabilities [T, V]."""
    if kind == "top_k":
        return probs >= probs.topk(int(value), dim=-1).values[:, -1:]
    if kind == "min_p":
        return probs >= value * probs.max(dim=-1, keepdim=True).values
    ordered, index = probs.sort(dim=-1, descending=True)
    kept = torch.zeros_like(probs, dtype=torch.bool)
    return kept.scatter(-1, index, ordered.cumsum(-1) - ordered < value)


@torch.no_grad()
def main(folder: str) -> None:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def prompt(question: str, system: bool = True) -> list[int]:
        messages = [{"role": "user", "content": question}]
        if system:
            messages.insert(0, {"role": "system", "content": "You are a careful assistant named SmolLM."})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        if not system:  # the other template: no special markers at all
            text = f"User: {question}\nAssistant:"
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    sequences: list[tuple[int, list[int], list[int]]] = []
    for number, question in enumerate(QUESTIONS):
        ids = torch.tensor([prompt(question)])
        made = model.generate(
            ids,
            do_sample=True,
            top_k=0,
            top_p=1.0,
            temperature=1.0,
            max_new_tokens=NEW_TOKENS,
            num_return_sequences=SAMPLES,
            pad_token_id=tokenizer.pad_token_id,
        )
        for row in made[:, ids.shape[1] :].tolist():
            end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
            if end >= 16:
                sequences.append((number, ids[0].tolist(), row[:end]))
        print("generated", number, len(sequences), flush=True)

    variants = {"fp32": model}
    variants["bf16"] = copy.deepcopy(model).bfloat16()
    variants.update(updated_models(model, sequences))
    other = copy.deepcopy(model)
    other.config.rope_parameters["rope_theta"] = 10000.0
    rotary = type(other.model.rotary_emb)(config=other.config)
    other.model.rotary_emb = rotary
    variants["rope_10k"] = other
    for name, quantise in (("fp8", fp8), ("int4", int4)):
        other = copy.deepcopy(model)
        for module in other.model.layers.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.copy_(quantise(module.weight))
        variants[name] = other

    columns: dict[str, list[np.ndarray]] = {}

    def put(name: str, values: torch.Tensor | np.ndarray | list[int]) -> None:
        columns.setdefault(name, []).append(np.array(values, copy=True))

    for sample, (number, before, response) in enumerate(sequences):
        targets = torch.tensor(response)[:, None]
        length = len(response)

        def scores(name: str, context: list[int], response: list[int] = response) -> torch.Tensor:
            ids = torch.tensor([context + response])
            return variants[name](ids, logits_to_keep=len(response) + 1).logits[0, :-1]

        def chosen(logits: torch.Tensor, targets: torch.Tensor = targets) -> torch.Tensor:
            return logits.float().log_softmax(-1).gather(-1, targets)[:, 0]

        logits = scores("fp32", before)
        logits16 = scores("bf16", before)
        put("sample", [sample] * length)
        put("prompt", [number] * length)
        put("prompt_length", [len(before)] * length)
        put("position", list(range(length)))
        put("token_id", response)
        put("lp_fp32", chosen(logits))
        put("lp_bf16", chosen(logits16))
        put("lp_bf16_softmax", logits16.log_softmax(-1).gather(-1, targets)[:, 0].float())
        put("lp_other_lse", (logits.double().gather(-1, targets) - logits.double().logsumexp(-1, True))[:, 0].float())
        for name in variants:
            if name not in ("fp32", "bf16"):
                put(f"lp_{name}", chosen(scores(name, before)))
        put("lp_template", chosen(scores("fp32", prompt(QUESTIONS[number], system=False))))
        neighbour = sequences[sample - 1]
        put("lp_packed", chosen(scores("fp32", neighbour[1] + neighbour[2] + before)))
        pads = (sample * 7) % 41
        put("left_pad", [pads] * length)
        put("lp_left_pad", chosen(scores("fp32", [tokenizer.pad_token_id] * pads + before)))
        for name in ("updated_1e-4",):  # the prompt's keys and values from before the update
            cache = DynamicCache()
            model(torch.tensor([before[:-1]]), past_key_values=cache)
            ids = torch.tensor([before[-1:] + response])
            put(f"lp_stale_kv_{name}", chosen(variants[name](ids, past_key_values=cache).logits[0, :-1]))
        sampler_columns(put, logits, logits16, before, response)
        release_memory()
        print("scored", sample, len(sequences), flush=True)
        if sample % 8 == 7:
            save(columns)
    save(columns)


def release_memory() -> None:
    """Give freed logits back to the system; glibc keeps them in its arenas otherwise."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def save(columns: dict[str, list[np.ndarray]]) -> None:
    table = pa.table({name: np.concatenate(parts) for name, parts in columns.items()})
    table = table.cast(
        pa.schema([(f.name, pa.int32() if pa.types.is_integer(f.type) else pa.float32()) for f in table.schema])
    )
    OUT.parent.mkdir(exist_ok=True)
    numbers = [f.name for f in table.schema if pa.types.is_floating(f.type)]
    pq.write_table(
        table, OUT, compression="zstd", compression_level=19,
        use_dictionary=[name for name in table.column_names if name not in numbers],
        column_encoding=dict.fromkeys(numbers, "BYTE_STREAM_SPLIT"),
    )  # fmt: skip
    print(OUT, table.num_rows)


def sampler_columns(put, logits, logits16, before, response) -> None:  # type: ignore[no-untyped-def]
    """Tokens drawn from each sampler at the real contexts, with the engine's and the trainer's log-probs."""
    raw16 = logits16.float().log_softmax(-1)

    def draw(name: str, engine: torch.Tensor, mass: torch.Tensor | None = None, **trainer: torch.Tensor) -> None:
        token = torch.multinomial(engine.exp(), 1)
        put(f"{name}_token", token[:, 0])
        put(f"{name}_engine", engine.gather(-1, token)[:, 0])
        for key, value in {"trainer": raw16, **trainer}.items():
            put(f"{name}_{key}", value.gather(-1, token)[:, 0])
        if mass is not None:
            put(f"{name}_mass", mass)

    for t in TEMPERATURES:
        draw(f"t{t}", (logits / t).log_softmax(-1))
    probs = logits.softmax(-1)
    for kind, values in (("top_p", TOP_P), ("top_k", TOP_K), ("min_p", MIN_P)):
        for value in values:
            kept = kept_mask(probs, kind, value)
            draw(f"{kind}{value}", logits.masked_fill(~kept, -torch.inf).log_softmax(-1), (raw16.exp() * kept).sum(-1))
    for penalty in PENALTIES:
        changed = logits.clone()
        for row in range(len(response)):
            seen = torch.tensor(sorted(set(before + response[:row])))
            value = changed[row, seen]
            changed[row, seen] = torch.where(value > 0, value / penalty, value * penalty)
        draw(f"penalty{penalty}", changed.log_softmax(-1))


@torch.enable_grad()
def updated_models(model, sequences) -> dict:  # type: ignore[no-untyped-def]
    """The model after one sign-of-gradient update (what Adam's first step is) at a high learning rate."""
    work = copy.deepcopy(model)
    for _, before, response in sequences[:: max(1, len(sequences) // 8)]:
        ids = torch.tensor([before + response])
        labels = ids.clone()
        labels[:, : len(before)] = -100
        work(ids, labels=labels).loss.backward()
    made = {}
    for rate in (1e-4,):
        other = copy.deepcopy(model)
        with torch.no_grad():
            for new, old in zip(other.parameters(), work.parameters(), strict=True):
                new -= rate * old.grad.sign()
        made[f"updated_{rate:.0e}".replace("e-0", "e-")] = other
    return made


def fp8(weight: torch.Tensor) -> torch.Tensor:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


def int4(weight: torch.Tensor) -> torch.Tensor:
    groups = weight.reshape(weight.shape[0], -1, 32)
    scale = groups.abs().amax(-1, keepdim=True) / 7
    return ((groups / scale).round().clamp(-7, 7) * scale).reshape(weight.shape)


if __name__ == "__main__":
    main(sys.argv[1])
