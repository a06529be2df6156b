"""One file of any kind, read into what was loaded so far; the kind is decided by content."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from zerogap.errors import UsageError
from zerogap.gap.readers.context_parallel import join_ranks
from zerogap.gap.readers.loaded import Loaded, add_tables, take
from zerogap.gap.readers.parquet import parquet_batches
from zerogap.gap.readers.records import RecordTable
from zerogap.gap.readers.sniff import kind_of
from zerogap.gap.readers.tensorboard import scalars
from zerogap.gap.readers.text import load_text
from zerogap.gap.readers.torch_dump import read_dump
from zerogap.gap.series import SeriesBuilder


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
    rows, batches = parquet_batches(path, mapping)
    add_tables(batches, rows, loaded)


def add_records(found: Iterable[Mapping[str, Any]], where: str, mapping: Mapping[str, str], loaded: Loaded) -> None:
    """Take sample records, joining what rollout and train dumps say about the same sample."""
    table = RecordTable(where, mapping)
    joined: dict[tuple[str, str], dict[str, Any]] = {}
    cut: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for number, record in enumerate(found):
        record = {key: value for key, value in record.items() if value is not None}
        kind = record.pop("__kind", None)
        if kind in ("rollout", "train"):
            name = record.pop("index", None)
            name = record.pop("sample_indices", name) if kind == "train" else name
            record["sample"] = str(name)
            held = joined.setdefault((str(record.get("step")), str(name)), {})
            if "__cp" in record:
                cut.setdefault((str(record.get("step")), str(name)), []).append(record)
            else:
                _add_side(held, record, kind)
        else:
            table.add(record, f"{where}:{number + 1}")
    for (step, name), ranks in cut.items():
        _add_side(joined[step, name], join_ranks(ranks, f"{where}: step {step}, sample {name}"), "train")
    for (step, name), record in joined.items():
        _trim(record)
        table.add(record, f"{where}: step {step}, sample {name}")
    made = table.build()
    if made is not None:
        add_tables([made], len(made), loaded)


def _add_side(held: dict[str, Any], record: dict[str, Any], kind: str) -> None:
    """Add what one dump says of a sample; the rollout dump's engine values are the unrounded ones."""
    if kind == "train" and "rollout_log_probs" in held:
        record.pop("rollout_log_probs", None)
    held.update(record)


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
