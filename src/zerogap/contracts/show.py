"""A report as text for people."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from zerogap.console import printable
from zerogap.contracts.contract import Contract
from zerogap.contracts.report import Report
from zerogap.contracts.rules import Verdict
from zerogap.contracts.verdict import Finding, Judgement
from zerogap.facts.fact import Facts, show

_STYLE = {Verdict.YES: "green", Verdict.NO: "bold red", Verdict.UNKNOWN: "yellow"}
_ENDS = {
    Verdict.YES: "holds",
    Verdict.NO: "does not hold",
    Verdict.UNKNOWN: "unknown: something needed could not be established",
}


def print_report(report: Report, console: Console, *, explain: bool = False) -> None:
    """Print a report.

    Args:
        report: the report.
        console: where to.
        explain: show what holds, too, with evidence and sources.
    """
    _line(console, _machine(report.facts), "bold")
    for note in report.notes:
        _line(console, f"note: {note}")
    if len(report.judgements) > 1:
        _overview(report, console)
    # Without a contract that was named or asked for, the overview is the answer and details are a word away.
    shown = [item for item in report.judgements if explain or (report.every and item.contract.name in report.decisive)]
    for judgement in shown:
        _judgement(judgement, console, explain)
    told = {finding.id for item in shown for finding in item.findings}
    faults = [fault for fault in report.faults if explain or fault.id not in told]
    if faults:
        console.print()
        _line(console, "known faults that are there:", "bold")
    for fault in faults:
        _finding(fault, console, explain)
    if report.compared is not None:
        _differences(report, console)
    _missing(report, console)
    if report.assumed:
        console.print()
        _line(console, f"assumed: {', '.join(_assumed(report))}", "yellow")
    console.print()
    if not shown and report.judgements:
        _line(console, "details of one: zerogap check --contract NAME; of all: --explain")
    telling = [item.contract.name for item in report.judgements if item.verdict is report.verdict]
    named = report.decisive if report.every else [name for name in report.decisive if name in telling]
    names = (" and " if report.every or report.verdict is Verdict.NO else " or ").join(
        named
    ) or "nothing that was asked about is there"
    _line(console, f"{_ENDS[report.verdict]} (exit {int(report.exit_code)}): {names}", _STYLE[report.verdict])


def _assumed(report: Report) -> Iterable[str]:
    return (f"{name} = {show(report.facts[name].value)}" for name in report.assumed if name in report.facts)


def _machine(facts: Facts) -> str:
    parts = []
    for role in ("engine", "trainer"):
        name = facts.get(f"gpu.{role}.name")
        if name is None:
            parts.append(f"{role}: GPU unknown")
            continue
        capability = facts.get(f"gpu.{role}.capability")
        gfx = facts.get(f"gpu.{role}.gfx")
        extra = [show(fact.value) for fact in (capability, gfx) if fact and show(fact.value) != "absent"]
        count = facts.get(f"gpu.{role}.count")
        many = f"{show(count.value)} x " if count and isinstance(count.value, int) and count.value > 1 else ""
        mark = " (planned)" if name.assumed else ""
        parts.append(f"{many}{show(name.value)}{f' ({chr(44).join(extra)})' if extra else ''}{mark}")
    machine = parts[0] if parts[0] == parts[1] else f"engine {parts[0]}, trainer {parts[1]}"
    model = facts.get("model.name")
    return f"machine: {machine}; model: {show(model.value) if model else 'none given'}"


def _overview(report: Report, console: Console) -> None:
    console.print()
    rows = [(item.contract.name, item.contract.promise, item.verdict, _why(item)) for item in report.judgements]
    if console.is_terminal:
        table = Table(box=None, pad_edge=False, show_edge=False)
        for title in ("contract", "promise", "verdict", "why"):
            table.add_column(title, overflow="fold", no_wrap=title != "why")
        for name, promise, verdict, why in rows:
            table.add_row(name, promise, Text(str(verdict), style=_STYLE[verdict]), _inert(why))
        console.print(table)
        return
    _line(console, f"{'contract':<32}{'promise':<15}{'verdict':<9}why")
    for name, promise, verdict, why in rows:
        _line(console, f"{name:<32}{promise:<15}{verdict!s:<9}{why}")


def _missing(report: Report, console: Console) -> None:
    """Tell, once for each way of learning it, which facts would settle what is unknown."""
    by_way: dict[str, list[str]] = {}
    for judgement in report.judgements:
        if judgement.contract.name in report.decisive and judgement.verdict is Verdict.UNKNOWN:
            for finding in judgement.findings:
                for name, how in finding.missing.items():
                    names = by_way.setdefault(how.replace(f"{name}=", "NAME="), [])
                    if name not in names:
                        names.append(name)
    if by_way:
        console.print()
        _line(console, "missing facts:", "bold")
    for how, names in by_way.items():
        _line(console, f"  {', '.join(names)}")
        _line(console, f"          {how}")


def _why(judgement: Judgement) -> str:
    """One line: the first thing that is not met, or the first facts that are missing."""
    broken = [finding for finding in judgement.findings if finding.verdict is Verdict.NO and finding.level == "require"]
    if broken:
        more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
        return (broken[0].says or broken[0].observed) + more
    if judgement.missing:
        names = judgement.missing
        return "needs " + ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return next((f.says for f in judgement.findings if f.verdict is Verdict.UNKNOWN and f.says), "")


def _judgement(judgement: Judgement, console: Console, explain: bool) -> None:
    contract = judgement.contract
    console.print()
    _line(
        console,
        f"{contract.name} ({contract.promise}, as of {contract.as_of}): {judgement.verdict}",
        _STYLE[judgement.verdict],
    )
    if explain:
        _line(console, f"  {contract.summary}")
    order = {Verdict.NO: 0, Verdict.UNKNOWN: 1, Verdict.YES: 2}
    for finding in sorted(judgement.findings, key=lambda item: (item.level == "warn", order[item.verdict])):
        if explain or finding.verdict is Verdict.NO:
            _finding(finding, console, explain)
        elif finding.verdict is Verdict.UNKNOWN:
            _line(console, f"  unknown {finding.id}: {finding.what}", _STYLE[finding.verdict])
            _line(console, f"          {_open(finding)}", indent=10)
    if judgement.verdict is Verdict.NO and contract.instead:
        _line(console, f"  {contract.instead}")
    if judgement.verdict is not Verdict.YES and judgement.offers:
        _offers(judgement, console, explain)


def _offers(judgement: Judgement, console: Console, explain: bool) -> None:
    kept = [offer for offer in judgement.offers if offer.verdict is not Verdict.NO]
    if kept:
        _line(console, "  instead, in this order:")
    for offer in kept:
        missing = f"; still unknown: {', '.join(offer.missing[:6])}" if offer.missing else ""
        _line(console, f"    {offer.contract} ({offer.promise}; {offer.verdict}): {offer.says}{missing}")
    for offer in judgement.offers:
        if explain and offer.verdict is Verdict.NO:
            _line(console, f"    not {offer.contract}: {offer.because}")


def _finding(finding: Finding, console: Console, explain: bool) -> None:
    warning = finding.level == "warn"
    mark = {Verdict.YES: "yes", Verdict.NO: "warn" if warning else "no", Verdict.UNKNOWN: "unknown"}[finding.verdict]
    style = "yellow" if warning else _STYLE[finding.verdict]
    _line(console, f"  {mark:<7} {finding.id}: {finding.what}", style)
    rows = [("expected", finding.expected), ("observed", _observed(finding)), ("because", finding.says)]
    rows += [("prints", finding.prints)] if finding.prints else []
    rows += [("missing", f"{name}: {how}") for name, how in finding.missing.items()]
    rows += [("do", finding.hint)]
    if explain or finding.verdict is Verdict.NO:
        rows += (
            [("read in", "; ".join(f"{name}: {fact.source}" for name, fact in finding.evidence.items()))]
            if explain
            else []
        )
        rows += [("source", finding.source)]
    rows += [("recheck", finding.recheck)] if explain else []
    for name, text in rows:
        if text:
            _line(console, f"          {name + ':':<10}{text}", indent=20)


def _open(finding: Finding) -> str:
    parts = [f"needs {', '.join(finding.missing)}"] if finding.missing else []
    return "; ".join([*parts, *(text for text in (finding.says, finding.hint) if text)])


def _observed(finding: Finding) -> str:
    marked = finding.observed
    if finding.assumed:
        marked += f" (assumed: {', '.join(finding.assumed)})"
    return marked


def _differences(report: Report, console: Console) -> None:
    console.print()
    if not report.differences:
        _line(console, f"against the log: {report.compared} settings compared, none differs")
    for difference in report.differences:
        text = f"{difference.fact} was planned as {difference.planned} and resolved as {difference.resolved}"
        _line(console, f"against the log: {text} ({difference.where})", "bold red")


def _inert(text: str) -> str:
    return printable(text).replace("\n", " ")


def _line(console: Console, text: str, style: str = "", indent: int = 0) -> None:
    """Print one line; long ones wrap under their own beginning on a terminal and stay whole when piped."""
    flat = _inert(text)
    if not console.is_terminal:
        console.print(Text(flat, style=style), soft_wrap=True)
        return
    body = flat.lstrip()
    lead = len(flat) - len(body)
    if not indent:
        console.print(Padding(Text(body, style=style), (0, 0, 0, lead), expand=False))
        return
    grid = Table.grid()
    grid.add_column(width=indent, no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(flat[:indent], flat[indent:])
    console.print(grid)


def print_contracts(contracts: Iterable[Contract], console: Console) -> None:
    """Print the list of contracts."""
    if not console.is_terminal:
        for contract in contracts:
            _line(console, f"{contract.name:<32}{contract.promise:<15}{contract.as_of:<12}{contract.title}")
        return
    table = Table(box=None, pad_edge=False, show_edge=False)
    for title in ("contract", "promise", "as of", "what"):
        table.add_column(title, overflow="fold")
    for contract in contracts:
        table.add_row(contract.name, contract.promise, contract.as_of, contract.title)
    console.print(table)
