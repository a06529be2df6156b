"""The text of tokens, from a model folder's ``tokenizer.json`` alone, and how much their gap is coloured."""

from __future__ import annotations

import json
import math
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

_LIMIT = 64 << 20
SHADES = 6  # 0 = bit-equal, 5 = a nat or more
_EDGES = (1e-6, 0.01, 0.05, 0.2, 1.0)


def shade(engine: float, trainer: float) -> int | None:
    """Return 0 (equal) to 5 (over a nat) for one token, None when a side has no number."""
    if not (math.isfinite(engine) and math.isfinite(trainer)):
        return None
    gap = abs(trainer - engine)
    return 0 if gap == 0 else max(1, sum(gap >= edge for edge in _EDGES))


@cache
def _bytes_of_characters() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(rest)}


def token_texts(model: str | Path | None) -> dict[int, str]:
    """Return id -> text of a model folder's vocabulary; empty if there is none to read."""
    if model is None:
        return {}
    name = str(model)
    if name.startswith("builtin:"):
        path = (
            Path(str(resources.files("zerogap"))) / "data" / Path(name.removeprefix("builtin:")).name / "tokenizer.json"
        )
    else:
        path = Path(name) / "tokenizer.json"
    try:
        if path.stat().st_size > _LIMIT:
            return {}
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = content["model"]["vocab"]
        pairs = vocabulary.items() if isinstance(vocabulary, dict) else (
            (piece, number) for number, (piece, _) in enumerate(vocabulary)
        )  # fmt: skip
        texts = {int(number): _readable(str(piece)) for piece, number in pairs}
        texts.update({int(added["id"]): str(added["content"]) for added in content.get("added_tokens", [])})
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return texts


def _readable(piece: str) -> str:
    table = _bytes_of_characters()
    if all(character in table for character in piece):
        return bytes(table[character] for character in piece).decode("utf-8", "replace")
    return piece.replace("\u2581", " ")
