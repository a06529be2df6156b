"""The reference page made from the data files: ``docs/gap-reference.md``; a test fails while it is out of date."""

from __future__ import annotations

from zerogap.gap.baselines import published
from zerogap.gap.diagnoses.base import causes
from zerogap.gap.names import metrics
from zerogap.gap.table import schema

_HEAD = """\
# Gap reference

Made from the data files of `zerogap.gap` by `python scripts/make_gap_page.py`. How to use them: [gap.md](gap.md).
"""


def reference_page() -> str:
    """Return ``docs/gap-reference.md``."""
    parts = [_HEAD, "## Columns of the gap table\n", "| column | type | meaning | also read as |", "|---|---|---|---|"]
    for column in schema().values():
        aliases = ", ".join(f"`{alias}`" for alias in column.aliases[:6])
        parts.append(f"| `{column.name}` | {column.type} | {_cell(column.meaning)} | {aliases} |")
    parts += ["\n## Diagnoses\n", "| name | code | level | what it says | to do |", "|---|---|---|---|---|"]
    for cause in causes().values():
        parts.append(f"| `{cause.name}` | {cause.code} | {cause.level} | {_cell(cause.title)} | {_cell(cause.hint)} |")
    parts += ["\n## Metric names\n", "| name | frameworks | quantity | formula | mind |", "|---|---|---|---|---|"]
    for metric in metrics():
        frameworks = ", ".join(metric.frameworks) or "any"
        names = ", ".join(f"`{name}`" for name in metric.names[:3])
        parts.append(f"| {names} | {frameworks} | {metric.quantity} | {_cell(metric.formula)} | {_cell(metric.trap)} |")
    parts += ["\n## Healthy ranges\n", "| name | quantity | low | high | setup | source |", "|---|---|---|---|---|---|"]
    for b in published():
        parts.append(f"| `{b.name}` | {b.quantity} | {b.low:g} | {b.high:g} | {_cell(b.setup)} | {_cell(b.source)} |")
    return "\n".join(parts) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
