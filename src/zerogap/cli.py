"""The ``zerogap`` command: one function per verb, each importing its package only when called."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

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
_ClickError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

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


@app.command()
def probe(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="Address of a running engine, such as http://127.0.0.1:8000.")
    ],
    trainer_model: Annotated[
        Path | None,
        typer.Option("--trainer-model", help="Folder of the model it serves: measure the gap to a trainer."),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full/--quick", help="Under 10 minutes and 1500 requests, or under 1 minute and 200.")
    ] = False,
    budget_requests: Annotated[int | None, typer.Option(help="Most requests to send.")] = None,
    budget_seconds: Annotated[float | None, typer.Option(help="Most seconds to take.")] = None,
    only: Annotated[list[str] | None, typer.Option(metavar="CHECK", help="Ask only this check; repeatable.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Also write JUnit XML here.")] = None,
    against: Annotated[Path | None, typer.Option(help="Compare with an older probe's --json output.")] = None,
    save_table: Annotated[
        Path | None, typer.Option(help="With --trainer-model: write the gap table (Parquet).")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Ask a running engine whether it is deterministic and what its log-probs mean.

    Only this address is contacted, no redirect is followed, no prompt or output is stored. A key, if one is needed, is
    read from ZEROGAP_PROBE_KEY. Exit codes: 0 everything holds; 1 something does not; 2 bad input; 3 unknown.
    """
    from zerogap.probe.command import probe_command

    raise typer.Exit(
        probe_command(
            url,
            trainer_model=trainer_model,
            full=full,
            budget_requests=budget_requests,
            budget_seconds=budget_seconds,
            only=only or (),
            junit=junit,
            against=against,
            save_table=save_table,
            as_json=json,
        )
    )


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
        text = error.format_message()
        message(text if not (arguments or sys.argv[1:]) else f"zerogap: error: {text}")
        return int(ExitCode.USAGE)
    except (typer.Abort, KeyboardInterrupt):
        message("zerogap: interrupted")
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # The reader of our stdout went away (`| head`); keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(ExitCode.HOLDS)
