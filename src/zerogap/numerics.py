"""The version of our arithmetic, and the native kernels at hand: readable without torch."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path

NUMERICS_VERSION = 3  # rises with every change of zerogap that changes bits
_PARTS = ("ops", "models", "engine", "trainer")
_KINDS = ("*.py", "*.toml")  # tables choose tiles, and with them the order of sums


def code_digest() -> str:
    """Return a SHA-256 over the sources of everything on the log-prob path, in hex."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    sources = (path for part in _PARTS for kind in _KINDS for path in (root / part).rglob(kind))
    for path in sorted(sources):
        digest.update(f"{path.relative_to(root).as_posix()}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def kernels_missing() -> str | None:
    """Return why the native kernels cannot serve in this process, or None if they can."""
    if find_spec("zerogap_kernels") is None:
        return "the package zerogap-kernels is not installed"
    try:
        importlib.import_module("zerogap_kernels")
    except Exception as error:  # whatever is wrong with it: it is said, and the portable backend serves
        forced = os.environ.get("ZEROGAP_CPU_PATH")
        return f"zerogap-kernels does not load: {error}" + (f" (ZEROGAP_CPU_PATH={forced})" if forced else "")
    return None


def kernels_digest() -> str | None:
    """Return the digest of the installed native kernels' sources and switches; None if they are not installed."""
    spec = find_spec("zerogap_kernels")
    if spec is None or spec.origin is None:
        return None
    try:
        return str(json.loads(Path(spec.origin).with_name("build.json").read_text(encoding="utf-8"))["code_digest"])
    except (OSError, ValueError, KeyError):
        return None
