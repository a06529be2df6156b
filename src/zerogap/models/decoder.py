"""The decoder of Qwen3 dense, Qwen2/2.5 and Llama/SmolLM2: one definition for engine, trainer and oracle.

Parameters carry the names of the Hugging Face checkpoints. Every named op's output passes through ``hooks``, which is
how row digests are taken. A residual goes from layer to layer as two summands, so that a backend may add and normalise
in one pass (`ops.add_rms_norm`); while hooks listen, ops run one by one, with the same bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zerogap import ops
from zerogap.errors import UsageError
from zerogap.models.config import ModelConfig
from zerogap.models.rope import TABLE_BLOCK
from zerogap.models.rows import Rows
from zerogap.ops import backend
from zerogap.ops.record import RecordedCache, RecordedRows, Recording, Symbol
from zerogap.ops.rounding import is_rounded, round_weight

WeightsFormat = Literal["float32", "bfloat16"]

# (layer, op, rows) -> rows; layer -1 is the embedding, layer num_layers the final norm.
Hook = Callable[[int, str, Tensor], Tensor]


Angles = tuple[Tensor, Tensor]


class Emit:
    """Passes the output of every named op through hooks; false if there are none."""

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self._hooks = hooks

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def __call__(self, layer: int, op: str, x: Tensor) -> Tensor:
        """Return what the hooks make of ``x``."""
        for hook in self._hooks:
            x = hook(layer, op, x)
        return x


class KVCache(Protocol):
    """Takes the keys and values of the rows at hand and returns all that they may attend to."""

    def update(self, layer: int, k_RGD: Tensor, v_RGD: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Store [R, G, D] keys and values of a layer; return [slots, G, D] ones."""
        ...


class Decoder(nn.Module):
    """Maps rows of tokens to hidden rows, by the row law."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.weights: WeightsFormat = "float32"
        self.gradient_checkpointing = False
        self.model = _Body(config)
        self.lm_head = None if config.tie_embeddings else _Linear(config.hidden_size, config.vocab_size)
        self.to(dtype)

    def compute_with(self, weights: WeightsFormat) -> Decoder:
        """Choose what the forward computes with: the weights as they are, or rounded to bfloat16.

        Rounded are the embedding, every linear layer and the LM head, to nearest with ties to even; norms and biases
        stay, and so do the tensors: they are the masters that an optimiser moves. The arithmetic is float32 either way.

        Raises:
            UsageError: bfloat16, and it is not the native kernels that compute in float32 here.
        """
        self.weights = weights
        self._require_backend()
        self._mark()
        self.__dict__.pop("_compiled", None)
        return self

    def _require_backend(self) -> None:
        if self.weights == "bfloat16" and not (self.dtype == torch.float32 and backend.cpu_backend() == "native"):
            raise UsageError(
                "weights in bfloat16 need the native backend (pip install ./kernels) and arithmetic in float32; "
                "set model.weights = 'float32'"
            )

    def _mark(self) -> None:
        for weight in self.parameters():
            round_weight(weight, self.weights == "bfloat16" and weight.dim() == 2)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Copied parameters are marked anew."""
        super().__setstate__(state)
        self._mark()

    def twin(self) -> Decoder:
        """Return another decoder over the same parameters: it follows every change of them."""
        return copy.deepcopy(self, {id(parameter): parameter for parameter in self.parameters()})

    def __getstate__(self) -> dict[str, Any]:
        """Copies make their own program."""
        return {name: value for name, value in self.__dict__.items() if name != "_compiled"}

    @property
    def device(self) -> torch.device:
        """Where the weights are, and the rows go."""
        return self.model.embed_tokens.weight.device

    @property
    def lm_head_weight(self) -> Tensor:
        """Weight of the LM head [V, K]: the embedding's, if tied."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def hidden(self, rows: Rows, cache: KVCache, hooks: Sequence[Hook] = ()) -> Tensor:
        """Return the rows after the final norm, [R, K].

        Where nobody listens to the ops and no gradient is wanted, a backend that can takes the whole forward at once:
        as `_forward` recorded it, with the same bits.
        """
        self._require_backend()
        assert is_rounded(self.lm_head_weight) == (self.weights == "bfloat16"), "a twin chose other weights"
        program = None if hooks or torch.is_grad_enabled() else self._program(cache)
        tables = self._tables(rows.positions_R)
        if program is not None:
            return program.run(
                rows.tokens_R,
                rows.positions_R,
                rows.slots_R,
                tables,
                rows.plan,
                cache.memory.cache,  # type: ignore[attr-defined]
            )
        # Positions are the CPU's, so that nothing waits for a GPU.
        cos, sin = (table[rows.positions_R].to(self.dtype).to(self.device, non_blocking=True) for table in tables)
        return self._forward(rows.tokens_R.to(self.device, non_blocking=True), (cos, sin), rows, cache, hooks)

    def hidden_on_device(self, rows: Rows, angles: Angles, cache: KVCache) -> Tensor:
        """Return what `hidden` does for rows that lie on the device, op by op and without reading a value on the host.

        Args:
            rows: tensors on the device, with a plan that the backend has laid out.
            angles: cosines and sines of the rows' positions [R, D/2], in the dtype of the rows.
            cache: keys and values.
        """
        self._require_backend()
        return self._forward(rows.tokens_R, angles, rows, cache, ())

    def angle_tables(self, positions: int) -> Angles:
        """Return cosines and sines [at least ``positions``, D/2] on the device, as `hidden` takes them."""
        cos, sin = self.config.rope.tables(-(-positions // TABLE_BLOCK))
        return cos.to(self.dtype).to(self.device), sin.to(self.dtype).to(self.device)

    def _forward(self, tokens_R: Tensor, angles: Angles, rows: Rows, cache: KVCache, hooks: Sequence[Hook]) -> Tensor:
        emit = Emit(hooks)
        x_RK, more_RK = emit(-1, "embedding", self.model.embed_tokens(tokens_R)), None
        for index, layer in enumerate(self.model.layers):
            if self.gradient_checkpointing and torch.is_grad_enabled():
                if more_RK is not None:  # one tensor to keep, not two
                    x_RK = emit(index - 1, "mlp_residual", x_RK + more_RK)
                x_RK, more_RK = checkpoint(layer, index, x_RK, None, rows, cache, angles, emit, use_reentrant=False)
            else:
                x_RK, more_RK = layer(index, x_RK, more_RK, rows, cache, angles, emit)
        last = self.config.num_layers
        _, normal_RK = _add_norm(self.model.norm, (last - 1, "mlp_residual"), x_RK, more_RK, emit)
        return emit(last, "final_norm", normal_RK)

    def logits(self, hidden_RK: Tensor) -> Tensor:
        """Return the logits of hidden rows, [R, V]."""
        return ops.linear(hidden_RK, self.lm_head_weight)

    def _tables(self, positions_R: Tensor) -> Angles:
        """Return cosines and sines of all positions up to the greatest of the rows, [positions, D/2]."""
        return self.config.rope.tables(int(positions_R.max()) // TABLE_BLOCK + 1)

    def _program(self, cache: KVCache) -> Any:
        """Return the forward as one program of the backend that holds the cache; None if it has none."""
        compile_program = getattr(getattr(cache, "memory", None), "compile_program", None)
        if compile_program is None:
            return None
        held = self.__dict__.get("_compiled")
        if held is None or not held.valid():
            recording = Recording()
            tokens, angle = Symbol(recording, -1, 0), Symbol(recording, -1, 0)
            self._forward(tokens, (angle, angle), RecordedRows(), RecordedCache(), ())  # type: ignore[arg-type]
            self.__dict__["_compiled"] = held = compile_program(recording)
        return held


class _Body(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.embed_tokens = _Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_layers))
        self.norm = _Norm(config.hidden_size, config.rms_norm_eps)


class _Layer(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.input_layernorm = _Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = _Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = _MLP(config)

    def forward(
        self, index: int, x_RK: Tensor, more_RK: Tensor | None, rows: Rows, cache: KVCache, angles: Angles, emit: Emit
    ) -> tuple[Tensor, Tensor]:
        """Take the residual as one or two summands (the layer's before: its own and its MLP's), return it as two."""
        x_RK, normal_RK = _add_norm(self.input_layernorm, (index - 1, "mlp_residual"), x_RK, more_RK, emit)
        normal_RK = emit(index, "attn_norm", normal_RK)
        more_RK = self.self_attn(index, normal_RK, rows, cache, angles, emit)
        x_RK, normal_RK = _add_norm(self.post_attention_layernorm, (index, "attn_residual"), x_RK, more_RK, emit)
        return x_RK, self.mlp(index, emit(index, "mlp_norm", normal_RK), emit)


def _add_norm(
    norm: _Norm, name: tuple[int, str], x_RK: Tensor, more_RK: Tensor | None, emit: Emit
) -> tuple[Tensor, Tensor]:
    """Return the sum, of which hooks are told under ``name``, and its norm."""
    if more_RK is None:
        return x_RK, norm(x_RK)
    if not emit:
        return ops.add_rms_norm(x_RK, more_RK, norm.weight, norm.eps)
    x_RK = emit(*name, x_RK + more_RK)
    return x_RK, norm(x_RK)


class _Attention(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = _Linear(config.hidden_size, width, config.qkv_bias)
        self.k_proj = _Linear(config.hidden_size, kv_width, config.qkv_bias)
        self.v_proj = _Linear(config.hidden_size, kv_width, config.qkv_bias)
        self.o_proj = _Linear(width, config.hidden_size, config.o_bias, ops.segment_count(width, unit=self.head_dim))
        self.q_norm = _Norm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = _Norm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, index: int, x_RK: Tensor, rows: Rows, cache: KVCache, angles: Angles, emit: Emit) -> Tensor:
        q_RHD = emit(index, "q_proj", self.q_proj(x_RK)).unflatten(1, (self.heads, self.head_dim))
        k_RGD = emit(index, "k_proj", self.k_proj(x_RK)).unflatten(1, (self.kv_heads, self.head_dim))
        v_RGD = emit(index, "v_proj", self.v_proj(x_RK)).unflatten(1, (self.kv_heads, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None and not emit:
            weights = self.q_norm.weight, self.k_norm.weight
            q_RHD, k_RGD = ops.qk_norm_rotary(q_RHD, k_RGD, weights, self.q_norm.eps, *angles)
        else:
            if self.q_norm is not None and self.k_norm is not None:
                q_RHD = emit(index, "q_norm", self.q_norm(q_RHD))
                k_RGD = emit(index, "k_norm", self.k_norm(k_RGD))
            q_RHD = emit(index, "q_rotary", ops.rotary(q_RHD, *angles))
            k_RGD = emit(index, "k_rotary", ops.rotary(k_RGD, *angles))
        keys, values = cache.update(index, k_RGD, v_RGD, rows)
        out_RHD = emit(index, "attention", ops.attention(q_RHD, keys, values, rows.plan, self.head_dim**-0.5))
        return emit(index, "o_proj", self.o_proj(out_RHD.flatten(1)))


class _MLP(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = _Linear(hidden, inner, config.mlp_bias)
        self.up_proj = _Linear(hidden, inner, config.mlp_bias)
        self.down_proj = _Linear(inner, hidden, config.mlp_bias, ops.segment_count(inner))

    def forward(self, index: int, x_RK: Tensor, emit: Emit) -> Tensor:
        gate_RI = emit(index, "gate_proj", self.gate_proj(x_RK))
        up_RI = emit(index, "up_proj", self.up_proj(x_RK))
        return emit(index, "down_proj", self.down_proj(emit(index, "silu_mul", ops.silu_mul(gate_RI, up_RI))))


class _Embedding(nn.Module):
    def __init__(self, vocab_size: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, width))

    def forward(self, ids_R: Tensor) -> Tensor:
        return ops.embedding(ids_R, self.weight)


class _Linear(nn.Module):
    def __init__(self, in_features: int, out_features: int, bias: bool = False, segments: int = 1):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.segments = segments

    def forward(self, x_RK: Tensor) -> Tensor:
        return ops.linear(x_RK, self.weight, self.bias, self.segments)


class _Norm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)
