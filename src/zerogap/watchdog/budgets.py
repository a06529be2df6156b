"""Every waiting time of the judge, with the reason for its length. All are in seconds."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class Budgets:
    """Waiting times (s) and counts of the judge."""

    exit_s: float = 3.0  # a dead engine's parent gets this long to notice by itself, or to start another
    recover_s: float = 120.0  # the same where the run says that it restarts engines (fault tolerance)
    busy_exit_s: float = 600.0  # a dead engine while the trainer computes: nobody needs it before the step is over
    quiet_s: float = 6.0  # a fatal line while the run starts, then this long neither CPU, GPU nor progress
    unseen_s: float = 30.0  # the same where the run's processes cannot be seen
    retry_s: float = 120.0  # requests fail and are repeated, and nothing else happens
    retries: int = 10
    probe_fails: int = 3  # failed probes in a row, of an engine that has worked before
    wait_s: float = 60.0  # one side waits for another that is gone, or in a circle
    spin_s: float = 600.0  # GPUs spin without touching memory
    pair_factor: float = 3.0  # an engine sleeps this many times longer than usual
    pair_s: float = 600.0  # and at least this long
    heartbeat_s: float = 300.0  # a heartbeat file that was touched before is not any more
    active_factor: float = 4.0  # visible work stretches a phase's budget by this
    scale: float = 1.0  # of the phase budgets

    def scaled(self, factor: float) -> Budgets:
        """Return all times multiplied by ``factor`` (counts stay)."""
        times = {item.name: getattr(self, item.name) * factor for item in fields(self) if item.name.endswith("_s")}
        return replace(self, scale=self.scale * factor, **times)
