"""One probe from the first request to the findings."""

from __future__ import annotations

import asyncio
import hashlib
import shlex
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from zerogap.errors import UsageError, nearest
from zerogap.probe import prompts
from zerogap.probe.ask import Ask
from zerogap.probe.checks import CHECKS
from zerogap.probe.client import Client
from zerogap.probe.context import Probe
from zerogap.probe.detect import detect
from zerogap.probe.dialects import Engine, make_dialect
from zerogap.probe.limits import BadAnswerError, Budget, BudgetSpentError, ProbeError
from zerogap.probe.outcome import Check, Finding, Outcome, checks, unknown

QUICK = (200, 60.0)  # requests, seconds
FULL = (1500, 600.0)
NOT_ASKED = "not asked"


@dataclass(frozen=True)
class Result:
    """What a probe found.

    Attributes:
        engine: None when nobody answered as an engine.
        fingerprint: digest of greedy tokens and log-probs of fixed prompts, "" when there is none: two engines with
            the same fingerprint gave the same bits.
    """

    address: str
    engine: Engine | None
    findings: tuple[Finding, ...]
    requests: int
    seconds: float
    full: bool
    fingerprint: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Question:
    """What to probe and how far.

    Attributes:
        only: ask only the checks of these names (and whether the engine is alive).
        key: sent as a bearer token, never written anywhere.
        trainer: a folder with the model that the engine is believed to serve.
        table: where to write the gap table.
    """

    address: str
    full: bool = False
    requests: int | None = None
    seconds: float | None = None
    only: tuple[str, ...] = ()
    key: str = ""
    trainer: Path | None = None
    table: Path | None = None

    def __post_init__(self) -> None:
        for name in self.only:
            if name not in checks():
                raise UsageError(f"--only: no check is named {name!r}{nearest(name, checks())}")
            if checks()[name].group == "trainer" and self.trainer is None:
                raise UsageError(f"--only {name}: it needs --trainer-model MODEL_FOLDER")


async def probe(question: Question, told: Callable[[str], None] = lambda text: None) -> Result:
    """Ask every check in turn; a check that cannot be asked is unknown and says why."""
    default = FULL if question.full else QUICK
    budget = Budget(question.requests or default[0], question.seconds or default[1])
    timeout_s = 120.0 if question.full else min(20.0, budget.seconds / 3)
    client = Client(question.address, budget, key=question.key, timeout_s=timeout_s)
    try:
        return await _probe(question, client, budget, told)
    finally:
        await client.close()


async def _probe(question: Question, client: Client, budget: Budget, told: Callable[[str], None]) -> Result:
    wanted = [check for check in checks().values() if _is_wanted(check, question)]
    try:
        engine = await detect(client)
    except ProbeError as error:
        found = tuple(_finding(check, unknown(str(error)), 0, 0.0, question) for check in wanted)
        return Result(question.address, None, found, budget.used, budget.elapsed, question.full, "")
    told(f"{engine.kind} {engine.version} serving {engine.model or 'a model'}".replace("  ", " "))
    probe = Probe(client, make_dialect(client, engine), engine, question.full)
    findings: list[Finding] = []
    dead = ""
    for check in wanted:
        if dead:
            findings.append(_finding(check, unknown(dead), 0, 0.0, question))
            continue
        finding = await _ask(check, CHECKS[check.name], probe, budget, question)
        findings.append(finding)
        told(f"{check.name}: {finding.outcome.status} ({finding.seconds:.1f} s, {finding.requests} requests)")
        if check.name == "alive" and finding.outcome.status == "fail":
            dead = f"{NOT_ASKED}: the engine gives no token (see alive)"
        elif check.name == "alive" and "NO_TOKEN_IN_TIME" in finding.outcome.observed:
            dead = f"{NOT_ASKED}: no token came in time (see alive)"
    notes: list[str] = []
    if question.trainer is not None and not dead:
        findings += await _trainer(probe, question, budget, notes)
    print_ = "" if dead else await _fingerprint(probe)
    return Result(
        question.address, engine, tuple(findings), budget.used, budget.elapsed, question.full, print_, tuple(notes)
    )


def _is_wanted(check: Check, question: Question) -> bool:
    if check.group == "trainer":
        return False
    if question.only:
        return check.name in (*question.only, "alive")
    return question.full or not check.full


async def _ask(
    check: Check, ask: Callable[[Probe], Awaitable[Outcome]], probe: Probe, budget: Budget, question: Question
) -> Finding:
    used, began = budget.used, time.monotonic()
    try:
        async with asyncio.timeout(max(budget.left_s, 0.01)):
            outcome = await ask(probe)
    except (BudgetSpentError, TimeoutError) as error:
        reason = str(error) or f"the budget of {budget.seconds:g} s is used up (--budget-seconds)"
        outcome = unknown(f"not finished: {reason}")
    except ProbeError as error:
        outcome = unknown(str(error))
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        # What a stranger sent has a form that nobody thought of; that says nothing about the question asked.
        outcome = unknown(str(BadAnswerError(f"an answer of an unexpected form ({type(error).__name__})")))
    return _finding(check, outcome, budget.used - used, time.monotonic() - began, question)


def _finding(check: Check, outcome: Outcome, requests: int, seconds: float, question: Question) -> Finding:
    command = f"zerogap probe {shlex.quote(question.address)}{' --full' if question.full else ''}"
    if check.group == "trainer":
        command += f" --trainer-model {shlex.quote(str(question.trainer))}"
    return Finding(check, outcome, requests, seconds, f"{command} --only {check.name}")


async def _trainer(probe: Probe, question: Question, budget: Budget, notes: list[str]) -> list[Finding]:
    from zerogap.probe.trainer import CHECK_NAMES, against_trainer

    assert question.trainer is not None
    used, began = budget.used, time.monotonic()
    try:
        outcomes = await against_trainer(probe, question.trainer, question.table, notes)
    except ProbeError as error:
        outcomes = dict.fromkeys(CHECK_NAMES, unknown(str(error)))
    spent, seconds = budget.used - used, time.monotonic() - began
    return [
        _finding(check, outcomes[name], spent, seconds, question)
        for name, check in checks().items()
        if name in outcomes
    ]


async def _fingerprint(probe: Probe) -> str:
    """Digest greedy tokens and log-probs of fixed prompts; "" when they could not be had."""
    digest = hashlib.sha256()
    try:
        for text in (prompts.VICTIM, prompts.OTHERS[0]):
            answer = await probe.ask(Ask(text, 12))
            digest.update(repr((answer.tokens, answer.words)).encode())
    except ProbeError:
        return ""
    return digest.hexdigest()[:32]
