"""The verb ``zerogap gap``: read, judge, explain, compare, follow, save."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerogap.console import message, out, print_json
from zerogap.errors import ExitCode, UsageError, nearest
from zerogap.gap import baselines as ranges
from zerogap.gap.diagnoses.base import causes
from zerogap.gap.facts import Facts, is_on, pairs, read_facts
from zerogap.gap.follow import follow
from zerogap.gap.judge import Options, Verdict, judge
from zerogap.gap.names import metrics
from zerogap.gap.readers import Loaded, load
from zerogap.gap.side_by_side import Comparison, compare_runs, compare_series
from zerogap.gap.table import schema

SCHEMA, VERSION = "zerogap.gap", 1


def parse_map(arguments: Sequence[str]) -> dict[str, str]:
    """Return ``OURS=THEIRS`` arguments as a dictionary.

    Raises:
        UsageError: an argument is malformed or names no column of the table.
    """
    made = {}
    for argument in arguments:
        ours, equals, theirs = argument.partition("=")
        if not equals or not ours or not theirs:
            raise UsageError(f"--map {argument}: write COLUMN=THEIRS, such as --map logprob_engine=vllm_lp")
        if ours not in schema():
            raise UsageError(f"--map {argument}: the gap table has no column {ours!r}{nearest(ours, schema())}")
        made[ours] = theirs
    return made


def make_options(
    *, gpu: str | None, model: str | None, baseline: str | None, contract: str | None, first_step: bool,
    noise_floor: float | None, facts: Sequence[Path], settings: Sequence[str], only: str | None,
) -> Options:  # fmt: skip
    """Return the options of a command line.

    Raises:
        UsageError: a value is malformed.
    """
    stated = Facts()
    for path in facts:
        stated.absorb(read_facts(path))
    stated.update(pairs(list(settings)))
    if noise_floor is not None and not noise_floor > 0:
        raise UsageError(f"--noise-floor {noise_floor}: give a positive number of nats")
    names = {*causes(), *(name.split("/")[0] for name in causes()), *(c.code for c in causes().values())}
    if only is not None and only not in names:
        raise UsageError(f"--only {only}: no such diagnosis{nearest(only, names)}")
    return Options(gpu, model, baseline, contract, first_step, noise_floor, stated, only)


def body(verdict: Verdict, recheck: str) -> dict[str, Any]:
    """Return a verdict as plain values for JSON."""
    return {
        "source": verdict.label,
        "kind": verdict.kind,
        "status": verdict.status,
        "classes": verdict.groups,
        "exit_code": int(verdict.exit_code),
        "summary": verdict.summary,
        "quantity": verdict.quantity,
        "value": verdict.value,
        "baseline": None if verdict.baseline is None else {
            "name": verdict.baseline.name, "low": verdict.baseline.low, "high": verdict.baseline.high,
            "setup": verdict.baseline.setup, "source": verdict.baseline.source},
        "outside_steps": verdict.outside_steps[:1000],
        "findings": [f.as_dict(f"{recheck} --only {f.name}") for f in verdict.findings],
        "numbers": None if verdict.numbers is None else verdict.numbers.as_dict(),
        "profiles": {name: [list(row) for row in profile.rows] for name, profile in verdict.profiles.items()},
        "series": [
            {"label": s.label, "steps": s.steps.tolist()[:10000], "names": s.names,
             "values": {k: v.tolist()[:10000] for k, v in s.values.items()}} for s in verdict.series
        ],
        "notes": list(dict.fromkeys(verdict.notes)),
    }  # fmt: skip


def _recheck(sources: Sequence[Path], options: Options) -> str:
    parts = ["zerogap", "gap", *(shlex.quote(str(s)) for s in sources)]
    for flag, value in (("--gpu", options.gpu), ("--model", options.model), ("--baseline", options.baseline),
                        ("--contract", options.contract)):  # fmt: skip
        if value:
            parts += [flag, shlex.quote(value)]
    return " ".join(parts)


def read_all(sources: Sequence[Path], mapping: dict[str, str], options: Options) -> list[Loaded]:
    """Read every source; facts alone make one without a file."""
    if sources:
        return [_or_notes(source, mapping) for source in sources]
    if not options.facts.values and not options.facts.text:
        raise UsageError("name a log, dump, run folder or table; or state facts with --set and --facts")
    return [Loaded("facts", "stated facts")]


def _or_notes(source: Path, mapping: dict[str, str]) -> Loaded:
    """A small text file may also state facts, beside or instead of metrics."""
    try:
        loaded = load(source, mapping)
    except UsageError as error:
        if "no gap metric and no log-probs" not in str(error) or not _small(source):
            raise
        facts = read_facts(source, "")
        loaded = Loaded(str(source), "notes", stated=facts)
        if not judge(loaded, Options()).findings and not (_is_note(source) and facts.known()):
            raise
        loaded.notes.append("read as notes: no table, metrics or log lines were found in it")
        return loaded
    if loaded.kind == "log" and _small(source) and source.stat().st_size < _NOTES_BYTES:
        loaded.stated = read_facts(source, "")
    return loaded


_NOTES_BYTES = 4096  # a log of a run is longer than that; a note about one is not


def _is_note(source: Path) -> bool:
    """Whether a file is prose with facts rather than a configuration that was named by mistake."""
    try:
        text = source.read_text(encoding="utf-8", errors="replace")
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return not text.lstrip().startswith("{")
    return False


def _small(source: Path) -> bool:
    return source.is_file() and source.stat().st_size <= 1 << 16


def gap_command(
    sources: Sequence[str], *, mapping: Sequence[str] = (), gpu: str | None = None, model: str | None = None,
    baseline: str | None = None, contract: str | None = None, first_step: bool = False,
    noise_floor: float | None = None, facts: Sequence[Path] = (), settings: Sequence[str] = (),
    only: str | None = None, follow_log: bool = False, idle_seconds: float | None = None, plot: Path | None = None,
    save_table: Path | None = None, list_metrics: bool = False, list_baselines: bool = False, as_json: bool = False,
) -> ExitCode:  # fmt: skip
    """Run the verb; the arguments are those of the command line.

    Raises:
        UsageError: bad arguments or unreadable sources.
    """
    if list_metrics or list_baselines:
        return _lists(list_metrics, as_json)
    if sources and sources[0] == "save-baseline":
        return _save(sources[1:], mapping, gpu, model, as_json)
    options = make_options(gpu=gpu, model=model, baseline=baseline, contract=contract, first_step=first_step,
                           noise_floor=noise_floor, facts=facts, settings=settings, only=only)  # fmt: skip
    paths = [Path(source) for source in sources]
    if follow_log:
        if len(paths) != 1:
            raise UsageError("--follow: name exactly one log or run folder")
        ours = paths[0] / "metrics.jsonl"
        log = ours if paths[0].is_dir() else paths[0]
        if not log.is_file():
            raise UsageError(f"{log}: no such file; name a log or a run folder of `zerogap train`")
        return follow(
            log, options, seconds=idle_seconds, contract=is_on(contract) or (log is ours and contract is None)
        )
    loaded = read_all(paths, parse_map(mapping), options)
    verdicts = [judge(item, options) for item in loaded]
    comparisons = _comparisons(verdicts)
    recheck = _recheck(paths, options)
    if save_table is not None:
        _save_table(loaded, save_table)
    if plot is not None:
        from zerogap.report.plots import save_plot

        save_plot(verdicts, loaded, plot)
        message(f"plot written to {plot}")
    if as_json:
        print_json(SCHEMA, VERSION, {
            "sources": [body(v, recheck) for v in verdicts],
            "comparisons": [_comparison_body(c) for c in comparisons],
            "exit_code": int(_exit(verdicts)),
        })  # fmt: skip
    else:
        _print(verdicts, comparisons, recheck)
    return _exit(verdicts)


def _exit(verdicts: Sequence[Verdict]) -> ExitCode:
    codes = [v.exit_code for v in verdicts]
    if ExitCode.DOES_NOT_HOLD in codes:
        return ExitCode.DOES_NOT_HOLD
    return ExitCode.UNKNOWN if ExitCode.UNKNOWN in codes else ExitCode.HOLDS


def _print(verdicts: Sequence[Verdict], comparisons: Sequence[Comparison], recheck: str) -> None:
    from zerogap.gap.render import show, show_comparison

    console = out()
    for number, verdict in enumerate(verdicts):
        if number:
            console.print()
        show(console, verdict, recheck)
    for comparison in comparisons:
        show_comparison(console, comparison)


def _comparisons(verdicts: Sequence[Verdict]) -> list[Comparison]:
    made = [compare_runs(verdicts[0], other) for other in verdicts[1:]]
    if len(verdicts) == 1:
        series = [s for s in verdicts[0].series if s.judged()]
        made = [compare_series(series[0], other) for other in series[1:4]]
    return made


def _comparison_body(comparison: Comparison) -> dict[str, Any]:
    return {
        "first": comparison.first,
        "second": comparison.second,
        "first_apart": comparison.first_apart,
        "notes": comparison.notes,
        "rows": [vars(row) for row in comparison.rows],
    }


def _save_table(loaded: Sequence[Loaded], path: Path) -> None:
    from zerogap.gap.readers.records import write_table

    tables = [item.table for item in loaded if item.table is not None]
    if len(tables) != 1:
        raise UsageError("--save-table: exactly one source with per-token log-probs is needed")
    if len(tables[0]) < tables[0].rows_total:
        raise UsageError("--save-table: the source is too large to copy; it already is a table")
    if not path.parent.is_dir():
        raise UsageError(f"--save-table {path}: the folder does not exist")
    write_table(tables[0], path)
    message(f"table written to {path}")


def _lists(list_metrics: bool, as_json: bool) -> ExitCode:
    from zerogap.gap.render import show_baselines, show_metrics

    if as_json and list_metrics:
        print_json(SCHEMA, VERSION, {"metrics": [vars(m) for m in metrics()]})
    elif as_json:
        print_json(SCHEMA, VERSION, {"baselines": [vars(b) for b in ranges.baselines()]})
    elif list_metrics:
        show_metrics(out())
    else:
        show_baselines(out(), ranges.baselines())
    return ExitCode.HOLDS


def _save(
    arguments: Sequence[str], mapping: Sequence[str], gpu: str | None, model: str | None, as_json: bool
) -> ExitCode:
    if len(arguments) != 2:
        raise UsageError("save-baseline: write `zerogap gap save-baseline RUN NAME [--gpu GPU --model MODEL]`")
    loaded = load(Path(arguments[0]), parse_map(mapping))
    series = next((s for s in loaded.series if s.judged()), None)
    if series is None:
        raise UsageError(f"{arguments[0]}: no gap metric over steps in it")
    verdict = judge(loaded, Options())
    faults = [f for f in verdict.findings if f.level == "fault"]
    if faults:
        raise UsageError(f"{arguments[0]}: not healthy ({faults[0].code}: {faults[0].observed}); no baseline was saved")
    setup = ", ".join(filter(None, [gpu, model])) or f"run {loaded.label}"
    made = ranges.save(series, arguments[1], setup, gpu, model)
    if as_json:
        print_json(SCHEMA, VERSION, {"saved": vars(made), "file": str(ranges.user_file())})
    else:
        out().print(f"saved {made.name}: {made.quantity} {made.low:.4g} to {made.high:.4g} over {made.steps} steps, "
                    f"in {ranges.user_file()}", soft_wrap=True)  # fmt: skip
    return ExitCode.HOLDS
