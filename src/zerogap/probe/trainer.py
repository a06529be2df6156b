"""The gap between a running engine and two trainers' forwards: ours and Hugging Face's (``--trainer-model``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zerogap.files import write_atomic
from zerogap.gap.api import compare
from zerogap.probe import prompts
from zerogap.probe.ask import NEUTRAL, Ask
from zerogap.probe.context import Probe
from zerogap.probe.forwards import score_hf, score_ours
from zerogap.probe.limits import BadAnswerError
from zerogap.probe.outcome import Outcome, Status, unknown
from zerogap.probe.sampled import Floats, Sampled

CHECK_NAMES = ("trainer-gap", "trainer-gap-hf")
_STATUS: dict[str, Status] = {"zero": "pass", "healthy": "pass", "fault": "fail", "out-of-range": "fail"}


async def against_trainer(probe: Probe, model: Path, table: Path | None, notes: list[str]) -> dict[str, Outcome]:
    """Sample from the engine, score the same tokens with both forwards, and judge each gap.

    Args:
        probe: the engine.
        model: Hugging Face folder of the model that the engine is believed to serve.
        table: where to write the gap table against our forward, if anywhere.
        notes: gets what a person should know besides.

    Raises:
        ProbeError: the engine cannot be asked for token ids.
    """
    sampled = await sample(probe)
    found: dict[str, Outcome] = {}
    for name, score in (("trainer-gap", score_ours), ("trainer-gap-hf", score_hf)):
        try:
            scored = score(model, sampled)
        except ImportError as error:
            found[name] = unknown(f"{error.name or error} is not installed: pip install 'zerogap[train]'")
            continue
        found[name] = judge_gap(sampled, scored)
        if table is not None and name == "trainer-gap":
            _write(sampled, scored, table)
            notes.append(f"gap table written to {table}; explain it with: zerogap gap {table}")
    return found


async def sample(probe: Probe) -> list[Sampled]:
    """Return sequences sampled from the engine, each from a prompt of its own, together."""
    texts = [*prompts.OTHERS, prompts.OPEN, prompts.VICTIM, *(prompts.fresh(20, seed=n) for n in range(10))]
    size = 48 if probe.full else 24
    asks = [
        Ask(await probe.ids(text), size, seed=100 + n, **NEUTRAL)
        for n, text in enumerate(texts[: 16 if probe.full else 8])
    ]
    found = []
    for ask, answer in zip(asks, await probe.together(asks), strict=True):
        tokens = tuple(token for token in answer.tokens if isinstance(token, int))
        if not tokens or len(tokens) != len(answer.logprobs) or isinstance(ask.prompt, str):
            raise BadAnswerError(f"{len(answer.logprobs)} log-probs for {len(tokens)} token ids")
        values = np.array([np.nan if v is None else v for v in answer.logprobs], dtype=np.float32)
        found.append(Sampled(ask.prompt, tokens, values, answer.cached or 0))
    return found


def judge_gap(sampled: Sequence[Sampled], scored: Sequence[Floats]) -> Outcome:
    """Return the gap's figures and what ``zerogap gap`` says about it."""
    engine = np.concatenate([item.logprob_T for item in sampled])
    trainer = np.concatenate(list(scored))
    d = trainer.astype(np.float64) - engine.astype(np.float64)
    known = np.isfinite(d)
    # The integer view: NaN is equal to nothing, and 0.0 is not -0.0.
    equal = int(((engine.view(np.int32) == trainer.view(np.int32)) & known).sum())
    numbers: dict[str, Any] = {
        "tokens": len(d),
        "bit_equal": equal,
        "not_compared": int((~known).sum()),
        "logprob_abs_diff": float(np.abs(d[known]).mean()) if known.any() else None,
        "max_abs": float(np.abs(d[known]).max()) if known.any() else None,
    }
    if not known.any():
        return unknown("no log-prob could be compared", **numbers)
    said = f"{equal} of {len(d)} tokens bit-equal, mean abs {numbers['logprob_abs_diff']:.3g}"
    said += f", max {numbers['max_abs']:.3g}"
    if equal == len(d):
        return Outcome("pass", said, "GAP_IS_ZERO", numbers)
    return _explained(sampled, scored, said, numbers)


def _explained(sampled: Sequence[Sampled], scored: Sequence[Floats], said: str, numbers: dict[str, Any]) -> Outcome:
    report = compare(
        [item.logprob_T for item in sampled],
        list(scored),
        token_id=[np.array(item.tokens) for item in sampled],
        cached_tokens=[np.array(item.cached) for item in sampled],
        prompt_length=[np.array(len(item.prompt)) for item in sampled],
    )
    numbers["gap_status"] = report.status
    numbers["gap_findings"] = [finding.code for finding in report.verdict.findings]
    told = [finding for finding in report.verdict.findings if finding.level in ("fault", "warn")]
    causes = "; ".join(f"{finding.code}: {finding.observed}" for finding in told[:3])
    text = f"{said}; {report.status}: {report.verdict.summary}" + (f" ({causes})" if causes else "")
    code = f"GAP_{report.status.upper().replace('-', '_')}"
    return Outcome(_STATUS.get(report.status, "unknown"), text, code, numbers)


def _write(sampled: Sequence[Sampled], scored: Sequence[Floats], path: Path) -> None:
    """Write the gap table with the columns that ``zerogap gap`` reads."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    lengths = [len(item.tokens) for item in sampled]
    columns = {
        "step": np.zeros(sum(lengths), dtype=np.int64),
        "sample": np.repeat(np.arange(len(sampled)), lengths).astype(str),
        "position": np.concatenate([np.arange(length) for length in lengths]),
        "token_id": np.concatenate([np.array(item.tokens) for item in sampled]),
        "logprob_engine": np.concatenate([item.logprob_T for item in sampled]),
        "logprob_trainer": np.concatenate(list(scored)),
        "loss_mask": np.ones(sum(lengths), dtype=bool),
        "temperature": np.ones(sum(lengths), dtype=np.float32),
        "cached_tokens": np.repeat([item.cached for item in sampled], lengths),
        "prompt_length": np.repeat([len(item.prompt) for item in sampled], lengths),
    }
    write_atomic(path, lambda temporary: pq.write_table(pa.table(columns), temporary, compression="zstd"))
