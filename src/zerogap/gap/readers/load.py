"""One call that reads any source: decides by content, fills the numbers while streaming, keeps a bounded sample."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from zerogap.errors import UsageError, nearest
from zerogap.gap.names import metrics
from zerogap.gap.readers import records as rec
from zerogap.gap.readers.loaded import Loaded, add_tables, take
from zerogap.gap.readers.sniff import kind_of
from zerogap.gap.readers.tensorboard import scalars
from zerogap.gap.readers.text import load_text
from zerogap.gap.readers.torch_dump import read_dump
from zerogap.gap.series import Series, SeriesBuilder, series_of_steps

SKIP_FILES = {".safetensors", ".bin", ".png", ".svg", ".html", ".py", ".lock", ".tmp", ".gguf", ".model"}


def load(source: Path, mapping: Mapping[str, str] | None = None, label: str | None = None) -> Loaded:
    """Read one source: a log, dump, table, event file, or a folder that holds some of these.

    Args:
        source: file or folder.
        mapping: table column -> source column, from ``--map``.
        label: name to show; the path by default.

    Raises:
        UsageError: nothing usable was found, or the source is damaged or refused.
    """
    loaded = Loaded(label or str(source))
    if not source.exists():
        raise UsageError(f"{source}: no such file or folder; check the path")
    if source.is_dir():
        from zerogap.gap.readers.folder import load_folder

        load_folder(source, mapping or {}, loaded)
    else:
        load_file(source, mapping or {}, loaded)
    if mapping and loaded.table is None:
        raise UsageError(f"--map: {source} is a {loaded.kind or 'source'} without columns of tokens; leave --map out")
    if loaded.has_tokens:
        made = series_of_steps(loaded.accumulator.steps, loaded.label, str(source))
        _merge_series(loaded, made)
    if not loaded.series and not loaded.has_tokens and loaded.table is None and not loaded.hits and not loaded.facts:
        raise UsageError(_nothing(source, loaded))
    return loaded


def _nothing(source: Path, loaded: Loaded) -> str:
    seen = sorted({name for series in loaded.other.values() for name in series.other})
    wanted = [name for metric in metrics() for name in metric.names]
    near = next((f"{name!r} there{hint}" for name in seen if (hint := nearest(name, wanted))), "")
    return (
        f"{source}: no gap metric and no log-probs found in this {loaded.kind or 'source'}"
        + (f"; {near}" if near else "")
        + "; see `zerogap gap --metrics` for the names that are known, or name columns with --map"
    )


def _merge_series(loaded: Loaded, made: list[Series]) -> None:
    """Token series win for what they measure; what a log said beside them (lr, reward) is kept."""
    if len(made) == 1 and len(loaded.series) == 1:
        ours, logged = made[0], loaded.series[0]
        index = {int(step): row for row, step in enumerate(logged.steps)}
        rows = [index.get(int(step)) for step in ours.steps]
        if all(row is None for row in rows):
            loaded.series = made + loaded.series
            return
        loaded.contradictions += _contradictions(ours, logged, rows)
        for name, values in logged.values.items():
            if name not in ours.values:
                ours.values[name] = np.array([math.nan if r is None else values[r] for r in rows])
                ours.names[name] = logged.names[name]
        loaded.other[logged.label] = logged
        if len(logged) > len(ours):
            # The log covers more steps than the tokens do: the log is the series.
            loaded.series = [logged]
            return
        loaded.series = made
    else:
        loaded.series = made + loaded.series


def _contradictions(ours: Series, logged: Series, rows: list[int | None]) -> list[tuple[int, float, float]]:
    """Return (step, logged mean, mean of the tokens) where one is 0 and the other not, or they differ by half."""
    if "abs_mean" not in logged.values:
        return []
    found = []
    for row, other in enumerate(rows):
        if other is None:
            continue
        tokens, value = float(ours.values["abs_mean"][row]), float(logged.values["abs_mean"][other])
        low, high = sorted((tokens, value)) if math.isfinite(value) else (0.0, tokens)
        if high > 1e-7 and low < 0.5 * high:
            found.append((int(ours.steps[row]), value, tokens))
    return found


def load_file(path: Path, mapping: Mapping[str, str], loaded: Loaded) -> None:
    """Read one file into ``loaded``."""
    kind = kind_of(path)
    if kind == "gzip":
        kind = "text"
    if kind == "empty":
        raise UsageError(f"{path}: empty file; check that the run wrote to it")
    if kind == "binary":
        raise UsageError(f"{path}: neither text nor a known format (mostly zero or binary bytes); check the path")
    if kind == "pickle":
        raise UsageError(
            f"{path}: refused: a bare pickle can run code when it is read; save it with torch.save (zip form), "
            "or export Parquet or JSONL"
        )
    if kind == "parquet":
        _load_parquet(path, mapping, loaded)
    elif kind == "zip":
        loaded.kind = loaded.kind or "torch dump"
        add_records(read_dump(path), str(path), mapping, loaded)
    elif kind == "tfrecord":
        loaded.kind = loaded.kind or "TensorBoard events"
        builder = SeriesBuilder(str(path))
        _add_events(path, builder)
        take(builder, loaded, path)
    else:
        load_text(path, mapping, loaded)


def _add_events(path: Path, builder: SeriesBuilder) -> None:
    by_step: dict[int, dict[str, float]] = {}
    for step, tag, value in scalars(path):
        held = by_step.setdefault(step, {})
        if tag in held and held[tag] != value:
            for done, found in by_step.items():
                builder.add("", done, found)
            by_step = {step: {}}
            held = by_step[step]
        held[tag] = value
    for step, found in by_step.items():
        builder.add("", step, found)


def _load_parquet(path: Path, mapping: Mapping[str, str], loaded: Loaded) -> None:
    loaded.kind = loaded.kind or "Parquet table"
    rows, batches = rec.parquet_batches(path, mapping)
    add_tables(batches, rows, loaded)


def add_records(found: Iterable[Mapping[str, Any]], where: str, mapping: Mapping[str, str], loaded: Loaded) -> None:
    """Take sample records, joining what rollout and train dumps say about the same sample."""
    table = rec.RecordTable(where, mapping)
    joined: dict[tuple[str, str], dict[str, Any]] = {}
    for number, record in enumerate(found):
        record = {key: value for key, value in record.items() if value is not None}
        kind = record.pop("__kind", None)
        if kind in ("rollout", "train"):
            name = record.pop("index", None)
            name = record.pop("sample_indices", name) if kind == "train" else name
            record["sample"] = str(name)
            held = joined.setdefault((str(record.get("step")), str(name)), {})
            if kind == "train":
                record.pop("rollout_log_probs", None) if "rollout_log_probs" in held else None
                held.update(record)
            else:
                held.update(record)
        else:
            table.add(record, f"{where}:{number + 1}")
    for (step, name), record in joined.items():
        _trim(record)
        table.add(record, f"{where}: step {step}, sample {name}")
    made = table.build()
    if made is not None:
        add_tables([made], len(made), loaded)


def _trim(record: dict[str, Any]) -> None:
    """Bring a dump's prompt-and-response token list to the response."""
    for side in ("rollout_log_probs", "log_probs"):
        if isinstance(record.get(side), list) and isinstance(record.get("tokens"), list):
            length = len(record[side])
            if len(record["tokens"]) > length and record.get("response_length", length) == length:
                record["prompt_length"] = len(record["tokens"]) - length
                record["tokens"] = record["tokens"][-length:] if length else []
            return


def facts_of_toml(path: Path) -> dict[str, Any]:
    """Return the values of a TOML file as dotted names."""
    try:
        with path.open("rb") as file:
            content = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError):
        return {}

    def walk(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for key, value in table.items():
            if isinstance(value, dict):
                yield from walk(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", value

    return dict(walk(content, ""))
