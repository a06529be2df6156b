"""zerogap: true on-policy RL post-training, where trainer and rollout engine agree bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerogap.contracts.check import check as check

__version__ = "0.1.0"

__all__ = ["__version__", "check"]


def __getattr__(name: str) -> Any:
    # Imported when asked for, so that `import zerogap` stays light.
    if name == "check":
        from zerogap.contracts.check import check

        return check
    raise AttributeError(f"module 'zerogap' has no attribute {name!r}")
