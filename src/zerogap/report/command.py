"""The verb ``zerogap report``: judge a source and write one HTML file about it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zerogap.console import out, print_json, printable
from zerogap.errors import ExitCode, UsageError
from zerogap.files import write_text_atomic
from zerogap.gap.command import parse_map
from zerogap.gap.judge import Options, Verdict, judge
from zerogap.gap.readers import load


def write_report(source: Path, output: Path, options: Options, mapping: dict[str, str] | None = None) -> Verdict:
    """Write the report on ``source`` and return the verdict it opens with.

    Raises:
        UsageError: unreadable source, or a place that cannot be written.
    """
    if output.is_dir():
        raise UsageError(f"-o {output}: is a folder; name a file such as {output / 'report.html'}")
    if not output.absolute().parent.is_dir():
        raise UsageError(f"-o {output}: the folder {output.parent} does not exist; make it first")
    loaded = load(source, mapping)
    verdict = judge(loaded, options)
    from zerogap.report.html import build

    page = build(verdict, loaded)
    try:
        write_text_atomic(output.absolute(), page)
    except OSError as error:
        raise UsageError(f"-o {output}: cannot be written: {error.strerror}; choose another place") from None
    return verdict


def report_command(
    source: str, output: Path, *, mapping: Sequence[str] = (), gpu: str | None = None, model: str | None = None,
    baseline: str | None = None, contract: str | None = None, as_json: bool = False,
) -> ExitCode:  # fmt: skip
    """Run the verb; the arguments are those of the command line."""
    verdict = write_report(Path(source), output, Options(gpu, model, baseline, contract), parse_map(mapping))
    if as_json:
        print_json("zerogap.report", 1, {"file": str(output), "source": source, "status": verdict.status,
                                         "summary": verdict.summary, "exit_code": int(verdict.exit_code)})  # fmt: skip
    else:
        out().print(f"{verdict.status}: {printable(verdict.summary)}", soft_wrap=True)
        out().print(f"report written to {output}", soft_wrap=True)
    return verdict.exit_code
