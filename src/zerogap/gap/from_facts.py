"""Small tables and series that notes state: lists of log-probs, or a gap at a few steps."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from zerogap.gap.facts import NUMBER, Facts
from zerogap.gap.readers.loaded import Loaded, add_tables
from zerogap.gap.readers.records import RecordTable
from zerogap.gap.series import Series, SeriesBuilder


def add_stated(loaded: Loaded, facts: Facts) -> None:
    """Make a small table or series of what notes state: lists of log-probs, or a gap at a few steps."""
    sides = {}
    for side, names in (("engine", ("rollout", "engine", "logprobs", "rollout_logprobs", "engine_logprobs",
                                    "engine_logps", "logprobs_engine", "logprob_engine")),
                        ("trainer", ("trainer", "trainer_logprobs", "trainer_logps", "logprobs_trainer",
                                     "logprob_trainer", "train"))):  # fmt: skip
        value = facts.first(*names)
        if isinstance(value, list) and len(value) >= 2 and all(v is None or isinstance(v, int | float) for v in value):
            sides[side] = value
    if not sides and (found := facts.search(r"->\s*\[([^\]]+)\]")) and "null" in found.group(1):
        facts.add_text(f"logprobs=[{found.group(1)}]")
        sides["engine"] = facts.first("logprobs")
    if sides:
        _small_table(loaded, sides)
        return
    steps = re.findall(rf"step\s*(\d+)\s+(?:\w+\s+)?(?:abs_)?(?:diff|gap)\s*[=:]\s*({NUMBER})", facts.text)
    if len(steps) >= 2:
        builder = SeriesBuilder("facts")
        for step, value in steps:
            builder.add("", int(step), {"gap": float(value)})
        loaded.series = builder.build(loaded.label)
        return
    gap = facts.number("gap", "abs_diff", "mean_abs_diff")
    if gap is not None and gap > 0:
        loaded.series = [Series(loaded.label, np.zeros(1, dtype=np.int64), {"abs_mean": np.array([gap])},
                                {"abs_mean": "gap"})]  # fmt: skip


def _small_table(loaded: Loaded, sides: Mapping[str, list[Any]]) -> None:
    if len({len(v) for v in sides.values()}) > 1:
        loaded.notes.append(f"log-prob lists of different length: { {k: len(v) for k, v in sides.items()} }")
        return
    records = RecordTable(loaded.label, {})
    records.add({f"logprob_{side}": list(values) for side, values in sides.items()}, loaded.label)
    made = records.build()
    if made is not None:
        add_tables([made], len(made), loaded)
