"""Text files: JSON, JSONL, CSV and, failing these, logs; decided by what stands in them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from zerogap.errors import UsageError
from zerogap.gap.names import metric_for, run_label
from zerogap.gap.readers import records as rec
from zerogap.gap.readers.loaded import Loaded, Rollout, add_tables, take
from zerogap.gap.readers.sniff import lines, text_blocks
from zerogap.gap.readers.text_log import flatten, parse_log, parse_metrics
from zerogap.gap.series import SeriesBuilder
from zerogap.gap.table import GapTable

_ROLLOUTS_KEPT = 400
_LINES, _ROWS = 4096, 1 << 20  # after so many records a table is closed if it has so many rows


def load_text(path: Path, mapping: Mapping[str, str], loaded: Loaded) -> None:
    """Read a text file into ``loaded``."""
    source = lines(path)
    head: list[bytes] = []
    for line in source:
        head.append(line)
        if line.strip() and (len(head) >= 50 or sum(map(len, head)) > 1 << 16):
            break
    first = next((line.strip() for line in head if line.strip()), b"")
    if not first:
        raise UsageError(f"{path}: no text in it; check that the run wrote to it")
    if (first[:1] == b"<" and first[1:2].isalpha()) or first[:2] == b"<!":
        raise UsageError(f"{path}: a web page, not a log; name the run or log that it was made from")
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
    take(result.series, loaded, path)


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
        take(builder, loaded, path)
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
            keep_rollout(record, loaded)
            held += 1
            if held % _LINES == 0 and (made := table.build()) is not None and len(made) > _ROWS:
                tables.append(made)
                table = rec.RecordTable(str(path), mapping, first_sample=table.samples)
            continue
        _add_metrics(record, builder)
    made = table.build()
    if made is not None:
        tables.append(made)
    if tables:
        loaded.kind = loaded.kind or "token records"
        add_tables(tables, sum(map(len, tables)), loaded)
    loaded.kind = loaded.kind or "metrics file"
    take(builder, loaded, path)


def _add_metrics(record: Mapping[str, Any], builder: SeriesBuilder) -> None:
    text = json.dumps(record) if len(record) < 2000 else ""
    step, found = parse_metrics(text)
    if found:
        builder.add("", step, found)


def keep_rollout(record: Mapping[str, Any], loaded: Loaded) -> None:
    """Keep a sample's text with its log-probs for the report, up to a limit."""
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
    loaded.kind = loaded.kind or "CSV file of metrics"
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
        take(builder, loaded, path, label)
