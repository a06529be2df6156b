"""The ``zerogap`` command: one function per verb, each importing its package only when called."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer

from zerogap import __version__, signals
from zerogap import cli_options as opt
from zerogap.cli_watch import run_verb, watch
from zerogap.console import discard_stdout, finish_stdout, message, prepare_streams
from zerogap.errors import ExitCode, UsageError, ZerogapError

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
    json: opt.Json = False,
) -> None:
    """Train by reinforcement learning with the gap checked on every trained token.

    Exit codes: 0 the run ended (with gap.gate = "stop": every compared token was bit-equal); 1 the gate stopped it, or
    the row law does not hold here; 2 bad input; 3 the run ended and not one token was compared.
    """
    from zerogap.threads import prepare_environment

    prepare_environment()
    with signals.quitting():
        try:
            from zerogap.rl.command import train_command
        except ImportError as error:
            reason = " ".join(str(error).split())
            raise UsageError(f"cannot load what training needs ({reason}); pip install 'zerogap[train]'") from error

    with signals.unwinding():
        code = train_command(config, overrides or [], resume=resume, as_json=json)
    raise typer.Exit(code)


@app.command()
def gap(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SOURCE...",
            help="Log, dump, table, event file or run folder of any framework; two or "
            "more are compared. `save-baseline RUN NAME` saves a finished run's range.",
        ),
    ] = None,
    mapping: opt.ColumnMap = None,
    gpu: opt.Gpu = None,
    model: opt.Model = None,
    baseline: opt.Baseline = None,
    contract: Annotated[
        str | None, typer.Option(help="Bit-exact contract that should hold: any gap is a fault.")
    ] = None,
    first_step: Annotated[bool, typer.Option("--first-step", help="Judge the first step alone.")] = False,
    noise_floor: Annotated[
        float | None, typer.Option(help="Mean abs(d) in nats that numerics alone give in this setup.")
    ] = None,
    facts: Annotated[list[Path] | None, typer.Option(help="Setup facts: TOML, JSON or key=value text.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One setup fact, such as top_p=0.8.")
    ] = None,
    only: Annotated[str | None, typer.Option(help="Show one diagnosis, by name, class or code.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Watch a log; end when it leaves its range.")] = False,
    idle: Annotated[
        float | None, typer.Option("--idle", metavar="SECONDS", help="With --follow: end after so long without a line.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg|FILE.png", help="Write a plot.")] = None,
    save_table: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the gap table (.parquet, or .jsonl by its name).")
    ] = None,
    metrics: Annotated[bool, typer.Option("--metrics", help="List the metric names and their definitions.")] = False,
    baselines: Annotated[bool, typer.Option("--baselines", help="List the healthy ranges.")] = False,
    json: opt.Json = False,
) -> None:
    """Say what the log-prob gap is, whether it is healthy and where it comes from.

    Exit codes: 0 healthy, or zero under a contract; 1 out of range or a fault found; 2 bad input; 3 cannot say.
    """
    from zerogap.gap.command import gap_command

    code = gap_command(
        sources or [], mapping=mapping or [], gpu=gpu, model=model, baseline=baseline, contract=contract,
        first_step=first_step, noise_floor=noise_floor, facts=facts or [], settings=setting or [], only=only,
        follow_log=follow, idle_seconds=idle, plot=plot, save_table=save_table, list_metrics=metrics,
        list_baselines=baselines, as_json=json,
    )  # fmt: skip
    raise typer.Exit(code)


@app.command()
def report(
    source: Annotated[str, typer.Argument(metavar="RUN|SOURCE", help="Run folder, or any source of `zerogap gap`.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file to write.")] = Path("report.html"),
    mapping: opt.ColumnMap = None,
    gpu: opt.Gpu = None,
    model: opt.Model = None,
    baseline: opt.Baseline = None,
    contract: Annotated[str | None, typer.Option(help="Bit-exact contract that should hold.")] = None,
    json: opt.Json = False,
) -> None:
    """Write one self-contained HTML file about a run: verdict, curves, gap, diagnoses, rollouts.

    Exit codes: those of `zerogap gap` on the same source, once the file is written; 2 bad input.
    """
    from zerogap.report.command import report_command

    raise typer.Exit(
        report_command(source, output, mapping=mapping or [], gpu=gpu, model=model, baseline=baseline,
                       contract=contract, as_json=json)
    )  # fmt: skip


@app.command()
def check(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- COMMAND]...", help="The launch command itself; it is not run.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Model folder, hub name or known name.")] = None,
    gpu: Annotated[
        list[str] | None, typer.Option("--gpu", help="Planned GPU: GB10, 8xH100, engine=H20; may be repeated.")
    ] = None,
    contract: Annotated[
        list[str] | None, typer.Option("--contract", "-c", help="Contract that must hold; may be repeated.")
    ] = None,
    launch: Annotated[
        Path | None, typer.Option("--launch", help="Launch script, log or configuration; it is read, not run.")
    ] = None,
    assume: Annotated[list[str] | None, typer.Option("--assume", metavar="FACT=VALUE", help="State one fact.")] = None,
    stack: Annotated[
        str | None, typer.Option("--stack", help="State a whole known set, such as miles-2026-08.")
    ] = None,
    python: Annotated[
        Path | None, typer.Option("--python", help="Python of the run's environment; it is not run.")
    ] = None,
    facts: Annotated[
        Path | None, typer.Option("--facts", help="Facts that --collect wrote on another machine.")
    ] = None,
    only: Annotated[
        str | None, typer.Option("--only", metavar="NAME", help="Check one requirement or fault again.")
    ] = None,
    contracts: Annotated[Path | None, typer.Option("--contracts", help="Folder with contracts of your own.")] = None,
    against: Annotated[
        Path | None, typer.Option("--against", help="Log of a run: compare what it resolved with what was planned.")
    ] = None,
    collect: Annotated[bool, typer.Option("--collect", help="Write this machine's facts as JSON and stop.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="List the contracts and stop.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Show what holds, too, with evidence.")] = False,
    json: opt.Json = False,
) -> None:
    """Say before a run whether this machine (or a planned one) and model can do what a contract promises.

    Exit codes: 0 holds; 1 does not hold; 2 bad input; 3 something needed is unknown.
    """
    from zerogap.contracts.command import Options, check_command

    options = Options(
        model, gpu or (), contract or (), launch, command or (), assume or (), stack, python, facts, only, contracts,
        against, collect, list_, explain, json,
    )  # fmt: skip
    raise typer.Exit(check_command(options))


@app.command()
def certify(
    model: Annotated[
        str, typer.Option("--model", help="Model folder, hub name, or builtin:tiny-qwen3.")
    ] = "builtin:tiny-qwen3",
    ops: Annotated[
        str, typer.Option("--ops", help="zerogap: prove ours; torch: show which of torch's own break the row law.")
    ] = "zerogap",
    backend: Annotated[
        str, typer.Option("--backend", help="native, portable, or auto for the one that `zerogap train` would use.")
    ] = "auto",
    device: Annotated[str, typer.Option("--device", help="cpu, or a GPU by number, such as cuda:0.")] = "cpu",
    dtype: Annotated[
        str, typer.Option("--dtype", help="float32, bfloat16, float16; auto is bfloat16 on a GPU, float32 on the CPU.")
    ] = "auto",
    full: Annotated[bool, typer.Option("--full/--quick", help="More shapes and sequences.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", help="Certificate file; else the certificate folder.")
    ] = None,
    json: opt.Json = False,
) -> None:
    """Prove on this device, for this model's shapes, that engine and trainer agree bit for bit.

    Exit codes: 0 every proof holds; 1 one does not, and the first is named; 2 bad input.
    """
    from zerogap.errors import UsageError, nearest
    from zerogap.threads import prepare_environment

    if ops not in ("zerogap", "torch"):
        raise UsageError(f"--ops {ops!r}: must be zerogap or torch{nearest(ops, ['zerogap', 'torch'])}")
    prepare_environment()
    from zerogap.certify.command import certify_command

    raise typer.Exit(certify_command(model, ops, backend, full, json, output, device, dtype))


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
    store: Annotated[Path | None, typer.Option(help="Keep the result in this run folder as probe.json.")] = None,
    json: opt.Json = False,
) -> None:
    """Ask a running engine whether it is deterministic and what its log-probs mean.

    Only this address is contacted, no redirect is followed, no prompt or output is stored. A key, if one is needed, is
    read from ZEROGAP_PROBE_KEY. Exit codes: 0 everything holds; 1 something does not; 2 bad input; 3 unknown.
    """
    from zerogap.probe.command import probe_command

    raise typer.Exit(
        probe_command(
            url, trainer_model=trainer_model, full=full, budget_requests=budget_requests,
            budget_seconds=budget_seconds, only=only or (), junit=junit, against=against, store=store,
            save_table=save_table, as_json=json,
        )
    )  # fmt: skip


app.command("run", context_settings={"allow_interspersed_args": False})(run_verb)
app.command()(watch)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit the process with a documented code (see ``zerogap.errors.ExitCode``)."""
    prepare_streams()
    try:
        code = run(arguments)
    except Exception:
        # A fault of ours: its place is worth showing, and 1, which the interpreter would give, is a verdict.
        traceback.print_exc()
        message("zerogap: this is a fault of zerogap, please report it; nothing was established")
        code = int(ExitCode.UNKNOWN)
    signals.ignore()
    problem = finish_stdout()
    if problem is not None:
        message(f"zerogap: error: stdout: {problem}; give it a place that can be written")
        code = int(ExitCode.USAGE)
    sys.exit(code)


def run(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    try:
        code = typer.main.get_command(app).main(args=arguments, prog_name="zerogap", standalone_mode=False)
        return int(code or 0)
    except ZerogapError as error:
        message("zerogap: error: " + str(error).replace("\n", "\\n"))
        return int(error.exit_code)
    except _ClickError as error:
        text = error.format_message()
        message(text if not (arguments or sys.argv[1:]) else f"zerogap: error: {text}")
        return int(ExitCode.USAGE)
    except (typer.Abort, KeyboardInterrupt):
        message("zerogap: interrupted")
        return int(ExitCode.USAGE)
    except SystemExit as ended:
        # click and rich end the process with 1 when the reader of stdout has gone (`| head`); 1 would be a verdict.
        if not isinstance(ended.__context__, BrokenPipeError):
            raise
        discard_stdout()
        return int(ExitCode.UNKNOWN)
    except OSError as error:
        # The last net: a place that the verb's own checks did not foresee.
        where = "" if error.filename is None else f"{str(error.filename)[:200]}: "
        message(f"zerogap: error: {where}{error.strerror or error}; check that path or the space and limits there")
        return int(ExitCode.USAGE)
