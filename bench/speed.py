"""Speed against every peer at hand, in turn on this machine: one table of ratios with their spread.

    python bench/speed.py MODEL_FOLDER [--only NAME]… [--rounds 3] [--json FILE] [--short]

Each side is a process that loads once; the sides of a row take turns (A B B A …), and those whose turn it is not are
stopped. A ratio is the other side's time over ours, per round: above 1 we are faster. The peaks of the machine are
measured before each row, which says which share of its own roofline it reaches. ``--list`` names the rows; ``make
bench-peers`` makes the peers.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from machine import measure
from measure import Row, tell
from speedrows import context, linear, rollout, training
from speedrows.bench import Bench
from zerogap.files import write_text_atomic

SCHEMA = "zerogap/bench/speed"


def rows_by_name(backend: str) -> dict[str, Callable[[Bench], Row | list[Row]]]:
    """Return what measures each row, by the name that ``--only`` takes, in the table's order."""
    found: dict[str, Callable[[Bench], Row | list[Row]]] = {
        f"rollout-{count}": partial(rollout.rollout, sequences=count) for count in rollout.TARGETS
    }
    found["rollout-16bit"] = rollout.rollout_16bit
    found |= {f"tax-rollout-{count}": partial(rollout.tax, sequences=count) for count in rollout.TAX_SEQUENCES}
    found["tax-train"] = training.tax_train
    found["train"] = training.train
    found["grpo"] = training.grpo
    found["linear"] = partial(linear.linear, backend=backend)
    found["context"] = context.context
    found["memory"] = training.memory
    found["threads"] = rollout.threads
    return found


def line(row: Row) -> list[str]:
    """Return the cells of a row."""
    ratio, share = row.ratio(), row.roofline

    def amount(values: list[float]) -> str:
        if not values:
            return "-"
        middle = sorted(values)[len(values) // 2]
        if unit := row.extra.get("unit"):
            return f"{middle:.2f}x" if unit == "ratio" else f"{middle / 1e9:.2f} GB"
        if row.tokens:
            return f"{row.tokens / middle:,.0f} tok/s"
        return f"{middle:.2f} s" if middle >= 1 else f"{middle * 1e3:.3g} ms"

    best = row.best
    spread = "-" if ratio is None else f"{ratio.median:.2f} ({ratio.least:.2f}-{ratio.most:.2f})"
    holds = row.extra.get("holds", row.holds)
    target = "" if row.target is None else f"{row.target:g}"
    return [
        row.what,
        amount(row.ours),
        "-" if best is None else f"{amount(row.others[best])} {best}",
        spread,
        target + {True: " yes", False: " NO", None: ""}[holds],
        "-" if share is None else f"{share:.0%}",
    ]


HEAD = ("what", "ours", "best other", "ratio (least-most)", "at least", "of roofline")


def table(rows: list[Row], title: str) -> Table:
    made = Table(*HEAD, title=title)
    for row in rows:
        made.add_row(*line(row))
    return made


def markdown(rows: list[Row]) -> str:
    """Return the table as ``bench/README.md`` keeps it."""
    lines = [list(HEAD), ["---"] * len(HEAD), *(line(row) for row in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def show(records: list[dict[str, Any]], as_markdown: bool) -> None:
    """Print the rows of one or more runs as one table, with what a reader must know."""
    rows = [Row.from_record(row) for record in records for row in record["rows"]]
    first = records[0]
    machine = first["machine"]
    title = (
        f"{first['model']}, {machine['threads']} threads of {machine['cpu']}: "
        f"{machine['read_bytes_per_s'] / 1e9:.1f} GB/s, {machine['flops_per_s'] / 1e9:.0f} GFLOP/s; {first['time']}"
    )
    if any(record["short"] for record in records):
        title += "; SHORT: no figures"
    if as_markdown:
        print(f"{title}\n\n{markdown(rows)}\n")
    else:
        Console(width=None if sys.stdout.isatty() else 170).print(table(rows, title))
    for row in rows:
        for text in [*row.problems, *([row.note] if row.note else [])]:
            print(f"{'- ' * as_markdown}{row.name}: {text}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=Path(".models/smollm2-135m-instruct"))
    parser.add_argument("--only", action="append", metavar="NAME", help="measure this row alone (again for more)")
    parser.add_argument("--sides", metavar="A,B", help="of the other sides take these only")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    parser.add_argument("--linear-backend", default="native", help="whose linear meets MKL's: native or portable")
    parser.add_argument("--short", action="store_true", help="a tenth of the tokens, to see that all works: no figures")
    parser.add_argument("--list", action="store_true", help="name the rows and stop")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument(
        "--from", dest="saved", type=Path, nargs="+", metavar="FILE", help="show saved runs; run nothing"
    )
    options = parser.parse_args()
    if options.saved:
        show([json.loads(path.read_text()) for path in options.saved], options.markdown)
        return 0
    known = rows_by_name(options.linear_backend)
    if options.list:
        print("\n".join(known))
        return 0
    wanted = options.only or list(known)
    unknown = sorted(set(wanted) - set(known))
    if unknown or options.rounds < 1:
        print(f"error: no row is named {unknown[0]!r}; see --list" if unknown else "error: --rounds is at least 1",
              file=sys.stderr)  # fmt: skip
        return 2
    if not (options.model / "config.json").is_file():
        print(f"error: {options.model} is no model folder; run make smollm2 or name another", file=sys.stderr)
        return 2
    tell("measuring the machine ...")
    machine = measure(int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0)))))
    tell(f"{machine.cpu}: {machine.read_bytes_per_s / 1e9:.1f} GB/s read, {machine.flops_per_s / 1e9:.0f} GFLOP/s")
    logs = Path(".peers/logs")
    logs.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    only = set(options.sides.split(",")) if options.sides else None
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stopped sides do not end by themselves
    with Bench(options.model.resolve(), machine, options.rounds, options.short, only, logs) as bench:
        for name in (name for name in known if name in wanted):
            bench.machine = measure(machine.threads)  # what neighbours leave of it changes within minutes
            found = known[name](bench)
            for row in found if isinstance(found, list) else [found]:
                row.extra["machine"] = bench.machine.about()
                rows.append(row)
        about = bench.about()
    made = {
        "schema": SCHEMA,
        "schema_version": 1,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "model": options.model.resolve().name,
        "rounds": options.rounds,
        "short": options.short,
        "machine": machine.about(),
        "sides": about,
        "rows": [row.record() for row in rows],
    }
    show([made], options.markdown)
    if options.json is not None:
        write_text_atomic(options.json, json.dumps(made, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
