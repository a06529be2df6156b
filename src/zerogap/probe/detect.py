"""Which kind of engine answers at an address, and which version."""

from __future__ import annotations

from typing import Any

from zerogap.console import printable
from zerogap.probe.client import Client
from zerogap.probe.dialects import Engine
from zerogap.probe.limits import BadAnswerError, TooSlowError, UnreachableError

_TIMEOUT_S = 10.0
# What SGLang tells about itself that bears on determinism; the rest of its answer is not kept.
_SGLANG = (
    "enable_deterministic_inference",
    "attention_backend",
    "sampling_backend",
    "disable_radix_cache",
    "chunked_prefill_size",
    "tp_size",
    "rl_on_policy_target",
    "true_on_policy_contract",
    "dtype",
    "quantization",
    "enable_prefill_only_deterministic_inference",
)


async def detect(client: Client) -> Engine:
    """Ask the address what it is.

    Raises:
        UnreachableError, TooSlowError: nobody answers.
        BadAnswerError: somebody answers who is no engine that we know.
    """
    seen: list[str] = []
    for path in ("/server_info", "/get_server_info"):
        info = await _json(client, path, seen)
        if isinstance(info, dict) and ("model_path" in info or "sglang_version" in info or "zerogap_version" in info):
            ours = "zerogap_version" in info
            version = info.get("zerogap_version") if ours else info.get("version") or info.get("sglang_version")
            facts = {name: info[name] for name in _SGLANG if name in info}
            model = info.get("served_model_name") or info.get("model_path")
            return Engine("zerogap" if ours else "sglang", _text(version), _text(model), _plain(facts))
    props = await _json(client, "/props", seen)
    if isinstance(props, dict) and "default_generation_settings" in props:
        model = await _first_model(client, seen)
        facts = {"total_slots": props.get("total_slots")}
        return Engine("llama.cpp", _text(props.get("build_info")), model, _plain(facts))
    info = await _json(client, "/info", seen)
    if isinstance(info, dict) and "model_id" in info and "max_total_tokens" in info:
        facts = {"dtype": info.get("model_dtype")}
        return Engine("tgi", _text(info.get("version")), _text(info["model_id"]), _plain(facts))
    models = await _json(client, "/v1/models", seen)
    rows = models.get("data") if isinstance(models, dict) else None
    if isinstance(rows, list) and rows and isinstance(rows[0], dict) and rows[0].get("id"):
        first = rows[0]
        owner = _text(first.get("owned_by"))
        version = await _json(client, "/version", seen)
        number = _text(version.get("version")) if isinstance(version, dict) else ""
        kind = {"vllm": "vllm", "sglang": "sglang", "zerogap": "zerogap", "llamacpp": "llama.cpp"}.get(owner, "openai")
        facts = {"max_model_len": first.get("max_model_len")}
        return Engine(kind, number, _text(first["id"]), _plain(facts))
    raise BadAnswerError(f"{client.base} is no engine that is known ({'; '.join(seen[:3]) or 'no answer fits'})")


async def _first_model(client: Client, seen: list[str]) -> str:
    models = await _json(client, "/v1/models", seen)
    rows = models.get("data") if isinstance(models, dict) else None
    return _text(rows[0].get("id")) if isinstance(rows, list) and rows and isinstance(rows[0], dict) else ""


async def _json(client: Client, path: str, seen: list[str]) -> Any:
    try:
        reply = await client.get(path, timeout_s=_TIMEOUT_S)
        if reply.status != 200:
            seen.append(f"{path} answers {reply.status}")
            return None
        return reply.json()
    except (UnreachableError, TooSlowError):
        raise
    except BadAnswerError as error:
        seen.append(str(error))
        return None


def _text(value: Any) -> str:
    return printable(str(value))[:200] if value not in (None, "") else ""


def _plain(facts: dict[str, Any]) -> dict[str, Any]:
    """Keep short plain values only: this comes from a stranger and goes into reports."""
    return {
        name: _text(value) if isinstance(value, str) else value
        for name, value in facts.items()
        if isinstance(value, bool | int | float | str)
    }
