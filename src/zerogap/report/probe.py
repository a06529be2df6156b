"""What ``zerogap probe --store`` kept in a run folder as ``probe.json``: the engine, and one row per check."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerogap.report.text import clean

_LEVELS = {"pass": "healthy", "fail": "fault", "yes": "healthy", "no": "fault"}


@dataclass
class Probe:
    """The stored probe, as rows for a table; ``raw`` is set instead when the file has another form.

    Attributes:
        level: of ``deterministic``, for its colour.
        rows: (check, status, level, expected, observed).
        lists: (heading, texts): warnings, what to switch on, costs, what stays unproven.
    """

    engine: str = ""
    deterministic: str = ""
    level: str = "unknown"
    meaning: str = ""
    rows: list[tuple[str, str, str, str, str]] = field(default_factory=list)
    lists: list[tuple[str, list[str]]] = field(default_factory=list)
    raw: str = ""


def read_probe(folder: Path | None) -> Probe | None:
    """Return the probe that a run folder keeps, or None."""
    if folder is None:
        return None
    try:
        text = (folder / "probe.json").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    try:
        return _read(json.loads(text))
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return Probe(raw=clean(text))


def _read(content: Any) -> Probe:
    engine = content["engine"] or {}
    said = str(content["deterministic"])
    made = Probe(
        clean(" ".join(str(engine.get(key) or "") for key in ("kind", "version", "model")).strip() or "no engine"),
        clean(said),
        _LEVELS.get(said, "unknown"),
        clean(str(content["meaning"])),
    )
    warnings = []
    for finding in content["findings"]:
        status, code, observed = str(finding["status"]), str(finding["code"]), str(finding["observed"])
        if code not in observed:
            observed = f"{code}: {observed}"
        made.rows.append(
            (clean(str(finding["name"])), clean(status), _LEVELS.get(status, "unknown"),
             clean(str(finding["expected"])), clean(observed))
        )  # fmt: skip
        warnings += [clean(f"{item['code']}: {item['text']}") for item in finding["warnings"]]
    advice = content.get("advice") or {}
    for heading, texts in (
        ("warnings", warnings),
        ("to make it deterministic", advice.get("switches", [])),
        ("what that costs", advice.get("costs", [])),
        ("not proven by the probe", content["unproven"]),
    ):
        if texts:
            made.lists.append((heading, [clean(str(item)) for item in texts]))
    return made
