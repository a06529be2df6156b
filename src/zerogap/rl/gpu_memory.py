"""How a run shares one GPU's memory between engine and trainer: worked out in bytes before anything is loaded.

Weights are there once for both sides (``engine.weights = "shared"``). Gradients, moments and KV cache stay; a
micro-batch's activations and an engine step take turns. What is left may all be KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from zerogap.engine.decode import decode_bytes
from zerogap.errors import UsageError
from zerogap.models.config import ModelConfig
from zerogap.models.rows import PagedCache
from zerogap.rl.config import Config
from zerogap.rl.memory import MemoryEstimate, gib

_LOGITS_AT_ONCE = 1 << 26  # ops.triton.logprob
_LOGIT_TABLES = 4  # logits, shifted, weights, gradient
_SHARE_KEPT_FREE = 0.05  # of what is free: the allocator's slack
_LIBRARIES = 512 * 2**20  # modules of kernels and the libraries' workspaces
_WORD = 4  # bytes of a float32


@dataclass(frozen=True)
class GpuPlan:
    """Bytes of a GPU's memory by what they are for.

    Attributes:
        weights: the trainer's, and the engine's if it has its own.
        gradients: one per weight.
        optimiser: AdamW's state.
        training: what one micro-batch keeps, and logits of a chunk of rows.
        rollout: activations and logits of an engine step; not at the same time as training.
        captured: scratch memory and inputs of captured decode steps, which stay.
        kv_cache: keys and values.
        slack: kept free for libraries and the allocator.
        free: what was free before the run.
        kv_least: KV cache that one sequence of the longest kind needs.
        page: bytes of a page of it.
        kv_chosen: the plan chose the KV cache's size, not the configuration.
    """

    weights: int
    gradients: int
    optimiser: int
    training: int
    rollout: int
    captured: int
    kv_cache: int
    slack: int
    free: int
    kv_least: int
    page: int
    kv_chosen: bool

    @property
    def total(self) -> int:
        """Peak in bytes."""
        return self.total_but_kv + self.kv_cache

    @property
    def total_but_kv(self) -> int:
        """Peak without the KV cache."""
        stays = self.weights + self.gradients + self.optimiser + self.captured + self.slack
        return stays + max(self.training, self.rollout)

    def parts(self) -> str:
        """Return the parts in words, largest first."""
        names = ("weights", "gradients", "optimiser", "training", "rollout", "captured", "kv_cache", "slack")
        sizes = {name: getattr(self, name) for name in names}
        return ", ".join(
            f"{name.replace('_', ' ').replace('kv', 'KV')} {gib(size)}"
            for name, size in sorted(sizes.items(), key=lambda item: -item[1])
        )

    def describe(self) -> str:
        """Return one line for the start of a run."""
        chosen = " (chosen)" if self.kv_chosen else ""
        return (
            f"GPU memory: {gib(self.total)} of {gib(self.free)} free, of which KV cache {gib(self.kv_cache)}{chosen}: "
            f"{self.parts()}; training and rollout take turns"
        )


def plan_gpu(
    config: Config, shape: ModelConfig, estimate: MemoryEstimate, longest: int, page: int, free: int
) -> GpuPlan:
    """Return how a run would fill a GPU.

    Without ``engine.kv_bytes`` and ``engine.num_pages`` the KV cache gets what is left, but not more than all
    ``engine.max_sequences`` sequences could fill.

    Args:
        config: the run.
        shape: the model.
        estimate: the run's needs, as `estimate_memory` says for backends without copies of their own.
        longest: prompt plus completion at most, tokens.
        page: bytes of a KV page.
        free: bytes of the GPU that nobody uses.
    """
    engine, train = config.engine, config.train
    rows = max(train.tokens_per_micro_batch, longest)
    logits = _LOGIT_TABLES * _WORD * min(rows * shape.vocab_size, _LOGITS_AT_ONCE + shape.vocab_size)
    head = _WORD * shape.vocab_size * shape.hidden_size
    decoding = min(engine.max_sequences, engine.max_rows_per_step)
    pages = -(-longest // engine.page_size)
    plan = GpuPlan(
        weights=estimate.weights + estimate.engine_weights,
        gradients=estimate.gradients,
        optimiser=estimate.optimiser,
        training=estimate.activations + logits + 2 * head,
        rollout=estimate.engine_step,
        # A captured step is a decode step whose scratch memory nobody else may use in between.
        captured=estimate.engine_step * decoding // engine.max_rows_per_step
        + decode_bytes(engine.max_sequences, longest, engine.page_size),
        kv_cache=0,
        slack=_LIBRARIES + int(free * _SHARE_KEPT_FREE),
        free=free,
        kv_least=pages * page,
        page=page,
        kv_chosen=engine.num_pages is None and engine.kv_bytes is None,
    )
    if engine.num_pages is not None:
        return replace(plan, kv_cache=(engine.num_pages + 1) * page)
    if engine.kv_bytes is not None:
        return replace(plan, kv_cache=engine.kv_bytes + page)
    most = engine.max_sequences * pages + 1
    left = max(0, free - plan.total_but_kv) // page
    return replace(plan, kv_cache=max(pages + 1, min(most, left)) * page)


def require_fit(plan: GpuPlan, device: str) -> None:
    """Refuse a run that its GPU cannot hold.

    Raises:
        UsageError: one line with the numbers and what would lower them.
    """
    if plan.total <= plan.free:
        return
    levers = []
    if not plan.kv_chosen and plan.kv_cache > plan.kv_least + plan.page:
        levers.append("lower engine.kv_bytes or engine.num_pages (or leave both out: the run takes what is left)")
    if plan.training > max(plan.rollout, plan.free // 20):
        levers.append("lower train.tokens_per_micro_batch or set train.gradient_checkpointing = true")
    if plan.rollout >= max(plan.training, plan.free // 20):
        levers.append("lower engine.max_rows_per_step or engine.max_sequences")
    held = plan.weights + plan.gradients + plan.optimiser
    if held > plan.free // 2 or not levers:
        levers.append("take a smaller model, a GPU with more memory, or end other programs on it")
    raise UsageError(
        f"model.device = {device}: the run needs {gib(plan.total)} of its memory and {gib(plan.free)} is free "
        f"({plan.parts()}); {'; '.join(levers)}"
    )


def fit_gpu(config: Config, shape: ModelConfig, estimate: MemoryEstimate, longest: int, page: int) -> GpuPlan:
    """Return the plan for the configured GPU as it is now.

    Raises:
        UsageError: the run does not fit.
    """
    free, _ = torch.cuda.mem_get_info(torch.device(config.model.device))
    plan = plan_gpu(config, shape, estimate, longest, page, free)
    require_fit(plan, config.model.device)
    return plan


def page_bytes(config: Config, shape: ModelConfig) -> int:
    """Return the bytes of a KV page on the configured device."""
    dtype = getattr(torch, config.model.dtype)
    return PagedCache.page_bytes(shape, config.engine.page_size, dtype, torch.device(config.model.device))


def host_part(estimate: MemoryEstimate) -> MemoryEstimate:
    """Return what a run on a GPU needs of the machine's memory: weights while they are read, and what stays there."""
    return replace(
        estimate,
        packed=0,
        engine_weights=0,
        gradients=0,
        optimiser=0,
        kv_cache=0,
        activations=0,
        lm_head=0,
        engine_step=0,
    )
