"""One linear layer against MKL's, over cold weights, for the shapes of two models."""

from __future__ import annotations

import statistics
from typing import Any

from measure import Busy, Row, Side, SideError, tell
from speedrows.bench import Bench

ROWS = (1, 8, 64, 512)
# (name, outputs N, inputs K, segments of K): SmolLM2-135M and Qwen3-0.6B.
SHAPES = (
    ("smollm2 q", 576, 576, 1),
    ("smollm2 kv", 192, 576, 1),
    ("smollm2 o", 576, 576, 1),
    ("smollm2 gate/up", 1536, 576, 1),
    ("smollm2 down", 576, 1536, 8),
    ("smollm2 head", 49152, 576, 1),
    ("qwen3 q", 2048, 1024, 1),
    ("qwen3 kv", 1024, 1024, 1),
    ("qwen3 o", 1024, 2048, 8),
    ("qwen3 gate/up", 3072, 1024, 1),
    ("qwen3 down", 1024, 3072, 8),
    ("qwen3 head", 151936, 1024, 1),
)
TARGETS = {8: 2.5, 64: 1.2, 512: 1.0}
FMA_SHARE_FROM_64 = 0.85
READ_SHARE_AT_1 = 0.90


def linear(bench: Bench, backend: str) -> list[Row]:
    """Return a row per number of rows, which is the geometric mean over the shapes, and one per shape under it."""
    found: list[Row] = []
    for count in ROWS:
        busy = Busy()
        parts = [_shape(bench, backend, count, *shape) for shape in SHAPES]
        parts = [part for part in parts if part.ours]
        if not parts:
            continue
        mean = Row(
            f"linear-{count}",
            f"linear, {count} rows: geometric mean over {len(parts)} shapes",
            _means([part.ours for part in parts]),
            {"MKL": _means([part.others["MKL"] for part in parts])},
            target=TARGETS.get(count),
            floor_s=statistics.geometric_mean([part.floor_s or 0.0 for part in parts]),
        )
        worst = min(parts, key=lambda part: part.ratio().median)  # type: ignore[union-attr]
        mean.note = f"worst shape {worst.what}: {worst.ratio().median:.2f}x"  # type: ignore[union-attr]
        need = READ_SHARE_AT_1 if count == 1 else FMA_SHARE_FROM_64 if count >= 64 else None
        if need is not None:
            mean.extra = {"roofline_target": need, "roofline_holds": (mean.roofline or 0.0) >= need}
        busy.note(mean)
        found += [mean, *parts]
    return found


def _means(values: list[list[float]]) -> list[float]:
    return [statistics.geometric_mean(round_) for round_ in zip(*values, strict=True)]


def _shape(bench: Bench, backend: str, rows: int, name: str, out_features: int, in_features: int, segments: int) -> Row:
    label = f"{name}, {rows} rows"
    request: dict[str, Any] = {"out_features": out_features, "in_features": in_features, "rows": rows}
    row = Row(f"linear-{rows}/{name}", f"{name} {out_features} x {in_features}", [])
    side: Side
    try:
        side = bench.side("ours")
        answer = side.ask(do="linear", segments=segments, backend=backend, passes=bench.count, seed=rows, **request)
    except SideError as error:
        row.problems.append(f"{label}: {error}")
        return row
    row.ours, row.others = answer["ours_s"], {"MKL": answer["mkl_s"]}
    tell(f"linear: {label}: {min(row.others['MKL']) / min(row.ours):.2f}x")
    weights = 4 * out_features * in_features
    moved = weights + 4 * rows * (in_features + out_features)
    row.floor_s = bench.machine.floor(moved, 2 * rows * out_features * in_features)
    row.extra = {"difference": answer["difference"]}
    if answer["difference"] > 1e-4:
        row.problems.append(f"{label}: the two results differ by {answer['difference']:.1e} of the largest")
    return row
