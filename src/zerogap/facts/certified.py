"""Whether a certificate of ``zerogap certify`` speaks of this device, software and model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from zerogap import __version__
from zerogap.facts.certificate import certificates, cpu_identity
from zerogap.facts.fact import ABSENT, Fact, Facts
from zerogap.numerics import NUMERICS_VERSION, code_digest, kernels_digest, kernels_missing

_SHAPE = (
    "family",
    "layers",
    "hidden_size",
    "intermediate_size",
    "heads",
    "kv_heads",
    "head_dim",
    "vocab_size",
    "tied_embeddings",
    "rope",
)


def certificate_facts(facts: Facts, folder: Path | None = None) -> Facts:
    """Return ``zerogap.backend``, and ``certificate.holds`` from the newest certificate that fits, or why not.

    Args:
        facts: what is known of this machine's software and of the model.
        folder: where certificates lie; None = the usual folder.
    """
    backend = None if "zerogap.backend" in facts else backend_fact(facts)
    known = Facts() if backend is None else Facts({"zerogap.backend": backend})
    return _certificate(facts, folder).over(known)


def _certificate(facts: Facts, folder: Path | None) -> Facts:
    unmatched: list[str] = []
    wanted: dict[str, dict[str, Any]] = {}
    for path, record in certificates(folder):
        wanted = wanted or _wanted(facts)
        difference = _difference(record, wanted)
        if difference is None and isinstance(record.get("holds"), bool):
            return Facts(
                {"certificate.holds": Fact(record["holds"], f"{path}, issued {record.get('issued', 'at no time')}")}
            )
        unmatched.append(f"{path.name} ({difference or 'says nothing'})")
    if not unmatched:
        return Facts({}, {"certificate.holds": "there is no certificate on this machine"})
    shown = "; ".join(unmatched[:3]) + (f" and {len(unmatched) - 3} more" if len(unmatched) > 3 else "")
    return Facts({}, {"certificate.holds": f"no certificate fits this device, software and model: {shown}"})


def backend_fact(facts: Facts) -> Fact | None:
    """Return which of our backends serves this process, with why; None if that is not known."""
    forced = os.environ.get("ZEROGAP_BACKEND", "").strip()
    if forced in ("native", "portable"):
        return Fact(f"cpu-{forced}", f"ZEROGAP_BACKEND={forced}")
    kernels = facts.get("software.zerogap_kernels")
    if kernels is None:
        return None
    if kernels.value == ABSENT:
        return Fact("cpu-portable", f"{kernels.source}; the portable backend needs only PyTorch")
    missing = kernels_missing()
    return Fact("cpu-portable", f"{kernels.source}, but {missing}") if missing else Fact("cpu-native", kernels.source)


def _wanted(facts: Facts) -> dict[str, dict[str, Any]]:
    stated = facts.get("zerogap.backend")
    on_gpu = stated is not None and stated.value == "gpu-triton"
    backend = stated if on_gpu else backend_fact(facts)
    software: dict[str, Any] = {
        "zerogap": __version__,
        "numerics_version": NUMERICS_VERSION,
        "code_digest": code_digest(),
        "backend": None if backend is None else backend.value,
        "torch": _value(facts, "software.torch"),
    }
    if on_gpu:
        software["triton"] = _value(facts, "software.triton")
    elif backend is not None and backend.value == "cpu-native":
        software["kernels_digest"] = kernels_digest()
    return {
        "device": _gpu(facts) if on_gpu else {"kind": "cpu", **cpu_identity()},
        "software": software,
        "model": {key: facts[f"model.{key}"].value if f"model.{key}" in facts else None for key in _SHAPE},
    }


def _gpu(facts: Facts) -> dict[str, Any]:
    capability, gfx = (_value(facts, f"gpu.engine.{name}") for name in ("capability", "gfx"))
    known = capability if capability != ABSENT else gfx
    architecture = f"sm_{known.replace('.', '')}" if isinstance(known, str) and known == capability else known
    return {"kind": "gpu", "model": _value(facts, "gpu.engine.name"), "architecture": architecture}


def _value(facts: Facts, name: str) -> Any:
    fact = facts.get(name)
    return None if fact is None else fact.value


def _difference(record: dict[str, Any], wanted: dict[str, dict[str, Any]]) -> str | None:
    """Return the first thing in which a certificate speaks of something else; an unknown value fits nothing."""
    for part, values in wanted.items():
        stated = record.get(part)
        for key, value in values.items():
            said = stated.get(key) if isinstance(stated, dict) else None
            if value is None:
                return f"{part} {key} is not known here"
            if said != value or isinstance(said, bool) is not isinstance(value, bool):
                return f"{part} {key}: {str(said)[:40]} there, {str(value)[:40]} here"
    return None
