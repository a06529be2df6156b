"""The ``zerogap`` command: one function per verb, each importing its package only when called."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from zerogap import __version__
from zerogap.console import message
from zerogap.errors import ExitCode, ZerogapError

app = typer.Typer(
    name="zerogap",
    help="True on-policy RL post-training: the log-prob gap between rollout engine and trainer is exactly 0.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
)

# Newer typer carries its own copy of click, so the class is reached through typer's public one.
_ClickError = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else there.")]


def _version(show: bool) -> None:
    if show:
        print(f"zerogap {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="Run configuration (TOML), such as configs/quickstart.toml.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Replace single values.")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume", metavar="auto|FOLDER", help="Continue from the newest checkpoint of run.dir, or from this one."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Train by reinforcement learning with the gap checked on every trained token.

    Exit codes: 0 every compared token was bit-equal; 1 the gate stopped the run; 2 bad input.
    """
    from zerogap.threads import prepare_environment

    prepare_environment()
    from zerogap.rl.command import train_command

    raise typer.Exit(train_command(config, overrides or [], resume=resume, as_json=json))


_Watched = {"context_settings": {"allow_interspersed_args": False}}
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
RayAddress = Annotated[
    str | None, typer.Option("--ray-address", metavar="URL", help="Ray's job server, http://127.0.0.1:8265 by default.")
]


@app.command("run", **_Watched)  # type: ignore[arg-type]
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
) -> None:
    """Run any training command under the watchdog: a run that can only wait for ever is stopped, with the reason.

    Exit codes: the command's own when it ended by itself; 1 the watchdog stopped it; 2 bad input.
    """
    from zerogap.watchdog.command import Options, run_command

    options = Options(
        on_failure, exec_, engine or (), rules or (), heartbeat, notify or (), patience, grace, probe_timeout
    )
    raise typer.Exit(run_command(command or [], options, folder))


@app.command()
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
    json: JsonOption = False,
) -> None:
    """Attach the watchdog to a run that is already going, or judge the logs of one that is over (--once).

    Exit codes: 0 ended well (--once: no trouble found); 1 a verdict; 2 bad input; 3 unknown.
    """
    from zerogap.watchdog.command import Options, watch_command

    options = Options(
        on_failure,
        exec_,
        engine or (),
        rules or (),
        heartbeat,
        notify or (),
        patience,
        grace,
        probe_timeout,
        ray_job,
        ray_address,
        log or (),
    )
    raise typer.Exit(watch_command(options, pid=pid, folder=folder, once=once, as_json=json))


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit the process with a documented code (see ``zerogap.errors.ExitCode``)."""
    sys.exit(run(arguments))


def run(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    try:
        code = typer.main.get_command(app).main(args=arguments, prog_name="zerogap", standalone_mode=False)
        return int(code or 0)
    except ZerogapError as error:
        message(f"zerogap: error: {error}")
        return int(error.exit_code)
    except _ClickError as error:
        text = error.format_message()  # type: ignore[attr-defined]
        message(text if not (arguments or sys.argv[1:]) else f"zerogap: error: {text}")
        return int(ExitCode.USAGE)
    except (typer.Abort, KeyboardInterrupt):
        message("zerogap: interrupted")
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # The reader of our stdout went away (`| head`); keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(ExitCode.HOLDS)
