"""What a Hugging Face ``config.json`` says, read into the few numbers that the decoder needs, or refused by name."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerogap.errors import UsageError, nearest
from zerogap.models.rope import Rope, read_rope

FAMILIES = ("llama", "qwen2", "qwen3")

# Read below, or known not to change a forward pass in evaluation mode.
_READ = {
    "attention_bias", "attention_dropout", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "layer_types",
    "max_position_embeddings", "max_window_layers", "mlp_bias", "model_type", "num_attention_heads",
    "num_hidden_layers", "num_key_value_heads", "original_max_position_embeddings", "pretraining_tp",
    "quantization_config", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "sliding_window",
    "tie_word_embeddings", "use_sliding_window", "vocab_size",
}  # fmt: skip
_HARMLESS = {
    "architectures", "attn_implementation", "auto_map", "bos_token_id", "chunk_size_feed_forward",
    "decoder_start_token_id", "dtype", "eos_token_id", "finetuning_task", "id2label", "initializer_range", "is_decoder",
    "is_llama_config", "label2id", "output_attentions", "output_hidden_states", "pad_token_id", "problem_type",
    "return_dict", "rope_interleaved", "sep_token_id", "task_specific_params", "tokenizer_class", "torch_dtype",
    "torchscript", "transformers.js_config", "transformers_version", "unk_token_id", "use_cache",
}  # fmt: skip


@dataclass(frozen=True)
class ModelConfig:
    """Shape and variant of a decoder.

    Attributes:
        family: ``llama`` (SmolLM2 included), ``qwen2`` (2.5 included) or ``qwen3`` (dense).
        max_positions: longest sequence that the position embedding is defined for, in tokens.
        qkv_bias: the query, key and value projections have a bias.
        o_bias: the attention output projection has one.
        mlp_bias: the MLP projections have one.
        qk_norm: each query and key head is normalised before the rotation.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    tie_embeddings: bool
    rope: Rope
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @staticmethod
    def from_folder(folder: Path) -> ModelConfig:
        """Read ``folder/config.json``.

        Raises:
            UsageError: it is missing, malformed, or describes something that the decoder does not compute.
        """
        path = folder / "config.json"
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UsageError(f"{path}: no such file; a model folder holds config.json and *.safetensors") from None
        except (OSError, ValueError) as error:
            raise UsageError(f"{path}: not readable as JSON ({error})") from None
        if not isinstance(values, dict):
            raise UsageError(f"{path}: expected a JSON object")
        return ModelConfig.from_dict(values, str(path))

    @staticmethod
    def from_dict(values: dict[str, Any], where: str = "config.json") -> ModelConfig:
        """Read the values of a ``config.json``; ``where`` names it in errors."""
        _refuse_unsupported(values, where)
        family = values["model_type"]
        heads = _positive(values, "num_attention_heads", where)
        hidden = _positive(values, "hidden_size", where)
        kv_heads = _positive(values, "num_key_value_heads", where, heads)
        head_dim = _positive(values, "head_dim", where, 128 if family == "qwen3" else hidden // heads)
        if heads % kv_heads:
            raise UsageError(f"{where}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
        if head_dim % 2:
            raise UsageError(f"{where}: head_dim {head_dim} is odd; the rotary embedding needs pairs")
        positions = _positive(values, "max_position_embeddings", where)
        rope = read_rope(values, head_dim, positions, where)
        attention_bias = bool(values.get("attention_bias", False))
        return ModelConfig(
            family=family,
            vocab_size=_positive(values, "vocab_size", where),
            hidden_size=hidden,
            intermediate_size=_positive(values, "intermediate_size", where),
            num_layers=_positive(values, "num_hidden_layers", where),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_number(values, "rms_norm_eps", where, 1e-6),
            max_positions=rope.max_positions,
            tie_embeddings=bool(values.get("tie_word_embeddings", False)),
            rope=rope,
            qkv_bias=family == "qwen2" or attention_bias,
            o_bias=family != "qwen2" and attention_bias,
            mlp_bias=family == "llama" and bool(values.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
        )


def _refuse_unsupported(values: dict[str, Any], where: str) -> None:
    family = values.get("model_type")
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UsageError(
            f"{where}: model_type {family!r} is not supported; supported are {known}{nearest(str(family), FAMILIES)}"
        )
    layer_types = values.get("layer_types") or []
    if not isinstance(layer_types, list) or not all(isinstance(kind, str) for kind in layer_types):
        raise UsageError(f"{where}: layer_types must be a list of texts, not {layer_types!r}")
    for key in ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"):
        if not isinstance(values.get(key), bool | None):
            raise UsageError(f"{where}: {key} must be true or false, not {values[key]!r}")
    if values.get("quantization_config"):
        raise UsageError(f"{where}: quantization_config: quantised weights are not supported; use a float checkpoint")
    if values.get("use_sliding_window") or "sliding_attention" in layer_types:
        raise UsageError(f"{where}: sliding window attention is not supported")
    if set(layer_types) - {"full_attention"}:
        raise UsageError(f"{where}: layer_types other than full_attention are not supported")
    if family == "llama" and values.get("sliding_window"):
        raise UsageError(f"{where}: sliding window attention is not supported")
    if values.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UsageError(f"{where}: hidden_act {values['hidden_act']!r} is not supported; supported is silu")
    if values.get("attention_dropout"):
        raise UsageError(f"{where}: attention_dropout {values['attention_dropout']} is not supported; set it to 0")
    if values.get("pretraining_tp", 1) not in (None, 1):
        raise UsageError(f"{where}: pretraining_tp {values['pretraining_tp']} changes the sums; only 1 is supported")
    for key, value in values.items():
        neutral = value is None or value is False or value == "" or value == [] or value == {}
        if key not in _READ and key not in _HARMLESS and not key.startswith("_") and not neutral:
            raise UsageError(
                f"{where}: {key} = {value!r} is not known for {family} and might change the numbers; "
                f"remove it if it does not{nearest(key, _READ)}"
            )


def _number(values: dict[str, Any], key: str, where: str, default: float | None = None) -> float:
    value = values.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UsageError(f"{where}: {key} must be a positive number, not {value!r}")
    return float(value)


def _positive(values: dict[str, Any], key: str, where: str, default: int | None = None) -> int:
    number = _number(values, key, where, default)
    if number != int(number):
        raise UsageError(f"{where}: {key} must be a whole number, not {number!r}")
    return int(number)
