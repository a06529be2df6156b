"""Text on its way into the page: without secrets and controls, and not endless."""

from __future__ import annotations

from zerogap.console import printable
from zerogap.gap.redact import redacted

LIMIT = 20_000  # characters


def clean(text: str) -> str:
    """Return text that is safe to show; jinja2 escapes its markup."""
    return printable(redacted(text))[:LIMIT]
