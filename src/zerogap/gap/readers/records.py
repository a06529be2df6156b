"""Rows and records: JSON, JSONL, CSV and Parquet, one token or one whole sample in each."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from zerogap.errors import UsageError
from zerogap.gap.table import Array, GapTable, resolve_columns, schema

LOGPROBS = ("logprob_engine", "logprob_trainer")
# Columns of one value for each token, in files that hold one sample on a line.
_PER_TOKEN = frozenset(
    [
        "token_id",
        "logprob_engine",
        "logprob_trainer",
        "logprob_trainer_second",
        "loss_mask",
        "kept_mass",
        "kept_replayed",
        "cached_tokens",
        "logprob_engine_unfiltered",
        "version_engine",
        "engine_token_id",
        "turn",
        "position",
        "temperature",
    ]
)


def is_token_record(record: Mapping[str, Any], mapping: Mapping[str, str]) -> bool:
    """Whether a JSON object holds log-probs of tokens rather than metrics of a step."""
    chosen = _resolve(record, mapping)
    sides = [chosen[name] for name in LOGPROBS if name in chosen]
    if not sides:
        return False
    if any(isinstance(record[side], list) for side in sides):
        return True
    both = len(sides) == 2
    return both or "position" in chosen or "token_id" in chosen


def _resolve(record: Mapping[str, Any], mapping: Mapping[str, str]) -> dict[str, str]:
    return _resolve_keys(tuple(record), tuple(mapping.items()))


@lru_cache(maxsize=256)
def _resolve_keys(keys: tuple[str, ...], mapping: tuple[tuple[str, str], ...]) -> dict[str, str]:
    return resolve_columns(keys, {ours: theirs for ours, theirs in mapping if theirs in keys or ours not in schema()})


class RecordTable:
    """Collects JSON records of tokens or samples and makes one table of them.

    Args:
        source: where they come from, for messages.
        mapping: table column -> source column, from ``--map``.
        first_sample: number of the first sample without a name, when earlier ones are in another table.
    """

    def __init__(self, source: str, mapping: Mapping[str, str], first_sample: int = 0) -> None:
        self.source, self.mapping = source, mapping
        self._columns: dict[str, list[Any]] = {}
        self._rows = 0
        self._samples = first_sample

    @property
    def samples(self) -> int:
        """Samples taken so far, those of earlier tables included."""
        return self._samples

    def add(self, record: Mapping[str, Any], where: str) -> None:
        """Take one record; a sample's lists must agree in length."""
        chosen = _resolve(record, self.mapping)
        lists = {
            ours: record[theirs]
            for ours, theirs in chosen.items()
            if isinstance(record[theirs], list) and ours in _PER_TOKEN
        }
        if lists:
            self._add_sample(record, chosen, lists, where)
        else:
            self._append({ours: [record[theirs]] for ours, theirs in chosen.items()}, 1)

    def _add_sample(
        self, record: Mapping[str, Any], chosen: Mapping[str, str], lists: dict[str, list[Any]], where: str
    ) -> None:
        length = len(lists.get("logprob_engine", lists.get("logprob_trainer", next(iter(lists.values())))))
        sample = record.get(chosen.get("sample", ""), self._samples)
        name = ":".join(map(str, sample)) if isinstance(sample, list) else str(sample)
        prompt = _count(record.get(chosen.get("prompt_length", "")))
        tokens = lists.get("token_id")
        whole = _count(record.get(chosen.get("real_length", ""))) == length
        if tokens is not None and len(tokens) > length and (whole or prompt == len(tokens) - length):
            lists["token_id"] = tokens[len(tokens) - length :]  # prompt and response in one list
            row_prompt = len(tokens) - length
        else:
            row_prompt = prompt or 0
        if "engine_token_id" in lists and len(lists["engine_token_id"]) != len(lists.get("token_id", ())):
            self._retokenised(lists, name, where)
        lengths = {chosen[ours]: len(values) for ours, values in lists.items()}
        if len(set(lengths.values())) > 1:
            raise UsageError(_mismatch(name, where, chosen, lists, record))
        row: dict[str, list[Any]] = dict(lists)
        for ours, theirs in chosen.items():
            if ours not in lists and ours != "sample":
                row[ours] = [_scalar(record[theirs])] * length
        row["sample"] = [name] * length
        row.setdefault("position", list(range(length)))
        if row_prompt:
            row["prompt_length"] = [row_prompt] * length
        self._append(row, length)
        self._samples += 1

    def _retokenised(self, lists: dict[str, list[Any]], name: str, where: str) -> None:
        """Ids of different length: the first difference stays visible by padding the shorter list."""
        length = len(lists.get("logprob_engine", lists["engine_token_id"]))
        for key in ("engine_token_id", "token_id"):
            if key in lists:
                values = lists[key][:length]
                lists[key] = values + [-1] * (length - len(values))

    def _append(self, row: Mapping[str, Sequence[Any]], count: int) -> None:
        for name, values in row.items():
            held = self._columns.setdefault(name, [None] * self._rows)
            held.extend(values)
        self._rows += count
        for held in self._columns.values():
            if len(held) < self._rows:
                held.extend([None] * (self._rows - len(held)))

    def build(self) -> GapTable | None:
        """Return the table, or None when no record was taken."""
        if not self._rows:
            return None
        columns: dict[str, Array] = {}
        nulls: dict[str, Array] = {}
        for name, values in self._columns.items():
            columns[name], empty = _column(name, values, self.source)
            if empty.any():
                nulls[name] = empty
        return GapTable(columns, nulls, self.source)


def _mismatch(
    name: str, where: str, chosen: Mapping[str, str], lists: Mapping[str, list[Any]], record: Mapping[str, Any]
) -> str:
    numbers = ", ".join(f"{chosen[ours]}={len(values)}" for ours, values in lists.items())
    text = f"{where}: sample {name}: lengths do not match: {numbers}"
    mask = len(lists["loss_mask"]) if "loss_mask" in lists else None
    rest = {len(values) for ours, values in lists.items() if ours != "loss_mask"}
    if mask is not None and len(rest) == 1 and mask < rest.pop():
        return (
            f"{text}; MASK_NOT_EXTENDED_ON_RESUME: the loss mask stops where a partial rollout was taken up again; "
            "extend it when a sample is resumed"
        )
    return f"{text}; one value for each generated token is needed on every side"


def _count(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _scalar(value: Any) -> Any:
    if isinstance(value, list):
        return value[0] if len(value) == 1 else None
    return value if not isinstance(value, dict) else None


def _column(name: str, values: list[Any], source: str) -> tuple[Array, Array]:
    kind = schema()[name].type
    empty = np.array([value is None for value in values])
    if kind == "string":
        return np.array(["" if v is None else str(v) for v in values], dtype=object), empty
    fill: Any = math.nan if kind == "float32" else schema()[name].missing
    try:
        if kind == "bool":
            return np.array([fill if v is None else bool(float(v)) for v in values], dtype=bool), empty
        numbers = np.array([fill if v is None else _number(v) for v in values], dtype=np.float64)
    except (TypeError, ValueError):
        bad = next(v for v in values if not _is_number(v))
        raise UsageError(f"{source}: column {name}: {bad!r} is no number; map another column with --map") from None
    if kind == "int64":
        if not np.isfinite(numbers).all():
            empty |= ~np.isfinite(numbers)
            numbers = np.nan_to_num(numbers)
        return numbers.astype(np.int64), empty
    with np.errstate(over="ignore"):
        return numbers.astype(np.float32), empty


def _number(value: Any) -> float:
    if isinstance(value, str):
        text = value.strip()
        return math.nan if text in ("", "null", "None") else float(text)
    return float(value)


def _is_number(value: Any) -> bool:
    try:
        return value is None or math.isfinite(_number(value)) or True
    except (TypeError, ValueError):
        return False


def read_csv(source: Iterable[bytes], name: str) -> tuple[list[str], Iterator[dict[str, Any]]]:
    """Return the header and the rows (as dictionaries; empty cells are None) of a CSV or TSV file."""
    text = (line.decode("utf-8", "replace").rstrip("\r") for line in source)
    head = ""
    for head in text:
        if head.strip() and not head.startswith("#"):
            break
    delimiter = max(",\t;", key=head.count)
    header = [cell.strip() for cell in next(csv.reader(io.StringIO(head), delimiter=delimiter))]

    def rows() -> Iterator[dict[str, Any]]:
        for number, cells in enumerate(csv.reader(text, delimiter=delimiter), start=2):
            if not cells or not any(cell.strip() for cell in cells):
                continue
            if len(cells) != len(header):
                if number > 2 and len(cells) < len(header):
                    return  # the last line of a file that is still being written
                raise UsageError(f"{name}: line {number} has {len(cells)} cells, the header {len(header)}")
            yield {key: cell.strip() or None for key, cell in zip(header, cells, strict=True)}

    return header, rows()


def write_table(table: GapTable, path: Path) -> None:
    """Write the table as Parquet, or as JSONL when the name ends in .jsonl; whole or not at all."""
    from zerogap.files import write_atomic

    write_atomic(path, lambda temporary: _write(table, temporary, jsonl=path.suffix in (".jsonl", ".json")))


def _write(table: GapTable, path: Path, *, jsonl: bool) -> None:
    arrays = {}
    for name, values in table.columns.items():
        kind = schema()[name].type
        wanted = {"int64": pa.int64(), "float32": pa.float32(), "bool": pa.bool_(), "string": pa.string()}[kind]
        if kind == "string":
            values = np.array([str(v) for v in values], dtype=object)
        arrays[name] = pa.array(values, type=wanted, mask=table.nulls.get(name), from_pandas=False)
    made = pa.table(arrays)
    if not jsonl:
        pq.write_table(made, path, compression="zstd")
        return
    with path.open("w", encoding="utf-8") as file:
        for batch in made.to_batches(max_chunksize=1 << 14):
            for record in batch.to_pylist():
                file.write(json.dumps({key: value for key, value in record.items() if value is not None}) + "\n")
