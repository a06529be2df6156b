"""Certificates: what ``zerogap certify`` measured, written as canonical JSON and read without torch.

A certificate is self-issued: its digest is a checksum against accidents, no signature.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zerogap.files import write_text_atomic

SCHEMA, SCHEMA_VERSION = "zerogap.certificate", 1
_SIZE_LIMIT = 4 * 2**20


def certificate_folder() -> Path:
    """Return where certificates are kept: ``$XDG_DATA_HOME/zerogap/certificates`` or its usual place."""
    base = os.environ.get("XDG_DATA_HOME") or os.path.join(os.path.expanduser("~"), ".local", "share")
    return Path(base) / "zerogap" / "certificates"


def cpu_identity(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Return what tells one kind of CPU from another: machine, model name, digest of its feature flags."""
    try:
        text = cpuinfo.read_text(errors="replace")[:65536]
    except OSError:
        text = ""
    model = re.search(r"^(?:model name|CPU part)\s*:\s*(.*)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    words = " ".join(sorted(flags[1].split())) if flags else ""
    return {
        "machine": platform.machine(),
        "model": model[1].strip() if model else platform.processor() or "unknown",
        "flags_digest": hashlib.sha256(words.encode()).hexdigest()[:16],
    }


def sealed(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``body`` with schema and digest."""
    record = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, **body}
    return {**record, "digest": _digest(record)}


def write_certificate(record: Mapping[str, Any], path: Path) -> None:
    """Write a sealed certificate, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(path, canonical(record) + "\n")


def read_certificate(path: Path) -> dict[str, Any]:
    """Return a certificate.

    Raises:
        ValueError: it is no certificate of this version, or was altered; the text says which.
    """
    if path.stat().st_size > _SIZE_LIMIT:
        raise ValueError("too large for a certificate")
    record = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise ValueError("no certificate")
    if record.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"certificate of version {record.get('schema_version')!r}, {SCHEMA_VERSION} is read")
    unsealed = {name: value for name, value in record.items() if name != "digest"}
    if record.get("digest") != _digest(unsealed):
        raise ValueError("altered: its digest does not fit its content")
    return record


def certificates(folder: Path | None = None) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the readable certificates of a folder, newest first."""
    folder = certificate_folder() if folder is None else folder
    found = []
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        try:
            found.append((path, read_certificate(path)))
        except (OSError, ValueError):
            continue
    yield from sorted(found, key=lambda pair: str(pair[1].get("issued", "")), reverse=True)


def canonical(record: Mapping[str, Any]) -> str:
    """Return the one spelling of a record: sorted keys, no spaces, ASCII."""
    return json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _digest(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical(record).encode()).hexdigest()
