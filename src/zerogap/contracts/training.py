"""The check before our own training: ``zerogap/exact`` for this machine and model, stored in the run folder."""

from __future__ import annotations

from pathlib import Path

from zerogap.contracts.check import report
from zerogap.contracts.report import Report
from zerogap.contracts.rules import Verdict
from zerogap.contracts.schema import all_contracts
from zerogap.errors import NotHeldError
from zerogap.facts import collect
from zerogap.facts.fact import Fact, Facts

CONTRACT = "zerogap/exact"
_LAUNCH = Facts({"launch.given": Fact(True, "zerogap train"), "launch.framework": Fact("zerogap", "zerogap train")})


def training_report(model: Path) -> Report:
    """Check this machine and model before a run of our own.

    Args:
        model: the model's folder.

    Raises:
        NotHeldError: a requirement is not met. Without a certificate the answer is unknown, and training may start:
            it compares every trained token itself.
    """
    facts = collect.gather(collect.Question(model=str(model), launch=_LAUNCH))
    found = report(facts, all_contracts(), [CONTRACT])
    broken = [item for item in found.judgements[0].findings if item.verdict is Verdict.NO and item.level == "require"]
    if broken:
        first = broken[0]
        text = "; ".join(part for part in (first.says or first.observed, first.hint) if part)
        raise NotHeldError(f"{CONTRACT} does not hold here: {first.what}: {text} (zerogap check --contract {CONTRACT})")
    return found
