"""Writes docs/contracts.md from the contract files: ``python -m zerogap.contracts.page docs/contracts.md``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from zerogap.contracts.contract import Contract, Fault, Requirement
from zerogap.contracts.rules import OPERATORS, Condition
from zerogap.contracts.schema import built_in, faults
from zerogap.facts.fact import names
from zerogap.files import write_text_atomic

_HEAD = """# Contracts

This page is written from the contract files in `src/zerogap/contracts/` by
`python -m zerogap.contracts.page docs/contracts.md`; a test keeps it up to date.

A contract is a named promise with what it requires. Its verdict is *yes* only if every requirement is yes, *no* if
any is no, else *unknown*. Bit-exact means that engine and trainer give the same float32 words; deterministic means
that the engine repeats itself, which says nothing of the trainer.
"""

_SCHEMA = """## Writing a contract

A contract is one TOML file. `zerogap check --contracts DIR` reads a folder of your own; an unknown key, operator or
fact is refused with the nearest known name.

```toml
schema_version = 1
name = "mine/house-rule"             # two parts, small letters
title = "Our house rule"
promise = "deterministic"            # or "bit-exact"
as_of = "2026-11-30"                 # when the sources were read
summary = "What it promises, and what it does not."
sources = ["where this was read"]
include = ["sglang-attention"]       # optional: shared sets of requirements
asked_by = [[["engine.kind", "is", "sglang"]]]   # optional: a launch asks for it when one group holds
instead = "What to say before the alternatives."

[versions]                           # optional: below `first` the answer is no, above `tested_to` unknown
"software.sglang" = { first = "0.5.16", tested_to = "0.5.19" }

[[requirement]]
id = "gpu"                           # for --only
what = "a Hopper GPU"
when = [["launch.given", "is", true]]          # optional: it applies only when all of these hold
needs = [["gpu.engine.capability", "is", "9.0"]]   # all must hold
any_of = [[["engine.tp", "is", 1]], [["env.NCCL_ALGO", "present"]]]   # optional: one group must hold
unproven = [["model.kind", "is_not", "dense"]]     # optional: then the answer is unknown
level = "require"                    # or "warn": told, changes no verdict
expected = "compute capability 9.0"  # optional: else made from the conditions
says = "this GPU has {gpu.engine.capability}, read by {gpu.engine.capability:source}"
prints = "the line that the program will print"
hint = "what to do"
source = "where this was read"
fix = [{ set = { "engine.tp" = 1 }, says = "--tp 1" }]   # offered only if the checker accepts it

[[alternative]]                      # what to use instead, in order, judged by the same code
contract = "zerogap/exact"
says = "why"
set = { "engine.attention_backend" = "triton" }
```

A condition is `["fact", "operator", value…]`:
"""

_TAKES = {
    "one": "one value",
    "list": "values",
    "pair": "two values",
    "none": "nothing",
    "spec": "a version range",
    "fact": "another fact",
    "fact-factor": "another fact and a factor",
}


def contracts_page() -> str:
    """Return the page's text."""
    contracts = built_in()
    parts = [_HEAD, _overview(contracts)]
    parts += [_contract(contract) for contract in contracts]
    parts += [_faults(faults()), _SCHEMA, _operators(), _facts()]
    return "\n".join(part.rstrip() + "\n" for part in parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    lines += [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows]
    return "\n".join(lines)


def _overview(contracts: Sequence[Contract]) -> str:
    rows = [(f"`{c.name}`", c.promise, c.as_of, _versions(c), c.summary) for c in contracts]
    return _table(("contract", "promise", "as of", "versions", "what it says"), rows)


def _versions(contract: Contract) -> str:
    return ", ".join(f"{v.fact.partition('.')[2]} {v.first} to {v.tested_to}" for v in contract.versions) or "any"


def _contract(contract: Contract) -> str:
    rows = [(f"`{r.id}`", _what(r), _conditions(r), r.source) for r in contract.requirements]
    lines = [
        f"## {contract.name}",
        "",
        f"{contract.title}. {contract.summary}",
        "",
        f"Promise: {contract.promise}. As of {contract.as_of}. Versions: {_versions(contract)}.",
        "",
        "Sources: " + "; ".join(contract.sources) + ".",
        "",
        _table(("requirement", "what", "condition", "source"), rows),
    ]
    if contract.instead:
        lines += ["", contract.instead]
    if contract.alternatives:
        lines += ["", "Instead, in this order, each judged by the same code:", ""]
        lines += [f"{index}. `{item.contract}`: {item.says}" for index, item in enumerate(contract.alternatives, 1)]
    return "\n".join(lines)


def _what(requirement: Requirement) -> str:
    mark = " (a warning: it changes no verdict)" if requirement.level == "warn" else ""
    return requirement.what + mark


def _list(conditions: Sequence[Condition]) -> str:
    return " and ".join(f"{condition}" for condition in conditions)


def _conditions(requirement: Requirement) -> str:
    parts = [_list(requirement.needs)] if requirement.needs else []
    parts += [" or ".join(f"({_list(group)})" for group in requirement.any_of)] if requirement.any_of else []
    text = "; ".join(parts)
    when = [condition for condition in requirement.when if condition.fact != "launch.given"]
    if any(condition.fact == "launch.given" for condition in requirement.when):
        text = f"in a launch{' where ' + _list(when) if when else ''}: {text}"
    elif when:
        text = f"where {_list(when)}: {text}"
    return text + (f"; unknown where {_list(requirement.unproven)}" if requirement.unproven else "")


def _faults(known: Sequence[Fault]) -> str:
    rows = [
        (f"`{f.code}`", f.title, _list(f.when), ", ".join(f.breaks) or "nothing (a warning)", f.source) for f in known
    ]
    text = "Each was reported by someone. A fault is there when all of its signs are, whatever a library claims.\n\n"
    return "## Known faults\n\n" + text + _table(("fault", "what", "signs", "breaks", "source"), rows)


def _operators() -> str:
    rows = [(f"`{name}`", _TAKES[item.value], item.words) for name, item in OPERATORS.items()]
    return _table(("operator", "takes", "reads as"), rows)


def _facts() -> str:
    rows = [
        (f"`{item.name}`", item.type + (f": {', '.join(item.values)}" if item.values else ""), item.what)
        for item in names().values()
    ]
    return "## Facts\n\n" + _table(("fact", "type", "what"), rows)


if __name__ == "__main__":
    write_text_atomic(Path(sys.argv[1]), contracts_page())
