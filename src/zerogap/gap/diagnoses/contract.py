"""Diagnoses under a bit-exact contract: every differing word is a fault, and its size tells the class."""

from __future__ import annotations

import numpy as np

from zerogap.gap.diagnoses.base import Finding
from zerogap.gap.diagnoses.context import Context
from zerogap.gap.table import Array

LOG_SOFTMAX_MAX = 3e-5  # nats; a few float32 steps of the logits that a log-sum-exp adds up
DTYPE_MEAN = 5e-3
HIT_CHANCE = 1e-3


def contract_findings(c: Context) -> list[Finding]:
    """Under a contract every differing bit is a fault; its size tells the class."""
    engine = c.table.columns["logprob_engine"][c.rows]
    trainer = c.table.columns["logprob_trainer"][c.rows]
    different = engine.view(np.uint32) != trainer.view(np.uint32)
    count = int(different.sum())
    if not count:
        return []
    found = [size_class(float(c.size.mean()), float(c.size.max()), count, len(c.rows), c.worst(3))]
    return [*found, *_partly_equal(c, different)]


def _partly_equal(c: Context, different: Array) -> list[Finding]:
    """Only some sequences differ: their cached prefix is older than the weights.

    Where cached tokens are known, every one of them must have some; else they must have been equal at first.
    """
    if not c.table.has("step", "sample"):
        return []
    bad = np.zeros(len(c.starts), dtype=bool)
    bad[c.in_sequence[different]] = True
    step = c.table.columns["step"][c.starts]
    steps = np.unique(step)
    share = np.array([bad[step == s].mean() for s in steps])
    later = np.flatnonzero(share > 0)
    partly = 0.01 < float(np.median(share[later])) < 0.8
    grown = len(steps) > 1 and share[0] == 0
    text, confidence = "", 0.75
    cached = c.column("cached_tokens")
    if cached is not None:
        hit = np.bincount(c.in_sequence, weights=cached > 0, minlength=len(c.starts)) > 0
        if (bad & ~hit).any():
            return []
        if not hit.all():
            text = f"; all {int(bad.sum())} had cached tokens, and of the {int((~hit).sum())} without none differs"
            # That all of them have hits, by chance, if hits had nothing to do with it.
            told = float(hit.mean()) ** int(bad.sum()) < HIT_CHANCE
            confidence = 0.95 if told else confidence
            grown |= told
    if not partly or not grown:
        return []
    first = int(later[0])
    opens = float(c.size[different & (c.position <= 1)].mean()) if (different & (c.position <= 1)).any() else 0.0
    since = f"bit-equal up to step {steps[first - 1]}; from step {steps[first]} on " if first else ""
    return [
        Finding(
            "stale-state/prefix-cache",
            confidence,
            f"{since}{float(np.median(share[later])):.0%} of the sequences differ, the others stay bit-equal (mean "
            f"abs(d) of their first differing tokens {opens:.3g}){text}",
            {"first_bad": int(steps[first]), "share": float(np.median(share[later]))},
            c.worst(3),
        )
    ]


def size_class(
    mean: float, largest: float, different: int | None, tokens: int | None, evidence: tuple[str, ...] = ()
) -> Finding:
    """Return the finding for a non-zero gap under a contract, classed by its size."""
    counted = f"{different} of {tokens} tokens differ, " if different is not None and tokens is not None else ""
    text = f"{counted}mean {mean:.4g}, max {largest:.4g}"
    numbers = {"mean": mean, "max": largest, "different": different, "tokens": tokens}
    if largest <= LOG_SOFTMAX_MAX:
        return Finding("numerics/log-softmax", 0.85, f"FAIL: {text}: a few float32 steps", numbers, evidence)
    if mean <= DTYPE_MEAN or (different is not None and tokens and different < 0.05 * tokens and largest < 0.1):
        if different is not None and tokens and different < 0.01 * tokens:
            return Finding("numerics/contract-broken", 0.9, f"FAIL: {text}; abort before the backward pass on "
                f"all ranks",
                           numbers, evidence)  # fmt: skip
        return Finding("numerics/dtype-or-kernel", 0.8, f"FAIL class=DTYPE_OR_KERNEL: {text}", numbers, evidence)
    if mean <= 0.1:
        return Finding("numerics/contract-broken", 0.7, f"FAIL: {text}: the size of plain bf16 numerics, no "
            f"contract is "
                       "in force", numbers, evidence)  # fmt: skip
    return Finding("numerics/contract-broken", 0.8, f"FAIL: {text}: the size of other weights or inputs", numbers,
                   evidence, hint="compare weight digests and token ids before looking at numerics")  # fmt: skip
