"""``zerogap train``: sets a run up, drives it, and says in the end what was compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from zerogap.console import print_json
from zerogap.contracts.report import Report, store_check
from zerogap.contracts.training import training_report
from zerogap.errors import ExitCode, UsageError
from zerogap.models.hub import resolve_model
from zerogap.rl.config_load import load_config
from zerogap.rl.display import make_display
from zerogap.rl.loop import Loop, Outcome
from zerogap.rl.metrics import MetricsWriter
from zerogap.rl.reward_journal import RewardJournal
from zerogap.rl.rewards import RewardPool
from zerogap.rl.setup import Run, describe, make_folder, set_up
from zerogap.threads import thread_count

SCHEMA, SCHEMA_VERSION = "zerogap.train", 1


def train_command(config_path: Path, overrides: Sequence[str], resume: str | None, as_json: bool) -> int:
    """Run ``zerogap train``; return its exit code.

    Raises:
        ZerogapError: what a person can mend, as one line.
    """
    torch.set_num_threads(thread_count())
    config = load_config(config_path, overrides)
    folder = Path(config.run.dir)
    try:
        report = training_report(resolve_model(config.model.path))
        run = set_up(config, resume)
        outcome = _drive(run, report, as_json)
    except KeyboardInterrupt:
        raise UsageError(f"interrupted; what {folder} holds is whole, continue it with --resume auto") from None
    if as_json:
        values = {**outcome.totals.summary(), "run_dir": str(folder), "stopped_by_gate": outcome.stopped}
        values["incident"] = None if outcome.incident is None else str(outcome.incident)
        print_json(SCHEMA, SCHEMA_VERSION, values)
    return int(ExitCode.DOES_NOT_HOLD if outcome.stopped else ExitCode.HOLDS)


def _drive(run: Run, report: Report, as_json: bool) -> Outcome:
    config = run.config
    with RewardPool(run.task.reward, config.reward.workers, config.reward.time_limit_s, config.reward.on_error) as pool:
        pool.check()
        make_folder(run)
        store_check(report, run.folder)
        pool.log_to(run.folder / "rewards.log")
        first = 0 if run.checkpoint is None else run.checkpoint.state.step
        journal = RewardJournal(run.folder / "rewards.jsonl", first)
        try:
            with (
                MetricsWriter(run.folder, first) as writer,
                make_display(config.run.steps, as_json) as display,
            ):
                display.note(describe(run))
                outcome = Loop(run, pool, journal, writer, display).run()
            display.note(summary(outcome, run.folder))
            return outcome
        except OSError as error:
            raise UsageError(
                f"{run.folder}: cannot be written ({error.strerror}); free space or set another run.dir, "
                "then --resume auto"
            ) from error
        finally:
            journal.close()


def summary(outcome: Outcome, folder: Path) -> str:
    """Return the closing lines for people."""
    totals = outcome.totals
    lines = [
        f"{totals.tokens_compared:,} tokens compared bit for bit, {totals.tokens_different:,} different"
        + (f" ({totals.tokens_nonfinite:,} not finite)" if totals.tokens_nonfinite else "")
        + f", {totals.tokens_not_compared:,} not compared; gap max {totals.gap_max:.3g}"
    ]
    if totals.eval_first is not None and totals.eval_last is not None:
        lines.append(f"held-out accuracy {totals.eval_first:.3f} -> {totals.eval_last:.3f}")
    if outcome.stopped:
        lines.append(f"stopped by the gate before the update of step {totals.steps}; see {outcome.incident}")
    lines.append(f"metrics, samples and checkpoints: {folder}")
    return "\n".join(lines)
