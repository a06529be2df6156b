"""The two verbs of the watchdog, ``run`` and ``watch``, with the options that they share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zerogap.cli_options import Json

OnFailure = Annotated[
    str, typer.Option("--on-failure", metavar="stop|warn|exec", help="What to do about a verdict.", show_default=True)
]
Exec = Annotated[
    str | None, typer.Option("--exec", metavar="'CMD ARG…'", help="Started (without a shell) for --on-failure exec.")
]
Engines = Annotated[
    list[str] | None, typer.Option("--engine", metavar="URL", help="Address of an engine to probe; may be repeated.")
]
RuleFiles = Annotated[
    list[Path] | None, typer.Option("--rules", metavar="FILE", help="Further log rules (TOML); may be repeated.")
]
Heartbeat = Annotated[
    Path | None, typer.Option("--heartbeat", metavar="FILE", help="A file that the run touches while it is well.")
]
Notify = Annotated[
    list[str] | None, typer.Option("--notify", metavar="URL", help="Where apprise sends a message; may be repeated.")
]
Patience = Annotated[float, typer.Option("--patience", help="Factor on all waiting times (0.5: half as patient).")]
Grace = Annotated[float, typer.Option("--grace", metavar="S", help="Seconds between SIGTERM and SIGKILL.")]
ProbeTimeout = Annotated[
    float, typer.Option("--probe-timeout", metavar="S", help="Seconds that an engine has for one token.")
]
Folder = Annotated[
    Path | None, typer.Option("--dir", metavar="FOLDER", help="Run folder; a new one in the current folder by default.")
]
GapRange = Annotated[
    str | None,
    typer.Option("--gap", metavar="RANGE", help="Healthy range of the gap (zerogap gap --baselines), or zero."),
]
RayAddress = Annotated[
    str | None, typer.Option("--ray-address", metavar="URL", help="Ray's job server, http://127.0.0.1:8265 by default.")
]


def run_verb(
    command: Annotated[list[str] | None, typer.Argument(metavar="-- COMMAND…", help="The training command.")] = None,
    on_failure: OnFailure = "stop",
    exec_: Exec = None,
    engine: Engines = None,
    rules: RuleFiles = None,
    heartbeat: Heartbeat = None,
    notify: Notify = None,
    patience: Patience = 1.0,
    grace: Grace = 10.0,
    probe_timeout: ProbeTimeout = 10.0,
    folder: Folder = None,
    gap: GapRange = None,
) -> None:
    """Run any training command under the watchdog: a run that can only wait for ever is stopped, with the reason.

    Exit codes: the command's own when it ended by itself; 1 the watchdog stopped it; 2 bad input.
    """
    from zerogap.watchdog.command import run_command
    from zerogap.watchdog.options import Options

    options = Options(
        on_failure, exec_, engine or (), rules or (), heartbeat, notify or (), patience, grace, probe_timeout, gap=gap
    )
    raise typer.Exit(run_command(command or [], options, folder))


def watch(
    pid: Annotated[int | None, typer.Option("--pid", help="A running process; its children are watched too.")] = None,
    log: Annotated[
        list[str] | None, typer.Option("--log", metavar="[NAME=]FILE", help="A log to follow; may be repeated.")
    ] = None,
    engine: Engines = None,
    ray_job: Annotated[str | None, typer.Option("--ray-job", metavar="ID", help="Submission id of a Ray job.")] = None,
    ray_address: RayAddress = None,
    folder: Folder = None,
    once: Annotated[bool, typer.Option("--once", help="Judge the logs that are there, then end.")] = False,
    on_failure: OnFailure = "stop",
    exec_: Exec = None,
    rules: RuleFiles = None,
    heartbeat: Heartbeat = None,
    notify: Notify = None,
    patience: Patience = 1.0,
    grace: Grace = 10.0,
    probe_timeout: ProbeTimeout = 10.0,
    gap: GapRange = None,
    json: Json = False,
) -> None:
    """Attach the watchdog to a run that is already going, or judge the logs of one that is over (--once).

    Exit codes: 0 ended well (--once: no trouble found); 1 a verdict; 2 bad input; 3 unknown.
    """
    from zerogap.watchdog.command import watch_command
    from zerogap.watchdog.options import Options

    options = Options(
        on_failure, exec_, engine or (), rules or (), heartbeat, notify or (), patience, grace, probe_timeout,
        ray_job, ray_address, log or (), gap,
    )  # fmt: skip
    raise typer.Exit(watch_command(options, pid=pid, folder=folder, once=once, as_json=json))
