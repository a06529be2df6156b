"""What is put to the test: every op of a model's forward at the model's own shapes, ours or torch's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from zerogap import ops
from zerogap.models.config import ModelConfig

RowOp = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Place:
    """Where ops are put to the test: a device and the dtype of rows and weights there."""

    device: torch.device
    dtype: torch.dtype

    def normal(self, *shape: int) -> Tensor:
        """Return fixed random numbers there."""
        return _normal(*shape).to(self.device, self.dtype)

    def here(self, subject: Subject) -> Subject:
        """Return a subject that takes float32 rows of the CPU, runs there, and returns such rows."""
        if self == CPU:
            return subject
        return Subject(
            subject.name, subject.width, lambda x: subject.run(x.to(self.device, self.dtype)).to("cpu", torch.float32)
        )


CPU = Place(torch.device("cpu"), torch.float32)


@dataclass(frozen=True)
class Subject:
    """An op on rows [R, width] that must give each row the bits it has alone."""

    name: str
    width: int
    run: RowOp


def our_subjects(config: ModelConfig, place: Place = CPU) -> list[Subject]:
    """Return the ops of a model's forward, embedding and attention apart."""
    hidden, inner, heads, size = config.hidden_size, config.intermediate_size, config.num_heads, config.head_dim
    width, kv_width = heads * size, config.num_kv_heads * size
    vocab = config.vocab_size

    def linear(name: str, in_features: int, out_features: int, segments: int = 1) -> Subject:
        weight = place.normal(out_features, in_features) * in_features**-0.5
        return Subject(name, in_features, lambda x: ops.linear(x, weight, None, segments))

    norm, head_norm = 1 + 0.1 * place.normal(hidden), 1 + 0.1 * place.normal(size)
    head = place.normal(vocab, hidden) * hidden**-0.5
    cos, sin = (table[7].to(place.device, place.dtype) for table in config.rope.table(0))
    subjects = [
        Subject("rms_norm", hidden, lambda x: ops.rms_norm(x, norm, config.rms_norm_eps)),
        linear("q_proj", hidden, width),
        linear("k_proj, v_proj", hidden, kv_width),
        Subject("qk_norm", width, lambda x: _heads(x, size, lambda h: ops.rms_norm(h, head_norm, config.rms_norm_eps))),
        Subject(
            "rotary",
            width,
            lambda x: _heads(x, size, lambda h: ops.rotary(h, cos.expand(len(h), -1), sin.expand(len(h), -1))),
        ),
        linear("o_proj", width, hidden, ops.segment_count(width, unit=size)),
        linear("gate_proj, up_proj", hidden, inner),
        Subject("silu_mul", inner, lambda x: ops.silu_mul(x, x.flip(1))),
        linear("down_proj", inner, hidden, ops.segment_count(inner)),
        linear("lm_head", hidden, vocab),
        Subject("token_logprob", hidden, lambda x: _token_logprob(x, head)),
        Subject("kept sets", hidden, lambda x: _kept_sets(x, head)),
        Subject("sample", hidden, lambda x: _sample(x, head)),
    ]
    return [place.here(subject) for subject in subjects]


def torch_subjects(config: ModelConfig) -> list[Subject]:
    """Return torch's own ops at the same shapes: what an ordinary trainer or engine would call."""
    hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
    width, kv_width = config.num_heads * size, config.num_kv_heads * size

    def linear(name: str, in_features: int, out_features: int) -> Subject:
        weight = _normal(out_features, in_features) * in_features**-0.5
        return Subject(name, in_features, lambda x: functional.linear(x, weight))

    norm = 1 + 0.1 * _normal(hidden)
    return [
        Subject("rms_norm", hidden, lambda x: functional.rms_norm(x, (hidden,), norm, config.rms_norm_eps)),
        linear("q_proj", hidden, width),
        linear("k_proj, v_proj", hidden, kv_width),
        linear("o_proj", width, hidden),
        linear("gate_proj, up_proj", hidden, inner),
        Subject("silu_mul", inner, lambda x: functional.silu(x) * x.flip(1)),
        linear("down_proj", inner, hidden),
        linear("lm_head", hidden, config.vocab_size),
        Subject("log_softmax", config.vocab_size, lambda x: torch.log_softmax(x, dim=-1)),
        Subject("mean over a row", inner, lambda x: x.mean(1, keepdim=True)),
        Subject("sum over a vocabulary", config.vocab_size, lambda x: x.exp().sum(1, keepdim=True)),
    ]


def control_subject(config: ModelConfig, place: Place = CPU) -> Subject:
    """Return an op that is made to break the law: it splits its inner dimension by the number of rows."""
    hidden = config.hidden_size
    weight = place.normal(64, hidden) * hidden**-0.5

    def run(x: Tensor) -> Tensor:
        parts = torch.tensor_split(torch.arange(hidden), 1 + len(x) % 3)
        return torch.stack([ops.linear(x[:, part], weight[:, part]) for part in parts]).cumsum(0)[-1]

    return place.here(Subject("control: K split by row count", hidden, run))


def _heads(x: Tensor, size: int, run: RowOp) -> Tensor:
    return run(x.unflatten(1, (-1, size))).flatten(1)


def _token_logprob(x: Tensor, head: Tensor) -> Tensor:
    settings = ops.SamplerRows.uniform_settings(len(x), 0.8)
    return ops.token_logprobs(x, head, _token_one(x), settings).logprob_R.unsqueeze(1)


def _kept_sets(x: Tensor, head: Tensor) -> Tensor:
    """Return the log-prob of one token and the sizes of the kept sets under top-k, top-p and min-p together."""
    settings = ops.SamplerRows.uniform_settings(len(x), 0.7, 20, 0.9, 0.02)
    scored = ops.token_logprobs(3 * x, head, _token_one(x), settings, want_kept=True)
    assert scored.kept is not None
    digests = [-1.0 if kept is None else float(kept.sum()) for kept in scored.kept]
    return torch.stack((scored.logprob_R.cpu(), torch.tensor(digests)), 1)


def _sample(x: Tensor, head: Tensor) -> Tensor:
    settings = ops.SamplerRows.uniform_settings(len(x), 0.9, 0, 0.95)
    sampled = ops.sample(3 * x, head, settings, torch.full((len(x),), 0.625, dtype=torch.float64))
    return torch.stack((sampled.token_R.to(torch.float32), sampled.logprob_R), 1)


def _token_one(x: Tensor) -> Tensor:
    return torch.ones(len(x), dtype=torch.int64, device=x.device)


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
