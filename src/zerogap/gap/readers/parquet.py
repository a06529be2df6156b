"""Parquet: columns of tokens, or one sample with its lists in each row; read in batches, only what is used."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from zerogap.errors import UsageError
from zerogap.gap.readers.records import LOGPROBS, RecordTable
from zerogap.gap.table import Array, GapTable, resolve_columns, schema

_BATCH = 1 << 20  # rows of one token each
_SAMPLES = 2048  # rows of one sample each, fewer where samples are long
_SAMPLE_TOKENS = 1 << 18  # tokens of such a batch, about


def parquet_batches(path: Path, mapping: Mapping[str, str]) -> tuple[int, Iterator[GapTable]]:
    """Return (tokens, tables of about a million at most) of a Parquet file, reading only the columns that are used.

    The tables are cut at any row; see ``whole_sequences``.

    Raises:
        UsageError: the file is damaged, or has no log-prob columns.
    """
    try:
        file = pq.ParquetFile(path, memory_map=True)
    except (pa.ArrowException, OSError) as error:
        raise UsageError(f"{path}: damaged or unfinished Parquet file: {_first_line(error)}; write it again") from None
    names = file.schema_arrow.names
    chosen = resolve_columns(names, mapping)
    if not any(name in chosen for name in LOGPROBS):
        raise UsageError(
            f"{path}: no log-prob column found (it has {', '.join(names[:20])}); "
            "say which with --map logprob_engine=NAME --map logprob_trainer=NAME"
        )
    lists = [ours for ours, theirs in chosen.items() if _is_list(file.schema_arrow.field(theirs).type)]

    def tables() -> Iterator[GapTable]:
        size = _samples_at_once(file, chosen[lists[0]]) if lists else _BATCH
        done = 0
        try:
            for batch in file.iter_batches(batch_size=size, columns=sorted(set(chosen.values())), use_threads=True):
                if lists:
                    records = RecordTable(str(path), mapping, first_sample=done)
                    for number, record in enumerate(batch.to_pylist(), start=done + 1):
                        records.add(record, f"{path}: row {number}")
                    done += len(batch)
                    made = records.build()
                    if made is not None:
                        yield made
                else:
                    yield _from_batch(batch, chosen, str(path))
        except (pa.ArrowException, OSError) as error:
            raise UsageError(f"{path}: damaged Parquet data: {_first_line(error)}; write it again") from None

    rows = _leaf_values(file, chosen[lists[0]]) if lists else file.metadata.num_rows
    return rows, tables()


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _leaf_values(file: pq.ParquetFile, column: str) -> int:
    """Return the values of a list column over the whole file, from the file's own statistics."""
    names = [file.schema.column(i).path.split(".")[0] for i in range(len(file.schema.names))]
    index = names.index(column)
    return sum(file.metadata.row_group(g).column(index).num_values for g in range(file.metadata.num_row_groups))


def _samples_at_once(file: pq.ParquetFile, column: str) -> int:
    """Return the rows of a batch: fewer where the lists are long, for a Python object stands for each value."""
    average = _leaf_values(file, column) / max(file.metadata.num_rows, 1)
    return max(1, min(_SAMPLES, int(_SAMPLE_TOKENS / max(average, 1.0))))


def _from_batch(batch: pa.RecordBatch, chosen: Mapping[str, str], source: str) -> GapTable:
    columns: dict[str, Array] = {}
    nulls: dict[str, Array] = {}
    for ours, theirs in chosen.items():
        array = batch.column(batch.schema.get_field_index(theirs))
        kind = schema()[ours].type
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        if array.null_count:
            nulls[ours] = array.is_null().to_numpy(zero_copy_only=False)
        if kind == "string" and not (pa.types.is_string(array.type) or pa.types.is_large_string(array.type)):
            if ours == "sample" and pa.types.is_integer(array.type):
                columns[ours] = array.fill_null(-1).to_numpy(zero_copy_only=False)
                continue
            array = array.cast(pa.string())
        try:
            if kind == "string":
                columns[ours] = array.fill_null("").to_numpy(zero_copy_only=False).astype(object)
            elif kind == "bool":
                filled = array.cast(pa.bool_()) if not pa.types.is_boolean(array.type) else array
                columns[ours] = filled.fill_null(schema()[ours].missing).to_numpy(zero_copy_only=False)
            else:
                wanted = pa.int64() if kind == "int64" else pa.float32()
                if array.type != wanted:
                    array = array.cast(wanted, safe=False)
                if array.null_count:
                    array = array.fill_null(0 if kind == "int64" else math.nan)
                columns[ours] = array.to_numpy(zero_copy_only=False)
        except pa.ArrowException as error:
            raise UsageError(f"{source}: column {theirs}: {_first_line(error)}; map another with --map") from None
    return GapTable(columns, nulls, source)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
