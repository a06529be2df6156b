"""What stands in the run folder after the gate found a different token: ``incident.json`` and ``incident.md``."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zerogap.console import finite, printable
from zerogap.files import write_text_atomic
from zerogap.rl.gate import Comparison, Difference
from zerogap.rl.locate import Fault
from zerogap.trainer import TrainSequence

SCHEMA, SCHEMA_VERSION = "zerogap.incident", 1


def word(value: float) -> str:
    """Return the float32 word of ``value`` in hex, such as ``0xbf800000``."""
    return f"0x{struct.unpack('<I', struct.pack('<f', value))[0]:08x}"


def incident(
    step: int,
    comparison: Comparison,
    sequences: Sequence[TrainSequence],
    fault: Fault,
    versions: Mapping[str, Any],
    decode: Any,
) -> dict[str, Any]:
    """Describe the first different token of a step.

    Args:
        step: of the run.
        comparison: with at least one difference.
        sequences: the step's.
        fault: what `locate` found.
        versions: weights version, digests, numerics.
        decode: token ids to text.
    """
    first: Difference = comparison.differences[0]
    sequence = sequences[first.index]
    token = sequence.tokens[sequence.prompt_length + first.place]
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "step": step,
        "sequence": {"step": sequence.key[0], "prompt": sequence.key[1], "sample": sequence.key[2]},
        "token": {
            "index": first.place,
            "position": sequence.prompt_length + first.place,
            "id": token,
            "text": printable(decode([token])),
            "logprob_engine": first.logprob_engine,
            "logprob_trainer": first.logprob_trainer,
            "word_engine": word(first.logprob_engine),
            "word_trainer": word(first.logprob_trainer),
        },
        "tokens_compared": comparison.tokens_compared,
        "tokens_different": comparison.tokens_different,
        "tokens_nonfinite": comparison.tokens_nonfinite,
        "gap_max": comparison.gap_max,
        "fault": {**asdict(fault), "tensors": list(fault.tensors)},
        **versions,
    }


def write_incident(folder: Path, record: Mapping[str, Any]) -> Path:
    """Write both files, each whole or not at all; return the path of the JSON."""
    path = folder / "incident.json"
    write_text_atomic(path, json.dumps(finite(record), indent=1, sort_keys=True, allow_nan=False) + "\n")
    write_text_atomic(folder / "incident.md", _markdown(record))
    return path


def set_aside_incident(folder: Path, first_step: int) -> None:
    """Rename the incident of an earlier start of the run, so that ``incident.json`` is always of the newest.

    Args:
        folder: the run folder.
        first_step: the step that is done next: ``incident-before-step-3.json`` (an older one of that name goes).
    """
    for suffix in (".json", ".md"):
        path = folder / f"incident{suffix}"
        if path.exists():
            os.replace(path, folder / f"incident-before-step-{first_step}{suffix}")


def _markdown(record: Mapping[str, Any]) -> str:
    token, fault, key = record["token"], record["fault"], record["sequence"]
    lines = [
        f"# The gap was not 0 at step {record['step']}",
        "",
        f"{record['tokens_different']} of {record['tokens_compared']} compared tokens differ "
        f"({record['tokens_nonfinite']} not finite); largest gap {record['gap_max']:.6g}. "
        "The update of this step was not applied unless the gate only warns.",
        "",
        "| | engine | trainer |",
        "|---|---|---|",
        f"| log-prob | {token['logprob_engine']!r} | {token['logprob_trainer']!r} |",
        f"| float32 word | `{token['word_engine']}` | `{token['word_trainer']}` |",
        "",
        f"First different token: index {token['index']} of the response (position {token['position']}, "
        f"id {token['id']}) of prompt {key['prompt']}, sample {key['sample']}.",
        "",
        "## Where it comes from",
        "",
        f"{fault['explanation']}.",
        "",
        f"- op: `{fault['op']}`, layer: {fault['layer']}, first differing row: position {fault['position']}",
        f"- side that left the row law: {fault['side'] or 'not established'}",
        f"- weights that differ: {', '.join(fault['tensors'][:5]) or 'none'}",
        f"- rows in the engine forward that sampled it: {fault['engine_rows']}",
        "",
    ]
    return "\n".join(lines)
