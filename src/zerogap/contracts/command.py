"""The ``zerogap check`` command: options in, a report on stdout, a documented exit code out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zerogap.console import message, out, print_json
from zerogap.contracts.check import check, stacks, with_rechecks
from zerogap.contracts.report import SCHEMA, SCHEMA_VERSION
from zerogap.contracts.schema import all_contracts, load_folder
from zerogap.errors import ExitCode, UsageError
from zerogap.facts import collect


@dataclass(frozen=True)
class Options:
    """The options of ``zerogap check``, as given."""

    model: str | None = None
    gpu: Sequence[str] = ()
    contract: Sequence[str] = ()
    launch: Path | None = None
    command: Sequence[str] = ()
    assume: Sequence[str] = ()
    stack: str | None = None
    python: Path | None = None
    facts: Path | None = None
    only: str | None = None
    contracts: Path | None = None
    against: Path | None = None
    collect: bool = False
    show_list: bool = False
    explain: bool = False
    json: bool = False

    def words(self) -> list[str]:
        """Return the command line that these options stand for, as far as it says what is checked."""
        line = ["zerogap", "check"]
        for name in ("model", "stack", "python", "facts", "launch", "contracts", "against"):
            if (value := getattr(self, name)) is not None:
                line += [f"--{name}", str(value)]
        for name in ("gpu", "assume"):
            for value in getattr(self, name):
                line += [f"--{name}", value]
        return [*line, "--", *self.command] if self.command else line


def check_command(options: Options) -> int:
    """Run the command and return the exit code."""
    if options.collect:
        return _collect(options)
    if options.show_list:
        return _list(options)
    if options.launch is not None and options.command:
        raise UsageError("give the launch once: --launch FILE, or the command after --")
    report = check(
        model=options.model,
        gpu=options.gpu,
        contracts=options.contract,
        launch=options.launch if options.launch is not None else list(options.command) or None,
        assume=options.assume,
        stack=options.stack,
        python=options.python,
        facts=options.facts,
        only=options.only,
        own=options.contracts,
        against=options.against,
    )
    report = with_rechecks(report, options.words())
    if options.json:
        print_json(SCHEMA, SCHEMA_VERSION, report.to_json())
    else:
        from zerogap.contracts.show import print_report

        print_report(report, out(), explain=options.explain)
    return int(report.exit_code)


def _collect(options: Options) -> int:
    clashing = [
        options.gpu,
        options.facts,
        options.launch,
        options.command,
        options.assume,
        options.stack,
        options.contract,
    ]
    if any(clashing):
        raise UsageError("--collect reads this machine; it goes with --python only")
    facts = collect.collect(options.python)
    print_json(collect.FACTS_SCHEMA, collect.FACTS_VERSION, collect.to_file(facts))
    if sys.stdout.isatty():
        message("write it to a file and check it elsewhere: zerogap check --facts FILE")
    return int(ExitCode.HOLDS)


def _list(options: Options) -> int:
    contracts = all_contracts(() if options.contracts is None else load_folder(options.contracts))
    if options.json:
        rows = [
            {
                "name": contract.name,
                "title": contract.title,
                "promise": contract.promise,
                "as_of": contract.as_of,
                "summary": contract.summary,
                "sources": list(contract.sources),
                "requirements": [
                    {"name": item.id, "what": item.what, "level": item.level} for item in contract.requirements
                ],
            }
            for contract in contracts
        ]
        print_json("zerogap.contracts", 1, {"contracts": rows, "stacks": list(stacks())})
    else:
        from zerogap.contracts.show import print_contracts

        print_contracts(contracts, out())
    return int(ExitCode.HOLDS)
