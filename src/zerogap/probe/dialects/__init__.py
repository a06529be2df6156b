"""HTTP dialects of the engines, chosen by what answered."""

from __future__ import annotations

from zerogap.probe.client import Client
from zerogap.probe.dialects.base import Dialect, Engine
from zerogap.probe.dialects.llamacpp import LlamaCpp
from zerogap.probe.dialects.openai import VLLM, OpenAI
from zerogap.probe.dialects.sglang import SGLang, Zerogap
from zerogap.probe.dialects.tgi import TGI

_BY_KIND: dict[str, type[Dialect]] = {
    "vllm": VLLM,
    "sglang": SGLang,
    "zerogap": Zerogap,
    "llama.cpp": LlamaCpp,
    "tgi": TGI,
    "openai": OpenAI,
}


def make_dialect(client: Client, engine: Engine) -> Dialect:
    """Return the dialect that this engine speaks."""
    return _BY_KIND[engine.kind](client, engine)


__all__ = ["Dialect", "Engine", "make_dialect"]
