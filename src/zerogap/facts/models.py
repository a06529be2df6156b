"""Models: from a local folder, the hub cache, or a table of known names; no weights are read and nothing is fetched."""

from __future__ import annotations

import json
import os
import re
import tomllib
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from zerogap.errors import UsageError, nearest
from zerogap.facts.fact import Fact, Facts, convert

_CONFIG_LIMIT = 4 * 2**20
_SIZES = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_positions",
    "tie_word_embeddings": "tied_embeddings",
}
ASKED = ("family", "kind", "attention", "architecture", "dtype", "quantization")  # what contracts ask of a model
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
_GENERATION = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads((files("zerogap.facts") / "models.toml").read_text(encoding="utf-8"))


def known_models() -> tuple[str, ...]:
    """Return the names whose sizes are known."""
    return tuple(row[0] for row in _table()["exact"])


def short_name(text: str) -> str:
    """Return a model's name without organisation or folders: ``/root/models/Qwen3-4B/`` is ``Qwen3-4B``."""
    snapshot = re.search(r"models--(?:[^/]*?--)?([^/]+?)/(?:snapshots|refs)/", text + "/")
    return snapshot[1] if snapshot else re.split(r"[/\\]", text.rstrip("/\\"))[-1]


def model_facts(text: str, source: str = "--model", *, must_exist: bool = True) -> Facts:
    """Return the facts of a model given as a folder, a hub name or a known name.

    Args:
        text: what was given.
        source: where it was given.
        must_exist: a path that does not exist is an error (false for a path on another machine, where the name is
            all that is known).

    Raises:
        UsageError: a path that does not exist or holds no readable config.json.
    """
    if not text.strip() or len(text) > 4096 or "\0" in text:
        raise UsageError(f"{source}: write a model folder, hub name or known name")
    name = short_name(text.strip())
    known = {"model.name": Fact(name, source), "model.path": Fact(text, source)}
    if text.startswith("builtin:"):
        return Facts({**known, "model.name": Fact(text, source), **_from_config(_built_in(text))})
    folder = Path(text).expanduser()
    written_as_path = text.startswith((".", "/", "~")) or text.count("/") > 1
    if folder.is_dir() and ((folder / "config.json").is_file() or (written_as_path and must_exist)):
        return Facts({**known, **_from_config(folder)})
    if written_as_path and must_exist:
        raise UsageError(f"{source}: there is no model folder at {text}")
    cached = None if written_as_path else _cached(text.strip())
    if cached is not None:
        return Facts({**known, **_from_config(cached)})
    return Facts({**known, **_from_table(name)}, _why(name))


def _built_in(text: str) -> Path:
    root = Path(str(files("zerogap"))) / "data"
    shipped = sorted(f"builtin:{path.parent.name}" for path in root.glob("*/config.json"))
    if text not in shipped:
        raise UsageError(f"no model {text!r} is built in{nearest(text, shipped)}; built in: {', '.join(shipped)}")
    return root / text.removeprefix("builtin:")


def _why(name: str) -> dict[str, str]:
    reason = f"{name!r} is no folder, not in the hub cache and not in the table of known models"
    return {f"model.{field}": reason + nearest(name, known_models()) for field in ASKED}


def _cached(name: str) -> Path | None:
    """Return the newest cached snapshot of a hub model that holds a config."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return None
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    found = list((hub / f"models--{name.replace('/', '--')}" / "snapshots").glob("*/config.json"))
    return max(found, key=lambda path: path.stat().st_mtime).parent if found else None


def _from_table(name: str) -> dict[str, Fact]:
    table, lowered = _table(), name.lower()
    for row in table["exact"]:
        entry = dict(zip(table["exact_columns"], row, strict=True))
        if entry["name"].lower() == lowered:
            source = "table of known models"
            known = {
                f"model.{key}": Fact(value, source) for key, value in entry.items() if key not in ("name", "generation")
            }
            attention = "gqa" if entry["kv_heads"] < entry["heads"] else "mha"
            known |= {
                "model.attention": Fact((attention,), source),
                "model.dtype": Fact("bfloat16", source),
                "model.quantization": Fact("none", source),
                **{
                    f"model.generation_{key}": Fact(value, source)
                    for key, value in table["generation"][entry["generation"]].items()
                },
            }
            return known
    quantized = re.search(r"fp8|fp4|nvfp4|mxfp[48]|awq|gptq|int[48]|w[48]a\d+|bnb|gguf", lowered)
    row = next((row for row in table["family"] if re.search(row["match"], lowered)), None)
    source = "model name"
    known = {"model.quantization": Fact(quantized[0], source)} if quantized else {}
    if row:
        known |= {
            "model.family": Fact(row["family"], source),
            "model.kind": Fact(row["kind"], source),
            "model.attention": Fact(tuple(row["attention"]), source),
        }
    return known


def _from_config(folder: Path) -> dict[str, Fact]:
    config = _read_json(folder / "config.json")
    text = config.get("text_config")
    body: dict[str, Any] = {**config, **text} if isinstance(text, dict) else config
    source = str(folder / "config.json")
    known: dict[str, Fact] = {}

    def tell(name: str, value: object) -> None:
        if value is not None:
            known[f"model.{name}"] = Fact(convert(f"model.{name}", value, source), source)

    for key, name in _SIZES.items():
        tell(name, body.get(key))
    if "model.kv_heads" not in known:
        tell("kv_heads", body.get("num_attention_heads"))
    hidden, heads = body.get("hidden_size"), body.get("num_attention_heads")
    if "model.head_dim" not in known and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        tell("head_dim", 128 if body.get("model_type") == "qwen3" else hidden // heads)
    architectures = config.get("architectures")
    if isinstance(architectures, list) and architectures and isinstance(architectures[0], str):
        tell("architecture", architectures[0])
    table = _table()
    model_type = body.get("model_type") if isinstance(body.get("model_type"), str) else None
    if model_type:
        tell("family", table["model_types"].get(model_type, model_type))
    experts = next((body[key] for key in _EXPERTS if isinstance(body.get(key), int) and body[key] > 1), 0)
    tell("experts", experts)
    attention = _attention(body, str(model_type))
    hybrid = bool({"linear", "mamba"} & set(attention)) or model_type in table["hybrid"]["model_types"]
    tell("kind", "hybrid" if hybrid else "moe" if experts else "dense")
    tell("attention", attention)
    tell("dtype", _dtype(body.get("dtype") or body.get("torch_dtype")))
    quantization = body.get("quantization_config")
    if isinstance(quantization, dict):
        tell("quantization", str(quantization.get("quant_method") or quantization.get("quant_algo") or "unnamed"))
    else:
        tell("quantization", "none")
    rope = body.get("rope_parameters") or body.get("rope_scaling")
    rope = rope if isinstance(rope, dict) else {}
    tell("rope", str(rope.get("rope_type") or rope.get("type") or "default"))
    tell("rope_theta", body.get("rope_theta") or rope.get("rope_theta"))
    known.update(_generation(folder))
    return known


def _attention(body: dict[str, Any], model_type: str) -> list[str]:
    kinds: list[str] = []
    heads, kv_heads = body.get("num_attention_heads"), body.get("num_key_value_heads")
    if body.get("kv_lora_rank"):
        kinds.append("mla")
    elif isinstance(heads, int) and isinstance(kv_heads, int):
        kinds.append("gqa" if kv_heads < heads else "mha")
    elif isinstance(heads, int):
        kinds.append("mha")
    layers = body.get("layer_types")
    names = {name for name in layers if isinstance(name, str)} if isinstance(layers, list) else set()
    if "sliding_attention" in names or (body.get("sliding_window") and body.get("use_sliding_window", not layers)):
        kinds.append("sliding")
    if "linear_attention" in names or body.get("linear_num_key_heads") or body.get("linear_attn_config"):
        kinds.append("linear")
    if model_type in _table()["hybrid"]["mamba"] or body.get("hybrid_override_pattern") or names & {"mamba", "mamba2"}:
        kinds.append("mamba")
    if model_type == "gpt_oss" or body.get("attention_sink_bias") or body.get("add_swa_attention_sink_bias"):
        kinds.append("sinks")
    if body.get("attn_logit_softcapping"):
        kinds.append("softcap")
    return kinds


def _dtype(value: object) -> str | None:
    name = str(value).removeprefix("torch.")
    return {
        "bfloat16": "bfloat16",
        "float16": "float16",
        "half": "float16",
        "float32": "float32",
        "float": "float32",
    }.get(name, "float8" if name.startswith("float8") else None)


def _generation(folder: Path) -> dict[str, Fact]:
    file = folder / "generation_config.json"
    if not file.is_file():
        return {}
    body = _read_json(file)
    return {
        f"model.generation_{key}": Fact(convert(f"model.generation_{key}", body[key], str(file)), str(file))
        for key in _GENERATION
        if isinstance(body.get(key), int | float) and not isinstance(body.get(key), bool)
    }


def _read_json(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > _CONFIG_LIMIT:
            raise UsageError(f"{file} is larger than {_CONFIG_LIMIT // 2**20} MiB; it is no model configuration")
        body = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{file} cannot be read as JSON ({type(error).__name__}); name a model folder") from None
    if not isinstance(body, dict):
        raise UsageError(f"{file} holds no JSON object; name a model folder")
    return body
