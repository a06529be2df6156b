"""``zerogap.check``: facts in, report out; for the command and for the launchers of other frameworks."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from zerogap.contracts import rules, verdict
from zerogap.contracts.contract import Contract
from zerogap.contracts.report import Difference, Report, recheck
from zerogap.contracts.schema import all_contracts, faults, load_folder
from zerogap.contracts.verdict import Finding, Judgement
from zerogap.errors import UsageError, nearest
from zerogap.facts import collect
from zerogap.facts.fact import Fact, Facts, convert, parse_assumptions, show


def check(
    *,
    model: str | None = None,
    gpu: str | Sequence[str] = (),
    contracts: str | Sequence[str] = (),
    launch: str | Path | Sequence[str] | None = None,
    assume: Sequence[str] = (),
    stack: str | None = None,
    python: str | Path | None = None,
    facts: str | Path | None = None,
    only: str | None = None,
    own: str | Path | None = None,
    against: str | Path | None = None,
) -> Report:
    """Check what a machine (this one or a planned one), model and launch can promise; nothing of them is run.

    Args:
        model: model folder, hub name or known name.
        gpu: planned GPUs, such as "GB10" or "8xH100".
        contracts: names of the contracts that must hold; without any, all are judged.
        launch: a path to a script, log or configuration; or the text of a command; or a command word by word.
        assume: stated facts, as "software.flash_attn_3=3.0.0".
        stack: a known set of software, such as "miles-2026-08".
        python: the interpreter of the environment that the run will use.
        facts: a file that ``zerogap check --collect`` wrote.
        only: judge only the requirement or fault of this name.
        own: a folder with contracts of one's own.
        against: a run's log, to compare what it resolved with what was planned.

    Returns:
        the report; ``bool(report)`` is true only when it holds.

    Raises:
        UsageError: something given is wrong or cannot be read.
    """
    question = collect.Question(
        model=model,
        gpus=(gpu,) if isinstance(gpu, str) else tuple(gpu),
        python=None if python is None else Path(python),
        launch=_launch(launch),
        stack=None if stack is None else read_stack(stack),
        file=None if facts is None else collect.read_file(Path(facts)),
        assumed=parse_assumptions(list(assume)) if assume else None,
    )
    planned = collect.gather(question)
    every = all_contracts(() if own is None else load_folder(Path(own)))
    wanted = (contracts,) if isinstance(contracts, str) else tuple(contracts)
    differences: tuple[Difference, ...] = ()
    compared: int | None = None
    if against is not None:
        observed = _log(Path(against))
        differences, compared = _differences(planned, observed)
        planned = _settled(planned, observed).over(planned)
    return report(planned, every, wanted, only=only, differences=differences, compared=compared)


def _launch(given: str | Path | Sequence[str] | None) -> Facts | None:
    if given is None:
        return None
    from zerogap.facts import launch  # what reads launches is loaded only where there is one: check is to be quick

    if isinstance(given, Path):
        return launch.read_launch(given)
    if isinstance(given, str):
        # A text is a command if it holds white space, else a path.
        return launch.read_text(given) if any(c.isspace() for c in given.strip()) else launch.read_launch(Path(given))
    return launch.read_command(list(given))


def report(
    facts: Facts,
    every: Sequence[Contract],
    wanted: Sequence[str] = (),
    *,
    only: str | None = None,
    differences: tuple[Difference, ...] = (),
    compared: int | None = None,
) -> Report:
    """Judge facts.

    Args:
        facts: what is known.
        every: the contracts that exist.
        wanted: the contracts that must hold; without any, those that the launch asks for, else one
            bit-exact contract is enough.
        only: judge only the requirement or fault of this name.
    """
    facts = verdict.resolve(facts)
    by_name = {contract.name: contract for contract in every}
    for name in wanted:
        if name not in by_name:
            raise UsageError(f"no contract is named {name!r}{nearest(name, by_name)}; zerogap check --list shows them")
    asked = [contract.name for contract in every if _is_asked(contract, facts)] if not wanted else []
    bit_exact_asked = [name for name in asked if by_name[name].promise == "bit-exact"]
    decisive = tuple(wanted) or tuple(bit_exact_asked or asked) or _bit_exact(every)
    chosen = [by_name[name] for name in dict.fromkeys(wanted)] if wanted else list(every)
    known_faults = faults()
    judgements = [verdict.judge(contract, facts, known_faults) for contract in chosen]
    names = {contract.name for contract in chosen}
    matter = [fault for fault in known_faults if fault.status == "warn" or names & set(fault.breaks)]
    found = verdict.fault_findings(matter, facts)
    if only is not None:
        judgements, found = _only(only, judgements, found, every)
        # A single finding decides by itself; a warning that is there does not hold either.
        decisive = tuple(judgement.contract.name for judgement in judgements)
    else:
        judgements = [
            replace(item, offers=verdict.offers(item.contract, every, facts, known_faults))
            if item.verdict is not rules.Verdict.YES and (wanted or item.contract.name in decisive)
            else item
            for item in judgements
        ]
    return Report(
        tuple(judgements),
        found,
        decisive,
        bool(wanted or asked or only),
        facts,
        differences,
        compared,
        _notes(facts, asked),
        only is not None,
    )


def _bit_exact(every: Iterable[Contract]) -> tuple[str, ...]:
    return tuple(contract.name for contract in every if contract.promise == "bit-exact")


def _is_asked(contract: Contract, facts: Facts) -> bool:
    if "launch.given" not in facts or facts["launch.given"].value is not True:
        return False
    return any(rules.check_all(group, facts).verdict is rules.Verdict.YES for group in contract.asked_by)


def _only(
    only: str, judgements: list[Judgement], found: tuple[Finding, ...], every: Sequence[Contract]
) -> tuple[list[Judgement], tuple[Finding, ...]]:
    kept = []
    for judgement in judgements:
        findings = tuple(finding for finding in judgement.findings if finding.id == only)
        if findings:
            kept.append(
                Judgement(judgement.contract, rules.all_of([finding.verdict for finding in findings]), findings)
            )
    there = tuple(finding for finding in found if finding.id == only)
    names = {item.id for contract in every for item in contract.requirements} | {fault.code for fault in faults()}
    names |= {
        f"version-{row.fact.partition('.')[2].replace('_', '-')}" for contract in every for row in contract.versions
    }
    if only not in names:
        raise UsageError(f"--only: no requirement or fault is named {only!r}{nearest(only, names)}")
    if not kept and not there:
        codes = {fault.code for fault in faults()}
        if only in codes:
            return [], ()
        raise UsageError(f"--only {only}: it does not apply here (no contract that was asked about has it)")
    return kept, there


def _notes(facts: Facts, asked: Sequence[str]) -> tuple[str, ...]:
    notes = []
    served, model = facts.get("engine.model"), facts.get("model.path")
    if served and model and model.source == "--model" and _name(served) != _name(facts["model.name"]):
        notes.append(
            f"the launch serves {show(served.value)}, and --model says {show(model.value)}; --model was judged"
        )
    given = facts.get("launch.given")
    if given and given.value is True and "launch.framework" in facts and not asked:
        notes.append("this launch asks for no promise: no switch of any contract is on")
    doubles = [f"{name}: {fact.source}" for name, fact in facts.items() if "the last wins over" in fact.source]
    notes += doubles
    if show(facts["gpu.engine.vendor"].value if "gpu.engine.vendor" in facts else "") == "none":
        notes.append("no GPU: only zerogap/exact (on the CPU) can hold here")
    return tuple(notes)


def _name(fact: Fact) -> str:
    from zerogap.facts.models import short_name

    return short_name(show(fact.value)).lower()


# -- a run's log


def _log(path: Path) -> Facts:
    from zerogap.facts import launch, runlog

    if not path.is_file():
        raise UsageError(f"--against {path}: no such file")
    try:
        text = runlog.load(path)
    except OSError as error:
        raise UsageError(f"--against {path}: {error.strerror or error}") from None
    errors = runlog.error_facts(text, path.name)
    if runlog.is_log(text):
        return errors.over(launch.read_text(text, path.name))
    if not errors["log.errors"].value:
        raise UsageError(
            f"--against {path}: no line shows a launch command, an engine's arguments or a known error; "
            "give the run's log"
        )
    return errors


def _differences(planned: Facts, observed: Facts) -> tuple[tuple[Difference, ...], int]:
    """Compare what was planned with what a log shows; a choice that was left to the engine is no difference."""
    found = []
    compared = 0
    for name in observed:
        if not name.startswith(("engine.", "trainer.", "rollout.", "env.", "software.vllm")) or name not in planned:
            continue
        if observed[name].source.startswith("not set;"):
            continue
        plan = planned[name]
        compared += 1
        left_open = plan.value in ("unset", "auto", "none") and plan.source.startswith("not set;")
        if plan.value == observed[name].value or left_open or _same_model(name, plan, observed[name]):
            continue
        found.append(Difference(name, show(plan.value), show(observed[name].value), observed[name].source))
    return tuple(found), compared


def _settled(planned: Facts, observed: Facts) -> Facts:
    """Return what a log adds to a plan: not the program's defaults, and not who launches, where the plan says it."""
    weak = [
        name
        for name, fact in observed.items()
        if name in planned and (name.startswith("launch.") or fact.source.startswith("not set;"))
    ]
    return Facts(observed.without(*weak))


def _same_model(name: str, one: Fact, other: Fact) -> bool:
    return name == "engine.model" and _name(one) == _name(other)


# -- stacks


def stacks() -> tuple[str, ...]:
    """Return the names of the known sets of software."""
    folder = files("zerogap.contracts") / "stacks"
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")))


def read_stack(name: str) -> Facts:
    """Return a known set of software as stated facts."""
    if name not in stacks():
        raise UsageError(f"--stack: no set is named {name!r}{nearest(name, stacks())}; known are {', '.join(stacks())}")
    text = (files("zerogap.contracts") / "stacks" / f"{name}.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)["facts"]
    source = f"--stack {name}"
    return Facts({fact: Fact(convert(fact, value, source), source, assumed=True) for fact, value in table.items()})


def with_rechecks(found: Report, command: Sequence[str]) -> Report:
    """Return the report with the command that checks each finding again."""
    judgements = tuple(
        replace(
            item,
            findings=tuple(
                replace(finding, recheck=recheck(command, item.contract.name, finding.id)) for finding in item.findings
            ),
        )
        for item in found.judgements
    )
    there = tuple(replace(finding, recheck=recheck(command, "", finding.id)) for finding in found.faults)
    return replace(found, judgements=judgements, faults=there)
