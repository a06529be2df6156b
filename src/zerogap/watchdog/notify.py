"""Telling someone, through apprise where it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from zerogap.errors import UsageError


def require_apprise(urls: Sequence[str]) -> None:
    """Refuse ``--notify`` up front when it could not work in the hour of need.

    Raises:
        UsageError: without apprise, or for an address that it does not know.
    """
    if not urls:
        return
    if importlib.util.find_spec("apprise") is None:
        raise UsageError("--notify needs apprise: pip install apprise")
    import apprise

    for url in urls:
        if not apprise.Apprise().add(url):
            raise UsageError(f"--notify: apprise does not know the address that begins with {url.split(':')[0]!r}")


def notify(urls: Sequence[str], title: str, body: str) -> bool:
    """Send a message to all addresses; False when one of them failed."""
    if not urls:
        return True
    import apprise

    sender = apprise.Apprise()
    for url in urls:
        sender.add(url)
    return bool(sender.notify(title=title, body=body))
