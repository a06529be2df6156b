"""Models: the table, local folders, the hub cache; names alone where nothing else is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zerogap.errors import UsageError
from zerogap.facts.models import known_models, model_facts, short_name


def _folder(path: Path, generation: dict[str, Any] | None = None, **config: Any) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def test_a_known_name() -> None:
    facts = model_facts("Qwen/Qwen3-0.6B")
    assert facts["model.name"].value == "Qwen3-0.6B"
    assert facts["model.family"].value == "qwen3"
    assert facts["model.layers"].value == 28
    assert facts["model.attention"].value == ("gqa",)
    assert facts["model.generation_top_k"].value == 20
    assert model_facts("qwen3-0.6b")["model.layers"].value == 28


@pytest.mark.parametrize("name", known_models())
def test_every_known_name_has_family_kind_and_dtype(name: str) -> None:
    facts = model_facts(name)
    assert {"model.family", "model.kind", "model.dtype", "model.quantization", "model.attention"} <= set(facts)


FAMILIES = {
    "gpt-oss-120b": ("gpt_oss", "moe"),
    "gemma-4-31b-it": ("gemma4", "dense"),
    "nemotron-h-8b": ("nemotron_h", "hybrid"),
    "Qwen3-Next-80B-A3B-Instruct": ("qwen3_next", "hybrid"),
    "Qwen3.6-27B": ("qwen3_next", "hybrid"),
    "Qwen3-235B-A22B-Thinking": ("qwen3_moe", "moe"),
    "DeepSeek-V3.2": ("deepseek_v3", "moe"),
    "DeepSeek-R1-Distill-Qwen-7B": ("qwen2", "dense"),
    "GLM-4.5-Air": ("glm4_moe", "moe"),
    "Kimi-K2-Instruct": ("deepseek_v3", "moe"),
    "Llama-3.3-70B-Instruct": ("llama", "dense"),
    "Falcon-H1-7B": ("mamba", "hybrid"),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_families_by_name(name: str) -> None:
    facts = model_facts(f"org/{name}")
    assert (facts["model.family"].value, facts["model.kind"].value) == FAMILIES[name]


def test_a_quantised_name() -> None:
    assert model_facts("x/Qwen3-4B-FP8")["model.quantization"].value == "fp8"


def test_an_unknown_name_is_a_name_only() -> None:
    facts = model_facts("org/something-else")
    assert set(facts) == {"model.name", "model.path"}
    assert "not in the table" in facts.unknown["model.family"]
    assert "did you mean 'Qwen3-4B'" in model_facts("Qwen3-4Bx").unknown["model.dtype"]


def test_a_folder(tmp_path: Path) -> None:
    path = _folder(
        tmp_path / "my-model",
        {"temperature": 0.6, "top_p": 0.95, "do_sample": True},
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        num_hidden_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=128,
        torch_dtype="bfloat16",
        rope_theta=1e6,
        tie_word_embeddings=True,
        rope_scaling={"rope_type": "yarn", "factor": 4.0},
    )
    facts = model_facts(str(path))
    got = {name[6:]: fact.value for name, fact in facts.items()}
    assert got == {
        "name": "my-model",
        "path": str(path),
        "architecture": "Qwen3ForCausalLM",
        "family": "qwen3",
        "layers": 2,
        "hidden_size": 64,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "vocab_size": 128,
        "tied_embeddings": True,
        "experts": 0,
        "kind": "dense",
        "attention": ("gqa",),
        "dtype": "bfloat16",
        "quantization": "none",
        "rope": "yarn",
        "rope_theta": 1e6,
        "generation_temperature": 0.6,
        "generation_top_p": 0.95,
    }
    assert facts["model.layers"].source.endswith("config.json")


CONFIGS: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "moe": (
        {"model_type": "qwen3_moe", "num_experts": 128, "num_attention_heads": 32, "num_key_value_heads": 4},
        "moe",
        ("gqa",),
    ),
    "mla": ({"model_type": "deepseek_v3", "n_routed_experts": 256, "kv_lora_rank": 512}, "moe", ("mla",)),
    "GDN": (
        {
            "model_type": "qwen3_next",
            "layer_types": ["linear_attention", "full_attention"],
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
        },
        "hybrid",
        ("gqa", "linear"),
    ),
    "mamba": (
        {
            "model_type": "nemotron_h",
            "hybrid_override_pattern": "M*-",
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
        },
        "hybrid",
        ("mha", "mamba"),
    ),
    "sliding": (
        {"model_type": "gemma3_text", "layer_types": ["sliding_attention"], "sliding_window": 512},
        "dense",
        ("sliding",),
    ),
    "sinks": (
        {"model_type": "gpt_oss", "num_local_experts": 32, "layer_types": ["sliding_attention", "full_attention"]},
        "moe",
        ("sliding", "sinks"),
    ),
    "softcap": (
        {"model_type": "gemma2", "attn_logit_softcapping": 50.0, "num_attention_heads": 4},
        "dense",
        ("mha", "softcap"),
    ),
    "window that is off": (
        {
            "model_type": "qwen2",
            "sliding_window": 4096,
            "use_sliding_window": False,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
        "dense",
        ("gqa",),
    ),
    "inside text_config": (
        {
            "model_type": "x_vl",
            "text_config": {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2},
        },
        "dense",
        ("gqa",),
    ),
}


@pytest.mark.parametrize("title", CONFIGS)
def test_kinds_of_attention(title: str, tmp_path: Path) -> None:
    config, kind, attention = CONFIGS[title]
    facts = model_facts(str(_folder(tmp_path / "m", **config)))
    assert (facts["model.kind"].value, facts["model.attention"].value) == (kind, attention)


def test_quantised_configuration(tmp_path: Path) -> None:
    path = _folder(tmp_path / "m", model_type="llama", quantization_config={"quant_method": "fp8"})
    assert model_facts(str(path))["model.quantization"].value == "fp8"


def test_the_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    _folder(tmp_path / "hub" / "models--org--thing" / "snapshots" / "abc", model_type="llama", num_hidden_layers=3)
    facts = model_facts("org/thing")
    assert facts["model.layers"].value == 3
    assert facts["model.name"].value == "thing"


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", "[" * 100_000, '{"num_hidden_layers": "many"}', '{"rope_theta": "NaN"}', "\0"]
)
def test_a_damaged_configuration_is_a_usage_error(content: str, tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.mkdir()
    (path / "config.json").write_text(content)
    with pytest.raises(UsageError, match=r"config\.json"):
        model_facts(str(path))


@pytest.mark.parametrize("text", ["", "  ", "./nowhere", "/nowhere/model", "a\0b", "x" * 5000])
def test_wrong_models(text: str) -> None:
    with pytest.raises(UsageError):
        model_facts(text)


def test_a_path_on_another_machine_is_a_name() -> None:
    assert model_facts("/root/models/Qwen3-4B/", must_exist=False)["model.layers"].value == 36


def test_short_names() -> None:
    assert short_name("/x/hub/models--Qwen--Qwen3-4B/snapshots/abc") == "Qwen3-4B"
    assert short_name("Qwen/Qwen3-4B") == short_name("/root/Qwen3-4B/") == "Qwen3-4B"
