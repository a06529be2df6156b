"""Folders: our own runs, TRL output, Miles dump folders, TensorBoard folders, or any folder with readable files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerogap.errors import UsageError
from zerogap.gap.readers.files import add_records, facts_of_toml, load_file
from zerogap.gap.readers.loaded import Loaded, add_tables
from zerogap.gap.readers.records import RecordTable
from zerogap.gap.readers.sniff import kind_of
from zerogap.gap.readers.text import keep_rollout
from zerogap.gap.readers.torch_dump import read_dump

_SKIP_FILES = {".safetensors", ".bin", ".png", ".svg", ".html", ".py", ".lock", ".tmp", ".gguf", ".model"}
_NUMBER = re.compile(r"\d+")


def _natural(path: Path) -> list[Any]:
    parts = _NUMBER.split(path.name)
    return [*(int(n) for n in _NUMBER.findall(path.name)), *parts]


def load_folder(folder: Path, mapping: Mapping[str, str], loaded: Loaded) -> None:
    """Read what a folder holds into ``loaded``."""
    loaded.folder = folder
    if (folder / "metrics.jsonl").is_file():
        _own_run(folder, mapping, loaded)
    elif list(folder.glob("checkpoint-*/trainer_state.json")) or (folder / "trainer_state.json").is_file():
        _trainer_output(folder, mapping, loaded)
    elif (folder / "rollout_data").is_dir() or (folder / "train_data").is_dir():
        _miles_dumps(folder, mapping, loaded)
    else:
        _any_folder(folder, mapping, loaded)


def _own_run(folder: Path, mapping: Mapping[str, str], loaded: Loaded) -> None:
    """A run folder of ``zerogap train``: metrics, samples with both sides' log-probs, resolved configuration."""

    loaded.kind = "zerogap run"
    load_file(folder / "metrics.jsonl", mapping, loaded)
    loaded.kind = "zerogap run"
    samples = sorted((folder / "samples").glob("*.jsonl"), key=_natural)
    _sample_files(samples, mapping, loaded)
    if (folder / "config.toml").is_file():
        config = facts_of_toml(folder / "config.toml")
        loaded.facts.update({f"config.{key}": value for key, value in config.items()})
        for ours, theirs in (("temperature", "rollout.temperature"), ("top_p", "rollout.top_p"),
                             ("top_k", "rollout.top_k")):  # fmt: skip
            if theirs in config:
                loaded.facts[ours] = config[theirs]
    loaded.facts.setdefault("contract", "zerogap")


def _sample_files(files: list[Path], mapping: Mapping[str, str], loaded: Loaded) -> None:

    tables = []
    for path in files:
        table = RecordTable(str(path), mapping)
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    record = json.loads(line)
                except ValueError:
                    loaded.notes.append(f"{path.name}: line {number} is cut off and was left out")
                    continue
                if isinstance(record.get("prompt_ids"), list):
                    record["prompt_length"] = len(record["prompt_ids"])
                table.add(record, f"{path}:{number}")
                keep_rollout(record, loaded)
        made = table.build()
        if made is not None:
            tables.append(made)
    if tables:
        add_tables(tables, sum(map(len, tables)), loaded)


def _trainer_output(folder: Path, mapping: Mapping[str, str], loaded: Loaded) -> None:
    """Output of a Hugging Face style trainer: the newest state holds the whole history."""

    states = sorted(folder.glob("checkpoint-*/trainer_state.json"), key=lambda p: _natural(p.parent))
    newest = folder / "trainer_state.json" if (folder / "trainer_state.json").is_file() else states[-1]
    load_file(newest, mapping, loaded)
    table = next(iter([*folder.glob("gap*.parquet"), *folder.glob("gap*.jsonl")]), None)
    if table is not None:
        load_file(table, mapping, loaded)


def _miles_dumps(folder: Path, mapping: Mapping[str, str], loaded: Loaded) -> None:
    """Miles ``--dump-details``: rollout dumps (unrounded engine values) joined with train dumps."""

    loaded.kind = "Miles dumps"
    found: list[dict[str, Any]] = []
    for part in ("rollout_data", "train_data"):
        for path in sorted((folder / part).glob("*.pt"), key=_natural):
            if path.name.startswith("eval"):
                continue
            found += read_dump(path)
    if not found:
        raise UsageError(f"{folder}: no dumps in rollout_data/ or train_data/; run with --dump-details")
    add_records(found, str(folder), mapping, loaded)
    if loaded.table is not None and not loaded.has_tokens:
        raise UsageError(
            f"{folder}: only one side's log-probs were dumped; both rollout_data/ and train_data/ are needed"
        )


def _any_folder(folder: Path, mapping: Mapping[str, str], loaded: Loaded) -> None:

    files = [p for p in sorted(folder.rglob("*"), key=_natural) if p.is_file() and p.suffix not in _SKIP_FILES]
    if not files:
        raise UsageError(f"{folder}: an empty folder; name a run folder, log, dump or table")
    if len(files) > 2000:
        raise UsageError(f"{folder}: {len(files)} files; name the log, dump or run folder that is meant")
    read: list[str] = []
    failed: list[str] = []
    dumps: list[dict[str, Any]] = []
    for path in files:
        try:
            if kind_of(path) == "zip":
                dumps += read_dump(path)
            else:
                load_file(path, mapping, loaded)
            read.append(path.name)
        except UsageError as error:
            failed.append(str(error))
    if dumps:
        add_records(dumps, str(folder), mapping, loaded)
    if not read and failed:
        raise UsageError(failed[0])
    loaded.notes += [f"not read: {text}" for text in failed[:5]]
    loaded.kind = f"folder ({len(read)} files read)"
