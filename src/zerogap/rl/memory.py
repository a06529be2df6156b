"""How much memory a run needs, from its configuration and the model's shape, and how much there is."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from zerogap.errors import UsageError
from zerogap.rl.config import Config

KV_BYTES = 256 * 2**20  # KV cache on the CPU where the configuration does not say
_BASE = (
    350 * 2**20
)  # interpreter and libraries, resident before any tensor: 260 MiB measured, and the allocator's slack
_REWARD_WORKER = 45 * 2**20  # a bare worker; what the reward function imports comes on top
_LM_HEAD_ROWS = 64  # rows whose logits exist at once (ops.portable.logprob)
_NATIVE_HEAD_ROWS = 256  # rows whose gradients of logits do (ops.native.logprob), beyond those of kept logits
_KEPT_LOGITS = 512 * 2**20  # bytes of logits that a forward keeps (ops.native.logprob)
_WORD = 4  # bytes of a float32
_HALF = 2  # of a bfloat16
_KEPT_SET = 500  # bytes of a kept set beside its content: a tensor of its own


class Shape(Protocol):
    """The sizes of a decoder (``zerogap.models.ModelConfig`` has them)."""

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding table."""
        ...

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        ...

    @property
    def intermediate_size(self) -> int:
        """Inner width of the MLP."""
        ...

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        ...

    @property
    def num_heads(self) -> int:
        """Query heads."""
        ...

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads."""
        ...

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        ...

    @property
    def tie_embeddings(self) -> bool:
        """Whether the LM head is the embedding table."""
        ...


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by what they are for.

    Attributes:
        weights: the trainer's weights.
        packed: what the native kernels compute with beside the weights, once per copy of the weights.
        engine_weights: the engine's copy, if it has one.
        gradients: one per weight.
        optimiser: AdamW's two moments, and the masters of weights in bfloat16.
        kv_cache: the engine's keys and values.
        activations: what the backward pass of one micro-batch keeps.
        lm_head: logits of one chunk of rows and the head's gradient before it is added.
        kept_sets: with more than one update per rollout, what the sampler left of the vocabulary at every token: a bit
            per token of the vocabulary at most.
        engine_step: activations and logits of one engine step; not at the same time as the two before.
        processes: this process before any tensor, and the reward workers.
    """

    weights: int
    packed: int
    engine_weights: int
    gradients: int
    optimiser: int
    kv_cache: int
    activations: int
    lm_head: int
    kept_sets: int
    engine_step: int
    processes: int

    @property
    def total(self) -> int:
        """Peak in bytes: training and rollout take turns, the rest stays."""
        stays = self.weights + self.packed + self.engine_weights + self.gradients + self.optimiser
        stays += self.kv_cache + self.processes
        return stays + max(self.activations + self.lm_head + self.kept_sets, self.engine_step)

    def parts(self) -> str:
        """Return the parts in words, largest first."""
        names = {
            "weights": self.weights,
            "packed weights": self.packed,
            "engine weights": self.engine_weights,
            "gradients": self.gradients,
            "AdamW": self.optimiser,
            "KV cache": self.kv_cache,
            "activations": self.activations + self.lm_head,
            "kept sets": self.kept_sets,
            "engine step": self.engine_step,
            "processes": self.processes,
        }
        ordered = sorted(names.items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {gib(size)}" for name, size in ordered)


def parameter_count(shape: Shape) -> int:
    """Return the number of weights, without the few of norms and biases."""
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer = shape.hidden_size * (2 * queries + 2 * keys + 3 * shape.intermediate_size)
    tables = 1 if shape.tie_embeddings else 2
    return shape.num_layers * layer + tables * shape.vocab_size * shape.hidden_size


def estimate_memory(config: Config, shape: Shape, longest_sequence: int, native: bool = False) -> MemoryEstimate:
    """Return the memory that a run needs at its peak; measured peaks lay between 5 % above and 25 % below it.

    Args:
        config: the run.
        shape: the model.
        longest_sequence: prompt plus completion at most, tokens.
        native: the native kernels compute, over packed copies of the matrices.
    """
    word = _WORD if config.model.dtype == "float32" else _HALF  # of weights and rows
    parameters = parameter_count(shape)
    masters = 0 if word == _WORD else parameters * _WORD
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    # Tensors that the backward pass of one layer needs: both residuals and both norms' outputs; queries and keys
    # before their norm and after the rotation, values, attention output; gate, up and their product.
    layer_row = word * (4 * shape.hidden_size + 3 * queries + 3 * keys + 3 * shape.intermediate_size)
    stream_row = word * shape.hidden_size
    sequences = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    rows = min(max(config.train.tokens_per_micro_batch, longest_sequence), _step_rows(config, longest_sequence))
    if config.train.gradient_checkpointing:
        activations = rows * (shape.num_layers * stream_row + 2 * layer_row)
    else:
        activations = rows * (shape.num_layers + 1) * layer_row
    head = _WORD * shape.vocab_size * shape.hidden_size
    page = 2 * shape.num_layers * keys * config.engine.page_size * word
    kv_cache = _kv_bytes(config) if config.engine.num_pages is None else config.engine.num_pages * page
    engine_rows = config.engine.max_rows_per_step
    decoding = min(config.engine.max_sequences, engine_rows)
    sides = 1 if config.engine.weights == "shared" else 2
    kept_rows = min(rows, _KEPT_LOGITS // (shape.vocab_size * _WORD))
    head_rows = min(rows, kept_rows + _NATIVE_HEAD_ROWS) if native else 4 * _LM_HEAD_ROWS
    return MemoryEstimate(
        weights=parameters * word,
        packed=sides * _packed(config, shape) if native else 0,
        engine_weights=(sides - 1) * parameters * word,
        gradients=parameters * _WORD,
        optimiser=2 * parameters * _WORD + masters,
        kv_cache=kv_cache,
        activations=activations,
        lm_head=head_rows * shape.vocab_size * _WORD + 2 * head,
        kept_sets=_kept_sets(config, shape, sequences * longest_sequence),
        engine_step=engine_rows * layer_row + 6 * decoding * shape.vocab_size * _WORD,
        processes=_BASE + config.reward.workers * _REWARD_WORKER,
    )


def _kv_bytes(config: Config) -> int:
    return config.engine.kv_bytes or KV_BYTES


def _step_rows(config: Config, longest_sequence: int) -> int:
    """Return the most rows of a step's sequences: a prompt counts once for its samples.

    A custom rollout may add any number of tokens of its own after the prompt, so nothing is known of its share.
    """
    rollout = config.rollout
    if config.task.rollout is not None:
        return rollout.prompts_per_step * rollout.samples_per_prompt * longest_sequence
    response = min(rollout.max_tokens, longest_sequence)
    return rollout.prompts_per_step * (longest_sequence - response + rollout.samples_per_prompt * response)


def _packed(config: Config, shape: Shape) -> int:
    """Return the bytes of the packed copies: every matrix but an embedding that is no LM head; rounded, its table."""
    table = shape.vocab_size * shape.hidden_size
    matrices = parameter_count(shape) - (0 if shape.tie_embeddings else table)
    if config.model.weights == "float32":
        return matrices * _WORD
    return (matrices + table) * _WORD // 2


def _kept_sets(config: Config, shape: Shape, tokens: int) -> int:
    rollout = config.rollout
    whole = rollout.top_k == 0 and rollout.top_p == 1 and rollout.min_p == 0
    if config.train.updates_per_rollout == 1 or whole:
        return 0
    bitmask = -(-shape.vocab_size // 8)
    largest = min(bitmask, rollout.top_k * _WORD) if rollout.top_k else bitmask
    return tokens * (largest + _KEPT_SET)


def available_memory(cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Return the bytes this process may still use: the machine's available memory, or less where something limits it.

    Limits are cgroups and ``ulimit -v``. Page cache that the kernel can drop counts as available.
    """
    limits = [limit for folder in _own_cgroups(cgroups, own) if (limit := _cgroup_room(folder)) is not None]
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        limits.append(address_space - psutil.Process().memory_info().vms)
    return max(0, min([psutil.virtual_memory().available, *limits]))


def require_memory(estimate: MemoryEstimate, available: int, held: int = 0) -> None:
    """Refuse a run that cannot fit.

    Args:
        estimate: what the run needs.
        available: bytes that may still be used.
        held: bytes of the estimate that this process already has (its resident memory).

    Raises:
        UsageError: one line with the numbers and what would lower them.
    """
    need = max(0, estimate.total - held)
    if need <= available:
        return
    levers = []
    if estimate.kv_cache >= need // 4:
        levers.append("engine.kv_bytes (or engine.num_pages)")
    if estimate.activations >= need // 8:
        levers.append("train.tokens_per_micro_batch (or set train.gradient_checkpointing = true)")
    if estimate.kept_sets >= need // 8:
        levers.append("rollout.top_k (or set train.updates_per_rollout = 1)")
    if estimate.engine_step > estimate.activations + estimate.lm_head:
        levers.append("engine.max_sequences or engine.max_rows_per_step")
    advice = f"lower {' and '.join(levers)}" if levers else "take a smaller model or a machine with more memory"
    raise UsageError(
        f"memory: the run needs {gib(need)} more and {gib(available)} is available "
        f"(in all {gib(estimate.total)}: {estimate.parts()}); {advice}"
    )


def release_memory() -> None:
    """Give freed memory back to the system, where the C library keeps it (glibc): the next phase takes other sizes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def gib(size: int) -> str:
    """Return bytes as ``1.25 GiB``."""
    return f"{size / 2**30:.2f} GiB"


def _own_cgroups(root: Path, own: Path) -> Iterator[Path]:
    """Yield the memory cgroups (v2 or v1) of this process, from its own up to the root."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = ["0::/"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "memory" if controllers else root
        parts = [part for part in path.split("/") if part and part != ".."]
        for length in range(len(parts), -1, -1):
            yield base.joinpath(*parts[:length])


def _cgroup_room(folder: Path) -> int | None:
    """Return limit - use + what the kernel can drop, or None without a limit."""
    for limit_name, use_name, inactive in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit, use = (folder / limit_name).read_text().strip(), int((folder / use_name).read_text())
            if limit == "max":
                return None
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            return int(limit) - use + int(statistics.get(inactive, 0))
        except (OSError, ValueError):
            continue
    return None
