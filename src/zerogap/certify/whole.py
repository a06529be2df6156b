"""End to end and backward: engine against trainer over sampled sequences, repeatability, gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from zerogap import ops
from zerogap.certify.rows import THREADS, torch_threads
from zerogap.certify.subjects import CPU, Place
from zerogap.engine import Completion, Engine, EngineConfig, Request, SamplingParams
from zerogap.models.config import ModelConfig
from zerogap.models.decoder import Decoder
from zerogap.models.tokenizer import Tokenizer
from zerogap.ops import ambient, backend
from zerogap.trainer import SequenceSampler, TrainSequence, score
from zerogap.trainer.fingerprint import fingerprint

Op = Callable[..., Tensor]
_SAMPLERS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 8},
    {"top_p": 0.8},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
)
_ENGINES: tuple[dict[str, Any], ...] = (
    {"page_size": 16, "max_rows_per_step": 512},
    {"page_size": 3, "max_rows_per_step": 7},
    {"page_size": 4, "max_rows_per_step": 64, "prefix_cache": False},
)


@dataclass(frozen=True)
class WholeVerdict:
    """Tokens compared and different, or a plain yes or no with what was seen."""

    name: str
    comparisons: int
    holds: bool
    detail: str = ""


def check_end_to_end(decoder: Decoder, tokenizer: Tokenizer, full: bool) -> list[WholeVerdict]:
    """Sample with the engine under every sampler, and score the same tokens with the trainer's forward.

    Requests share prompts (cache hits) and differ in length; one engine has pages for few sequences (preemption).
    """
    verdicts = []
    tokens, prompts = (32, 6) if full else (12, 3)
    for number, settings in enumerate(_SAMPLERS):
        compared, different = 0, 0
        for turn, sizes in enumerate(_ENGINES):
            pages = 2 + (tokens + 40) // sizes["page_size"] * (3 if turn == 1 else 4 * prompts)
            engine = Engine(copy.deepcopy(decoder), tokenizer, EngineConfig(num_pages=pages, **sizes))
            params = SamplingParams(max_tokens=tokens, min_tokens=2, **settings)
            requests = [
                Request((number, prompt, sample), _prompt(decoder.config, prompt), replace(params, seed=turn))
                for prompt in range(prompts)
                for sample in range(2)
            ]
            with torch_threads(THREADS[turn]):
                completions = engine.generate(requests)
            sequences = [_sequence(completion) for completion in completions]
            with torch_threads(THREADS[-1 - turn]), ambient.guard():
                scores = score(decoder, sequences, micro_batch_rows=(2048, 50, 17)[turn])
            for sequence, scored in zip(sequences, scores, strict=True):
                words, ours = (x.view(torch.int32) for x in (sequence.trained_logprobs_engine, scored.logprob_T))
                compared += len(words)
                different += int((words != ours).sum())
        rounded = " (weights in bfloat16)" if decoder.weights == "bfloat16" else ""
        name = f"engine against trainer{rounded}: " + (
            ", ".join(f"{k} {v}" for k, v in settings.items()) or "plain sampling"
        )
        verdicts.append(WholeVerdict(name, compared, different == 0, f"{different} tokens differ" if different else ""))
    return verdicts


def check_repeatability(config: ModelConfig, place: Place = CPU) -> WholeVerdict:
    """Compute one update twice: forward, backward and AdamW must give the same weights."""
    first, second = (fingerprint(config, place.device, place.dtype) for _ in range(2))
    return WholeVerdict("the same update twice", 1, first == second, "" if first == second else "other weights")


def check_gradients(config: ModelConfig, place: Place = CPU) -> list[WholeVerdict]:
    """Compare each op's gradient with float64 autograd of the plain mathematics.

    Portable ops in float64, where only a wrong formula differs; kernels of other backends in the float32 that they
    compute in, held to its precision.
    """
    on_cpu = place == CPU
    single = not on_cpu or backend.cpu_backend() == "native"
    limit = 1e-4 if not on_cpu else 1e-5 if single else 1e-10
    hidden, size = config.hidden_size, config.head_dim
    heads, groups = config.num_heads, config.num_kv_heads
    x, weight, gate = _leaf(9, hidden), _leaf(48, hidden), _leaf(9, hidden)
    q, k, v = _leaf(40, heads, size), _leaf(40, groups, size), _leaf(40, groups, size)
    plan = ops.AttentionPlan.build([ops.Chunk(0, 40, range(40))], 1)
    prompt, fork, rest = range(33), range(33, 36), range(36, 40)  # two responses behind one prompt, as in training
    forked = ops.AttentionPlan.build(
        [ops.Chunk(0, 33, prompt), ops.Chunk(33, 3, [*prompt, *fork]), ops.Chunk(33, 4, [*prompt, *rest])], 1
    )
    target = torch.arange(9, device=place.device)
    settings = ops.SamplerRows.uniform_settings(9, 0.7)
    share = heads // groups
    # (our op, the mathematics, inputs)
    cases: dict[str, tuple[Op, Op, tuple[Tensor, ...]]] = {
        "linear": (ops.linear, functional.linear, (x, weight)),
        "rms_norm": (lambda x, w: ops.rms_norm(x, w[0], 1e-6), lambda x, w: _norm(x, w[0]), (x, gate)),
        "silu_mul": (ops.silu_mul, lambda gate, x: functional.silu(gate) * x, (gate, x)),
        "attention": (
            lambda q, k, v: ops.attention(q, k, v, plan, size**-0.5),
            lambda q, k, v: _causal(q, k, v, share, [range(40)]),
            (q, k, v),
        ),
        "attention behind a shared prompt": (
            lambda q, k, v: ops.attention(q, k, v, forked, size**-0.5),
            lambda q, k, v: _causal(q, k, v, share, [[*prompt, *fork], [*prompt, *rest]])[[*range(36), *range(69, 73)]],
            (q, k, v),
        ),
        "token_logprob": (
            lambda x, w: ops.token_logprobs(x, w, target, settings).logprob_R,
            lambda x, w: torch.log_softmax(x @ w.T / 0.7, -1).gather(1, target.cpu().unsqueeze(1)).squeeze(1),
            (x, weight),
        ),
    }
    verdicts = []
    for name, (our_op, mathematics, inputs) in cases.items():
        kind = torch.float32 if single else torch.float64
        mine = tuple(leaf.detach().to(place.device, kind).requires_grad_() for leaf in inputs)
        ours, theirs = our_op(*mine), mathematics(*inputs)
        upstream = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        error = max(
            float((a.cpu().double() - b).abs().max() / b.abs().max().clamp(min=1))
            for a, b in zip(
                torch.autograd.grad(ours, mine, upstream.to(ours.device, ours.dtype)),
                torch.autograd.grad(theirs, inputs, upstream),
                strict=True,
            )
        )
        verdicts.append(WholeVerdict(f"gradient of {name}", 1, error < limit, f"relative error {error:.1e}"))
    return verdicts


def _causal(q: Tensor, k: Tensor, v: Tensor, share: int, sequences: Sequence[Sequence[int]]) -> Tensor:
    """Return causal attention of sequences, each given by its rows, one after the other; keys serve ``share`` heads."""
    q, k, v = (x.transpose(0, 1) for x in (q, k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)))
    parts = []
    for sequence in sequences:
        rows = list(sequence)
        parts.append(functional.scaled_dot_product_attention(q[:, rows], k[:, rows], v[:, rows], is_causal=True))
    return torch.cat(parts, 1).transpose(0, 1)


def random_decoder(config: ModelConfig) -> Decoder:
    """Return a decoder of the shapes with random weights, for a model whose weights are not at hand."""
    decoder = Decoder(config)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            scale = 0.1 if weight.dim() == 1 else weight.shape[-1] ** -0.5
            weight.normal_(1.0 if name.endswith("norm.weight") else 0.0, scale, generator=generator)
    return decoder


def _sequence(completion: Completion) -> TrainSequence:
    params = completion.params
    return TrainSequence(
        key=completion.key,
        tokens=[*completion.prompt, *completion.tokens],
        prompt_length=len(completion.prompt),
        logprobs_engine=torch.tensor(completion.logprobs, dtype=torch.float32),
        loss_mask=torch.ones(len(completion.tokens), dtype=torch.bool),
        advantage=1.0,
        weights_version=0,
        sampler=SequenceSampler(
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            tuple(
                (i, tuple(sorted(params.stop_ids))) for i in range(min(2, len(completion.tokens))) if params.stop_ids
            ),
        ),
    )


def _prompt(config: ModelConfig, number: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(number)
    shared = torch.randint(config.vocab_size, (5,), generator=torch.Generator().manual_seed(0))
    own = torch.randint(config.vocab_size, (1 + 9 * number,), generator=generator)
    return (*shared.tolist(), *own.tolist())


def _leaf(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight
