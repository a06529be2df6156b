"""How decoding grows with the context: by the bytes read, or by more."""

from __future__ import annotations

import statistics
from typing import Any

from measure import Row, Side
from speedrows.bench import Bench

CONTEXTS = (1000, 8000)
SLACK = 1.2


def context(bench: Bench) -> Row:
    """Time of a decode step at 8,000 tokens of context against 1,000; one sequence, prefill left out."""
    new_tokens = 4 if bench.short else 32
    contexts = (100, 800) if bench.short else CONTEXTS

    def ask(side: Side, number: int) -> dict[str, Any]:
        steps = {
            c: side.ask(do="decode", context=c, new_tokens=new_tokens, seed=number)["median_step_s"] for c in contexts
        }
        return {"seconds": steps[contexts[1]] / steps[contexts[0]], "steps": steps}

    row = bench.in_turn(
        "context",
        f"decode step at {contexts[1]:,} tokens of context against {contexts[0]:,}",
        ["ours"],
        ask,
        lambda side: side.ask(do="decode", context=64, new_tokens=2, seed=0),
    )
    read = [bench.costs.decode_bytes([c]) for c in contexts]
    allowed = read[1] / read[0] * SLACK
    row.extra |= {"bytes_ratio": read[1] / read[0], "unit": "ratio"}
    if row.ours:
        grew = statistics.median(row.ours)
        row.extra["holds"] = grew <= allowed
        row.note = f"takes {grew:.2f}x and reads {read[1] / read[0]:.2f}x the bytes; at most {allowed:.2f}x"
        last = row.extra["answers"]["ours"][-1]["steps"]
        shares = [bench.machine.floor(b, 0) / s for b, s in zip(read, last.values(), strict=True)]
        row.extra["roofline_shares"] = shares
    return row
