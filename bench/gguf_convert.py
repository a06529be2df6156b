"""Write a Llama-shaped Hugging Face folder as a GGUF file that llama.cpp reads: float32 or 16-bit weights.

The names and keys are those of the GGUF specification; the gguf package writes the container.
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors import safe_open

_KINDS = {
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUTER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def convert(folder: Path, kind: str, target: Path) -> None:
    """Write ``folder`` to ``target``.

    Args:
        folder: config.json, model.safetensors and tokenizer.json of a Llama model.
        kind: of the matrices: ``f32``, ``f16`` or ``bf16``; norms are float32 always.
        target: the file to write.
    """
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] != "llama":
        raise ValueError(f"{folder}: only Llama models can be converted here, this is {config['model_type']!r}")
    weight_type, file_type = _KINDS[kind]
    writer = gguf.GGUFWriter(target, "llama")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    rope = config.get("rope_parameters") or config
    writer.add_file_type(file_type)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    _add_tokenizer(writer, folder, config)
    with safe_open(folder / "model.safetensors", "pt") as weights:
        for name in weights.keys():  # noqa: SIM118 (no mapping)
            tensor = weights.get_tensor(name).float()
            stem = name.removesuffix(".weight")
            if stem == "lm_head" and config["tie_word_embeddings"]:
                continue
            if stem.startswith("model.layers."):
                _, _, layer, part = stem.split(".", 3)
                new = f"blk.{layer}.{_LAYER_NAMES[part]}.weight"
                if part.endswith(("q_proj", "k_proj")):
                    tensor = _interleaved(tensor, heads if part.endswith("q_proj") else kv_heads)
            else:
                new = f"{_OUTER_NAMES[stem]}.weight"
            _add(writer, new, tensor, weight_type if tensor.dim() > 1 else gguf.GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(weight_NK: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder a head's outputs: GGUF's Llama rotates neighbours where Hugging Face rotates halves."""
    return weight_NK.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight_NK.shape)


def _add(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, kind: gguf.GGMLQuantizationType) -> None:
    if kind == gguf.GGMLQuantizationType.BF16:
        raw = tensor.bfloat16().view(torch.int16).numpy().view(np.uint8)
        writer.add_tensor(name, raw, raw_dtype=kind)
    else:
        writer.add_tensor(
            name, tensor.to(torch.float16 if kind == gguf.GGMLQuantizationType.F16 else torch.float32).numpy()
        )


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, config: dict) -> None:
    """Add the byte-level BPE vocabulary; the benchmark sends token ids, so only the counts matter."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    special = {entry["content"] for entry in tokenizer["added_tokens"]}
    ids = {entry["content"]: entry["id"] for entry in tokenizer["added_tokens"]} | tokenizer["model"]["vocab"]
    names = {number: text for text, number in ids.items()}
    tokens = [names.get(number, f"[unused{number}]") for number in range(config["vocab_size"])]
    merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if text in special else gguf.TokenType.NORMAL for text in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
