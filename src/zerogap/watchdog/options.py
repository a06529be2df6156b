"""What `zerogap run` and `zerogap watch` are told, checked before anything starts."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerogap.errors import UsageError, nearest
from zerogap.watchdog.gap_rule import require_range
from zerogap.watchdog.notify import require_apprise
from zerogap.watchdog.probes import parse_url
from zerogap.watchdog.rules import load_rules

ON_FAILURE = ("stop", "warn", "exec")


@dataclass(frozen=True)
class Options:
    """What both verbs have in common; times in seconds."""

    on_failure: str = "stop"
    exec: str | None = None
    engines: Sequence[str] = ()
    rules: Sequence[Path] = ()
    heartbeat: Path | None = None
    notify: Sequence[str] = ()
    patience: float = 1.0
    grace: float = 10.0
    probe_timeout: float = 10.0
    ray_job: str | None = None
    ray_address: str | None = None
    logs: Sequence[str] = field(default_factory=tuple)
    gap: str | None = None

    def table(self) -> dict[str, Any]:
        """Return the checked options as plain values.

        Raises:
            UsageError: naming the option that cannot be.
        """
        if self.on_failure not in ON_FAILURE:
            raise UsageError(
                f"--on-failure {self.on_failure!r} is none of {', '.join(ON_FAILURE)}"
                f"{nearest(self.on_failure, ON_FAILURE)}"
            )
        if (self.on_failure == "exec") != bool(self.exec):
            raise UsageError("--on-failure exec and --exec 'COMMAND ARGUMENT…' belong together; give both or neither")
        for name, value in (("patience", self.patience), ("grace", self.grace), ("probe-timeout", self.probe_timeout)):
            if not 0 < value < 1e6:
                raise UsageError(f"--{name} {value} must be a positive number")
        try:
            argv = shlex.split(self.exec) if self.exec else None
        except ValueError as error:
            raise UsageError(f"--exec {self.exec!r}: {error}; quote its arguments as for a shell") from None
        if argv is not None and (not argv or shutil.which(argv[0]) is None):
            raise UsageError(f"--exec: there is no command {argv[0] if argv else ''!r} on the PATH")
        load_rules(self.rules)
        require_apprise(self.notify)
        if self.gap is not None:
            require_range(self.gap)
        return {
            "on_failure": self.on_failure,
            "exec": argv,
            "engines": [parse_url(url) for url in self.engines],
            "rules": [str(path.absolute()) for path in self.rules],
            "heartbeat": str(self.heartbeat.absolute()) if self.heartbeat else None,
            "notify": list(self.notify),
            "patience": self.patience,
            "grace": self.grace,
            "probe_timeout": self.probe_timeout,
            "ray_job": self.ray_job,
            "ray_address": self.ray_address or os.environ.get("RAY_API_SERVER_ADDRESS") or "http://127.0.0.1:8265",
            "logs": [_named_log(text) for text in self.logs],
            "gap": self.gap,
        }


def _named_log(text: str) -> tuple[str, str]:
    name, found, path = text.partition("=")
    if found and name and "/" not in name:
        return name, str(Path(path).absolute())
    return Path(text).name, str(Path(text).absolute())
