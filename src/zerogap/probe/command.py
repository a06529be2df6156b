"""``zerogap probe``: arguments in, report out, exit code back."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from zerogap.console import finite, message, print_json
from zerogap.errors import ExitCode, UsageError
from zerogap.files import write_text_atomic
from zerogap.probe import report, verdict
from zerogap.probe.client import parse_address
from zerogap.probe.run import Question, Result, probe

STORED = "probe.json"  # what `zerogap report` looks for in a run folder


def probe_command(
    address: str,
    *,
    trainer_model: Path | None = None,
    full: bool = False,
    budget_requests: int | None = None,
    budget_seconds: float | None = None,
    only: Sequence[str] = (),
    junit: Path | None = None,
    against: Path | None = None,
    save_table: Path | None = None,
    store: Path | None = None,
    as_json: bool = False,
) -> ExitCode:
    """Run the verb; the arguments are those of the command line.

    Raises:
        UsageError: bad arguments or unreadable files.
    """
    if budget_requests is not None and budget_requests < 1:
        raise UsageError(f"--budget-requests {budget_requests}: give at least 1")
    if budget_seconds is not None and not 0 < budget_seconds < float("inf"):
        raise UsageError(f"--budget-seconds {budget_seconds}: give a positive number of seconds")
    if save_table is not None and trainer_model is None:
        raise UsageError("--save-table: a gap table needs --trainer-model")
    for option, path in (("--junit", junit), ("--save-table", save_table)):
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"{option} {path}: the folder {path.parent} does not exist; create it first")
    if store is not None and not store.is_dir():
        raise UsageError(f"--store {store}: no such folder; name an existing run folder")
    if trainer_model is not None and not (trainer_model / "config.json").is_file():
        raise UsageError(f"--trainer-model {trainer_model}: no config.json in it; give a Hugging Face model folder")
    old = None if against is None else report.read_old(against)
    question = Question(
        parse_address(address),
        full=full,
        requests=budget_requests,
        seconds=budget_seconds,
        only=tuple(only),
        key=os.environ.get("ZEROGAP_PROBE_KEY", ""),
        trainer=trainer_model,
        table=save_table,
    )
    result = asyncio.run(probe(question, _told(as_json)))
    changes = None if old is None else report.changes_since(old, result)
    if junit is not None:
        write_text_atomic(junit, report.junit(result))
    if store is not None:
        content = finite({"schema": report.SCHEMA, "schema_version": report.VERSION, **report.body(result, changes)})
        write_text_atomic(store / STORED, json.dumps(content, sort_keys=True, indent=1, allow_nan=False) + "\n")
    if as_json:
        print_json(report.SCHEMA, report.VERSION, report.body(result, changes))
    else:
        report.show(result, changes)
    if result.engine is None:
        message(f"zerogap probe: {_first_reason(result)}")
    return verdict.exit_code(result)


def _first_reason(result: Result) -> str:
    return result.findings[0].outcome.observed if result.findings else "nothing was asked"


def _told(as_json: bool) -> Callable[[str], None]:
    """Return where progress goes: to a terminal's stderr, else nowhere."""
    if as_json or not sys.stderr.isatty():
        return lambda text: None
    return message
