"""``zerogap train``: sets a run up, drives it, and says in the end what was compared."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch

from zerogap.console import message, print_json
from zerogap.contracts.report import Report, store_check
from zerogap.contracts.training import training_report
from zerogap.errors import ExitCode, UsageError
from zerogap.rl.config_load import load_config
from zerogap.rl.display import make_display
from zerogap.rl.incident import set_aside_incident
from zerogap.rl.loop import Loop, Outcome
from zerogap.rl.metrics import MetricsWriter
from zerogap.rl.reward_journal import RewardJournal
from zerogap.rl.rewards import RewardPool
from zerogap.rl.run_folder import FolderLock, holds_run
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
    lock = FolderLock(folder)
    try:
        with lock:
            if holds_run(folder):
                lock.take()
            run = set_up(config, resume)
            outcome = _drive(run, lock, training_report(run.source), as_json)
    except KeyboardInterrupt:
        if holds_run(folder):
            raise UsageError(f"interrupted; what {folder} holds is whole, continue it with --resume auto") from None
        raise UsageError("interrupted before the run began; nothing was written") from None
    except (MemoryError, RuntimeError) as error:
        # torch has no exception of its own for it. Past the estimate it takes another process or a limit of the system.
        if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):
            raise
        raise UsageError(
            "memory: the system gave no more; lower engine.kv_bytes (or engine.num_pages) or "
            f"train.tokens_per_micro_batch, or end other programs; {folder}, if it was begun, is whole"
        ) from error
    nothing = not (outcome.stopped or outcome.totals.tokens_compared)
    if nothing:
        message(
            f"zerogap: warning: no token was compared ({outcome.totals.tokens_not_compared:,} were generated), so that "
            "nothing is known about the gap; no reward differed within a group, set gap.scope = 'all'"
        )
    if as_json:
        values = {**outcome.totals.summary(), "run_dir": str(folder), "stopped_by_gate": outcome.stopped}
        values["incident"] = None if outcome.incident is None else str(outcome.incident)
        print_json(SCHEMA, SCHEMA_VERSION, values)
    if nothing:
        return int(ExitCode.UNKNOWN)
    return int(ExitCode.DOES_NOT_HOLD if outcome.stopped else ExitCode.HOLDS)


def _drive(run: Run, lock: FolderLock, report: Report, as_json: bool) -> Outcome:
    config = run.config
    with RewardPool(run.task.reward, config.reward.workers, config.reward.time_limit_s, config.reward.on_error) as pool:
        pool.check()
        make_folder(run, lock)
        pool.log_to(run.folder / "rewards.log")
        first = 0 if run.checkpoint is None else run.checkpoint.state.step
        try:
            store_check(report, run.folder)
            set_aside_incident(run.folder, first)
            with (
                closing(RewardJournal(run.folder / "rewards.jsonl", first)) as journal,
                MetricsWriter(run.folder, first) as writer,
                make_display(config.run.steps, as_json) as display,
            ):
                display.note(describe(run))
                if run.gpu_plan is not None:
                    display.note(run.gpu_plan.describe())
                outcome = Loop(run, pool, journal, writer, display).run()
            display.note(summary(outcome, run.folder))
            return outcome
        except OSError as error:
            where = run.folder if error.filename is None else error.filename
            raise UsageError(
                f"{where}: cannot be written ({error.strerror or error}); what {run.folder} holds is whole; "
                "free space or mend it, then --resume auto"
            ) from error


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
