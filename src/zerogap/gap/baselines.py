"""Healthy ranges: those that were published, and those a person saves from a finished run."""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from zerogap.errors import UsageError, nearest
from zerogap.files import write_text_atomic
from zerogap.gap.series import Series


@dataclass(frozen=True)
class Baseline:
    """A range of one quantity that was healthy for a setup."""

    name: str
    quantity: str
    low: float
    high: float
    setup: str
    source: str
    gpus: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    general: bool = False
    steps: int = 0

    def text(self) -> str:
        """Return the range with where it comes from."""
        return f"{self.low:g} to {self.high:g} ({self.name}: {self.setup}; source: {self.source})"


def user_file() -> Path:
    """Return where saved baselines live: ``$ZEROGAP_BASELINES`` or the user's configuration folder."""
    named = os.environ.get("ZEROGAP_BASELINES")
    if named:
        return Path(named)
    root = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return root / "zerogap" / "baselines.toml"


def baselines() -> list[Baseline]:
    """Return saved baselines, newest first, then the published ones.

    Raises:
        UsageError: the user's file is damaged.
    """
    return [*_saved(), *published()]


def published() -> list[Baseline]:
    """Return the ranges that come with the package."""
    text = resources.files("zerogap.gap").joinpath("baselines.toml").read_text(encoding="utf-8")
    return [_parse(entry) for entry in tomllib.loads(text)["baseline"]]


def _saved() -> list[Baseline]:
    path = user_file()
    if not path.is_file():
        return []
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))["baseline"]
        return [_parse(entry) for entry in reversed(entries)]
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError, OSError) as error:
        raise UsageError(f"{path}: damaged baselines file ({error}); mend or remove it") from None


def _parse(entry: dict[str, Any]) -> Baseline:
    return Baseline(
        str(entry["name"]),
        str(entry["quantity"]),
        float(entry["low"]),
        float(entry["high"]),
        str(entry["setup"]),
        str(entry["source"]),
        tuple(entry.get("gpus", ())),
        tuple(entry.get("models", ())),
        bool(entry.get("general", False)),
        int(entry.get("steps", 0)),
    )


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def pick(
    quantity: str, *, name: str | None = None, gpu: str | None = None, model: str | None = None
) -> Baseline | None:
    """Return the baseline to judge ``quantity`` by, or None when no specific one was asked for or fits.

    Raises:
        UsageError: ``name`` is unknown or speaks of another quantity.
    """
    known = baselines()
    if name is not None:
        found = next((b for b in known if b.name == name), None)
        if found is None:
            raise UsageError(
                f"--baseline {name}: no such baseline{nearest(name, [b.name for b in known])} "
                f"(known: {', '.join(b.name for b in known)})"
            )
        if found.quantity != quantity:
            raise UsageError(
                f"--baseline {name} is a range of {found.quantity}, the source gives {quantity}; unlike quantities "
                "are never compared"
            )
        return found
    if gpu is None and model is None:
        return next((b for b in known if b.general and b.quantity == quantity), None)
    best: tuple[int, Baseline] | None = None
    for baseline in known:
        if baseline.quantity != quantity or baseline.general or not (baseline.gpus or baseline.models):
            continue
        gpu_hit = _hit(baseline.gpus, gpu)
        model_hit = _hit(baseline.models, model)
        if gpu_hit < 0 or model_hit < 0:
            continue
        score = gpu_hit + model_hit
        if score and (best is None or score > best[0]):
            best = (score, baseline)
    return best[1] if best else None


def _hit(patterns: Sequence[str], value: str | None) -> int:
    """Return how well a value fits the patterns: -1 not, 0 nothing to compare, else the length that fits."""
    if not patterns:
        return 0
    if value is None:
        return -1
    text = _plain(value)
    fits = [len(_plain(p)) for p in patterns if _plain(p) in text]
    # Qwen3-4B must not pick Qwen3-4B-Base, and Qwen3-4B-Base not Qwen3-4B: the longer pattern wins above.
    return max(fits, default=-1)


def save(series: Series, name: str, setup: str, gpu: str | None = None, model: str | None = None) -> Baseline:
    """Make a baseline from a finished run and write it to the user's file.

    Raises:
        UsageError: the name is taken by a published baseline or malformed, or the run has nothing to judge.
    """
    if not re.fullmatch(r"[A-Za-z0-9][\w.+-]{0,80}", name):
        raise UsageError(f"save-baseline: {name!r} is no name; use letters, digits, dots and dashes")
    quantity = series.judged()
    if quantity is None:
        raise UsageError(f"save-baseline: {series.label} has no gap metric")
    _, values = series.finite(quantity)
    if len(values) < 3:
        raise UsageError(f"save-baseline: {series.label} has {len(values)} finite steps; at least 3 are needed")
    if not values.any():
        raise UsageError(f"save-baseline: {series.label} is exactly 0 at every step; that is a contract, not a range")
    made = Baseline(
        name, quantity, float(values.min()), float(values.max()), setup, f"{series.source}, {len(values)} steps",
        (_plain(gpu),) if gpu else (), (_plain(model),) if model else (), False, len(values),
    )  # fmt: skip
    kept = [b for b in reversed(_saved()) if b.name != name]
    path = user_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(path, "\n".join(_toml(b) for b in [*kept, made]))
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}; set ZEROGAP_BASELINES") from None
    return made


def _toml(baseline: Baseline) -> str:
    lines = ["[[baseline]]"]
    for key, value in asdict(baseline).items():
        if isinstance(value, tuple):
            value = list(value)
        text = json.dumps(value, ensure_ascii=True)
        lines.append(f"{key} = {text if not (isinstance(value, float) and value == int(value)) else repr(value)}")
    return "\n".join(lines) + "\n"


def outside(values: np.ndarray[Any, Any], baseline: Baseline) -> np.ndarray[Any, Any]:
    """Return bool [N]: values outside the range, with half a last digit of slack for rounded logs."""
    slack = 0.5 * 10.0 ** (math.floor(math.log10(baseline.high)) - 2) if baseline.high > 0 else 0.0
    result: np.ndarray[Any, Any] = (values > baseline.high + slack) | (values < baseline.low - slack)
    return result
