"""Checkpoints in and out: transformers reads back the same bits, and what is broken is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support import config_values, random_decoder, same_bits
from zerogap.errors import UsageError
from zerogap.models.config import ModelConfig
from zerogap.models.weights import load_decoder, save_decoder, tensor_digests, weights_digest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "model", "qwen3")


def write(folder: Path, family: str, **changes: object) -> Path:
    folder.mkdir()
    values = config_values(family, architectures=["X"], **changes)
    (folder / "config.json").write_text(json.dumps(values))
    decoder = random_decoder(family, **changes)
    save_file({k: v.contiguous() for k, v in decoder.state_dict().items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_reads_back_the_same_bits(tmp_path: Path, family: str, tied: bool) -> None:
    source = write(tmp_path / "source", family, tie_word_embeddings=tied)
    decoder = load_decoder(source)
    save_decoder(decoder, tmp_path / "saved", source)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    theirs = model.state_dict()
    for name, value in decoder.state_dict().items():
        assert same_bits(value, theirs[name]), name
    model.save_pretrained(tmp_path / "back")
    again = load_decoder(tmp_path / "back")
    assert weights_digest(again.state_dict()) == weights_digest(decoder.state_dict())


@pytest.mark.parametrize("named", [{}, {"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}])
def test_a_reader_that_trusts_the_configuration_gets_the_same_bits(tmp_path: Path, named: dict[str, str]) -> None:
    """Most hub checkpoints name bfloat16, to which a reader would round the float32 weights of training."""
    source = write(tmp_path / "source", "qwen3")
    values = json.loads((source / "config.json").read_text()) | named
    (source / "config.json").write_text(json.dumps(values))
    decoder = load_decoder(source)
    save_decoder(decoder, tmp_path / "saved", source)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto").state_dict()
    for name, value in decoder.state_dict().items():
        assert same_bits(value, theirs[name]), name


def test_shards(tmp_path: Path, folder: Path) -> None:
    whole = load_decoder(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert weights_digest(load_decoder(tmp_path / "shards").state_dict()) == weights_digest(whole.state_dict())
    next((tmp_path / "shards").glob("model-00002*")).unlink()
    with pytest.raises(UsageError, match=r"model-00002.*no such file"):
        load_decoder(tmp_path / "shards")


def refused(folder: Path) -> str:
    with pytest.raises(UsageError) as caught:
        load_decoder(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_truncated_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for size in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert "model.safetensors" in refused(folder)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda t: t.update({"model.norm.weight": torch.ones(63)}), "model.norm.weight has shape [63]"),
        (lambda t: t["model.norm.weight"].fill_(torch.nan), "model.norm.weight holds NaN"),
        (lambda t: t["lm_head.weight"][3].fill_(torch.inf), "lm_head.weight holds NaN or infinite"),
        (lambda t: t.pop("model.norm.weight"), "1 tensors are missing, the first is model.norm.weight"),
        (lambda t: t.update({"model.layers.0.mlp.gate_prj.weight": torch.ones(2)}), "did you mean"),
        (lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}), "quantised"),
    ],
)
def test_wrong_tensors(folder: Path, spoil: object, said: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    spoil(tensors)
    save_file(tensors, folder / "model.safetensors")
    assert said in refused(folder)


def test_missing_files(tmp_path: Path, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "convert *.bin to safetensors" in refused(folder)
    (folder / "config.json").write_text("{")
    assert "config.json: not readable as JSON" in refused(folder)
    (folder / "config.json").unlink()
    assert "config.json: no such file" in refused(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "qwen3_moe"}, "model_type 'qwen3_moe' is not supported"),
        ({"model_type": "gemma2"}, "'gemma2'"),
        ({"use_sliding_window": True}, "sliding window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding window"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"num_experts": 8}, "num_experts"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"residual_multiplier": 0.22}, "residual_multiplier"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"num_key_value_heads": 3}, "no multiple"),
        ({"hidden_size": 0}, "hidden_size must be a positive number"),
        ({"hidden_size": "64"}, "hidden_size must be a positive number"),
        ({"vocab_size": 50.5}, "vocab_size must be a whole number"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "needs factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "mystery": 1}}, "'mystery'"),
    ],
)
def test_config_that_would_change_the_numbers_is_refused(changes: dict, said: str) -> None:
    with pytest.raises(UsageError, match=r"config\.json: ") as caught:
        ModelConfig.from_dict(config_values(**changes))
    assert said in str(caught.value)


def test_dynamic_rope_ends_at_the_original_context() -> None:
    scaling = {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 128}
    assert ModelConfig.from_dict(config_values(rope_scaling=scaling)).max_positions == 128


def test_digest_sees_every_bit(folder: Path) -> None:
    decoder = load_decoder(folder)
    before, parts = weights_digest(decoder.state_dict()), tensor_digests(decoder.state_dict())
    weight = decoder.model.layers[1].mlp.up_proj.weight
    weight.data.view(torch.int32)[7, 9] ^= 1
    after = tensor_digests(decoder.state_dict())
    assert weights_digest(decoder.state_dict()) != before
    assert [name for name in parts if parts[name] != after[name]] == ["model.layers.1.mlp.up_proj.weight"]


def test_negative_zero_is_another_bit_pattern() -> None:
    assert weights_digest({"a": torch.tensor([0.0])}) != weights_digest({"a": torch.tensor([-0.0])})
    assert weights_digest({"a": torch.zeros(0)}) != weights_digest({"a": torch.zeros(0, 2)})
