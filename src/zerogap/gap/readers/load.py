"""One call that reads any source: decides by content, fills the numbers while streaming, keeps a bounded sample."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from zerogap.errors import UsageError, nearest
from zerogap.gap.facts import Facts
from zerogap.gap.metrics import Accumulator
from zerogap.gap.names import metric_for, metrics, run_label
from zerogap.gap.readers import records as rec
from zerogap.gap.readers.sniff import kind_of, lines, text_blocks
from zerogap.gap.readers.tensorboard import scalars
from zerogap.gap.readers.text_log import LogHit, flatten, parse_log, parse_metrics
from zerogap.gap.readers.torch_dump import read_dump
from zerogap.gap.series import Series, SeriesBuilder, series_of_steps
from zerogap.gap.table import Array, GapTable, concatenate

SAMPLE_TOKENS = 1_500_000  # tokens kept in memory for the diagnoses; numbers always count every token
_ROLLOUTS_KEPT = 400
_SKIP_FILES = {".safetensors", ".bin", ".png", ".svg", ".html", ".py", ".lock", ".tmp", ".gguf", ".model"}


@dataclass
class Rollout:
    """One generated text with its tokens, for the report."""

    step: int
    sample: str
    prompt: str
    text: str
    token_ids: list[int]
    engine: list[float]
    trainer: list[float]
    reward: float = math.nan


@dataclass
class Loaded:
    """Everything a source gave.

    Attributes:
        label: the source as the person named it.
        kind: what it was recognised as.
        series: one per run.
        table: rows for the diagnoses; whole sequences spread over the source when there are very many.
        accumulator: sums over every row.
        facts: what was stated about the setup, name -> value.
        hits: log lines that match a known trouble.
    """

    label: str
    kind: str = ""
    series: list[Series] = field(default_factory=list)
    table: GapTable | None = None
    accumulator: Accumulator = field(default_factory=Accumulator)
    facts: dict[str, Any] = field(default_factory=dict)
    hits: list[LogHit] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    rollouts: list[Rollout] = field(default_factory=list)
    other: dict[str, Series] = field(default_factory=dict)
    folder: Path | None = None
    stated: Facts | None = None

    @property
    def has_tokens(self) -> bool:
        """Whether rows with both log-probs were read."""
        return self.accumulator._n.tokens > 0


class _Sampler:
    """Keeps whole sequences, chosen by a hash of their name, so that a sample is spread over the source."""

    def __init__(self, rows: int) -> None:
        self.share = min(1.0, SAMPLE_TOKENS / max(rows, 1))
        self.parts: list[GapTable] = []
        self.rows = 0

    def add(self, table: GapTable) -> None:
        self.rows += len(table)
        if self.share < 1.0:
            table = table.where(_sequence_hash(table) < self.share)
        if len(table):
            self.parts.append(table)


def _sequence_hash(table: GapTable) -> Array:
    """Return float64 [N] in [0, 1), the same for all rows of a sequence."""
    mixed = np.zeros(len(table), dtype=np.uint64)
    for name, factor in (("step", 0x9E3779B97F4A7C15), ("sample", 0xC2B2AE3D27D4EB4F)):
        if name in table.columns:
            values = table.columns[name]
            if values.dtype == object:
                unique, inverse = np.unique(values.astype(str), return_inverse=True)
                hashed = np.array([int.from_bytes(u.encode()[-7:], "little") for u in unique], dtype=np.uint64)
                values = hashed[inverse]
            mixed ^= values.astype(np.uint64) * np.uint64(factor)
            mixed ^= mixed >> np.uint64(29)
            mixed *= np.uint64(0xBF58476D1CE4E5B9)
            mixed ^= mixed >> np.uint64(32)
    result: Array = mixed.astype(np.float64) / 2.0**64
    return result


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
        _take(builder, loaded, path)
    else:
        _load_text(path, mapping, loaded)


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


def add_tables(tables: Iterable[GapTable], rows: int, loaded: Loaded) -> None:
    """Count the tables' tokens and keep a sample of them."""
    sampler = _Sampler(rows)
    for table in tables:
        if table.has("logprob_engine", "logprob_trainer"):
            loaded.accumulator.add(table if rows > SAMPLE_TOKENS else table.sorted())
        sampler.add(table)
    if not sampler.parts:
        return
    parts = sampler.parts if loaded.table is None else [loaded.table, *sampler.parts]
    total = sampler.rows + (loaded.table.rows_total if loaded.table is not None else 0)
    loaded.table = concatenate(parts, loaded.label).sorted()
    loaded.table.rows_total = total
    if len(loaded.table) < total:
        loaded.notes.append(f"diagnoses look at {len(loaded.table):,} of {total:,} tokens (whole sequences)")


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


def _load_text(path: Path, mapping: Mapping[str, str], loaded: Loaded) -> None:
    source = lines(path)
    head: list[bytes] = []
    for line in source:
        head.append(line)
        if line.strip() and (len(head) >= 50 or sum(map(len, head)) > 1 << 16):
            break
    first = next((line.strip() for line in head if line.strip()), b"")
    if not first:
        raise UsageError(f"{path}: no text in it; check that the run wrote to it")
    everything = _chain(head, source)
    if first[:1] in b"{[":
        whole = _whole_json(path, first)
        if whole is not None:
            _load_json(whole, path, mapping, loaded)
            return
        if _is_json(first):
            _load_jsonl(everything, path, mapping, loaded)
            return
    if _looks_like_csv(head):
        _load_csv(everything, path, mapping, loaded)
        return
    result = parse_log(text_blocks(path), str(path))
    loaded.kind = loaded.kind or "log"
    loaded.hits += result.hits
    loaded.facts.update(result.facts)
    _take(result.series, loaded, path)


def _chain(head: list[bytes], rest: Iterator[bytes]) -> Iterator[bytes]:
    yield from head
    yield from rest


def _is_json(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line.decode("utf-8", "replace")), dict)
    except (ValueError, RecursionError):
        return False


def _whole_json(path: Path, first: bytes) -> Any | None:
    """Return the value of a file that is one JSON document (not JSONL), or None."""
    if path.stat().st_size > 1 << 30 or (_is_json(first) and first.startswith(b"{") and _second_line(path)):
        return None
    try:
        return json.loads(b"\n".join(lines(path)).decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None


def _second_line(path: Path) -> bool:
    found = (line for line in lines(path) if line.strip())
    next(found, b"")
    return bool(next(found, b""))


def _load_json(value: Any, path: Path, mapping: Mapping[str, str], loaded: Loaded) -> None:
    if isinstance(value, dict) and isinstance(value.get("log_history"), list):
        loaded.kind = loaded.kind or "trainer_state.json"
        builder = SeriesBuilder(str(path))
        for record in value["log_history"]:
            if isinstance(record, dict):
                step = record.get("step")
                found = {k: v for k, v in flatten(record) if k not in ("step", "epoch")}
                builder.add("", int(step) if step is not None else None, found)
        _take(builder, loaded, path)
    elif isinstance(value, list):
        _load_records(value, path, mapping, loaded)
    elif isinstance(value, dict) and rec.is_token_record(value, mapping):
        _load_records([value], path, mapping, loaded)
    elif isinstance(value, dict) and value and all(isinstance(v, dict) for v in value.values()):
        _load_records(list(value.values()), path, mapping, loaded)
    elif isinstance(value, dict):
        columns = {k: v for k, v in value.items() if isinstance(v, list)}
        if columns and len({len(v) for v in columns.values()}) == 1:
            count = len(next(iter(columns.values())))
            _load_records([{k: v[i] for k, v in columns.items()} for i in range(count)], path, mapping, loaded)
            return
        if any(metric_for(name) for name, _ in flatten(value)):
            _load_records([value], path, mapping, loaded)
            return
        loaded.kind = loaded.kind or "JSON facts"
        loaded.facts.update({str(k): v for k, v in value.items() if not isinstance(v, dict)})


def _load_jsonl(source: Iterable[bytes], path: Path, mapping: Mapping[str, str], loaded: Loaded) -> None:
    def parsed() -> Iterator[Any]:
        torn: int | None = None
        for number, line in enumerate(source, start=1):
            text = line.strip()
            if not text:
                continue
            if torn is not None:
                raise UsageError(f"{path}: line {torn} is no JSON; remove it or check the file")
            try:
                yield json.loads(text.decode("utf-8", "replace"))
            except (ValueError, RecursionError):
                torn = number  # fine as the last line of a file that is still being written
        if torn is not None:
            loaded.notes.append(f"line {torn} is cut off and was left out")

    _load_records(parsed(), path, mapping, loaded)


def _load_records(found: Iterable[Any], path: Path, mapping: Mapping[str, str], loaded: Loaded) -> None:
    table = rec.RecordTable(str(path), mapping)
    builder = SeriesBuilder(str(path))
    tables: list[GapTable] = []
    held = 0
    for number, record in enumerate(found, start=1):
        if not isinstance(record, dict):
            continue
        if rec.is_token_record(record, mapping):
            table.add(record, f"{path}:{number}")
            _keep_rollout(record, loaded)
            held += 1
            if held % 4096 == 0 and (made := table.build()) is not None and len(made) > 1 << 20:
                tables.append(made)
                table = rec.RecordTable(str(path), mapping)
            continue
        _add_metrics(record, builder)
    made = table.build()
    if made is not None:
        tables.append(made)
    if tables:
        loaded.kind = loaded.kind or "token records"
        add_tables(tables, sum(map(len, tables)), loaded)
    loaded.kind = loaded.kind or "metrics"
    _take(builder, loaded, path)


def _add_metrics(record: Mapping[str, Any], builder: SeriesBuilder) -> None:
    text = json.dumps(record) if len(record) < 2000 else ""
    step, found = parse_metrics(text)
    if found:
        builder.add("", step, found)


def _keep_rollout(record: Mapping[str, Any], loaded: Loaded) -> None:
    if len(loaded.rollouts) >= _ROLLOUTS_KEPT:
        return
    text = record.get("completion", record.get("response"))
    engine = record.get("logprobs_engine", record.get("logprob_engine", record.get("rollout_log_probs")))
    trainer = record.get("logprobs_trainer", record.get("logprob_trainer", record.get("log_probs")))
    if not (isinstance(text, str) and isinstance(engine, list) and isinstance(trainer, list)):
        return
    ids = record.get("response_ids", record.get("token_ids", []))
    loaded.rollouts.append(
        Rollout(
            int(record.get("step") or 0),
            str(record.get("sample", len(loaded.rollouts))),
            str(record.get("prompt", "")),
            text,
            [int(i) for i in ids] if isinstance(ids, list) else [],
            [math.nan if v is None else float(v) for v in engine],
            [math.nan if v is None else float(v) for v in trainer],
            float(record["reward"]) if record.get("reward") is not None else math.nan,
        )
    )


def _looks_like_csv(head: list[bytes]) -> bool:
    rows = [line.decode("utf-8", "replace").rstrip("\r") for line in head if line.strip() and not line.startswith(b"#")]
    if len(rows) < 2 or any(mark in rows[0] for mark in "{}()="):
        return False
    delimiter = max(",\t;", key=rows[0].count)
    cells = [cell.strip().strip('"') for cell in rows[0].split(delimiter)]
    if len(cells) < 2 or any(_numeric(cell) for cell in cells) or any(" " in cell.strip() for cell in cells):
        return False
    return rows[1].count(delimiter) >= len(cells) - 1


def _numeric(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _load_csv(source: Iterable[bytes], path: Path, mapping: Mapping[str, str], loaded: Loaded) -> None:
    header, rows = rec.read_csv(source, str(path))
    if rec.is_token_record(dict.fromkeys(header, 0), mapping):
        loaded.kind = loaded.kind or "token table (CSV)"
        table = rec.RecordTable(str(path), mapping)
        for number, row in enumerate(rows, start=2):
            table.add(row, f"{path}:{number}")
        made = table.build()
        if made is not None:
            add_tables([made], len(made), loaded)
        return
    loaded.kind = loaded.kind or "metrics (CSV)"
    labels = {name: run_label(name) for name in header}
    runs = {name: label for name, label in labels.items() if label}
    builders = {label: SeriesBuilder(str(path)) for label in runs.values()} or {"": SeriesBuilder(str(path))}
    for row in rows:
        values = {k: float(v) if _numeric(v) else math.nan for k, v in row.items() if v is not None and k}
        step = next((int(values.pop(k)) for k in list(values) if k.lower() in ("step", "global_step", "iteration",
                    "rollout_id", "rollout", "_step") and math.isfinite(values[k])), None)  # fmt: skip
        common = {k: v for k, v in values.items() if k not in runs}
        for name, label in runs.items():
            if name in values:
                builders[label].add("", step, {**common, "gap": values[name]})
        if not runs:
            builders[""].add("", step, common)
    for label, builder in builders.items():
        _take(builder, loaded, path, label)


def _take(builder: SeriesBuilder, loaded: Loaded, path: Path, label: str = "") -> None:
    for series in builder.build(f"{loaded.label}:{label}" if label else loaded.label):
        if series.judged() or any(name in series.values for name in ("different", "prob_pearson")):
            loaded.series.append(series)
        else:
            loaded.other[f"{series.label}"] = series
        loaded.notes += [f"{path.name}: {note}" for note in series.notes if f"{path.name}: {note}" not in loaded.notes]


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
