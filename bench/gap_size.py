"""How long and how much memory `zerogap gap` needs: a Parquet table of many tokens, and a text log.

    python bench/gap_size.py [--tokens 100000000] [--log-mib 1024] [--folder FOLDER]

Prints wall time, processor time and peak memory of the command in a process of its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

GROUP = 1_000_000
LENGTH = 500  # tokens of a sequence


def make_table(path: Path, tokens: int) -> None:
    rng = np.random.default_rng(0)
    integers = ("step", "sample", "position", "token_id")
    schema = pa.schema(
        [*((name, pa.int32()) for name in integers), ("logprob_engine", pa.float32()),
         ("logprob_trainer", pa.float32()), ("loss_mask", pa.bool_())]
    )  # fmt: skip
    engine = -rng.exponential(0.5, GROUP).astype(np.float32)
    noise = rng.normal(0, 0.02, GROUP).astype(np.float32)
    ids = rng.integers(0, 150_000, GROUP).astype(np.int32)
    with pq.ParquetWriter(path, schema, compression="snappy") as writer:
        for start in range(0, tokens, GROUP):
            count = min(GROUP, tokens - start)
            row = np.arange(start, start + count)
            turn = start // GROUP * 7919 % GROUP
            arrays = [row // (GROUP // 2), row // LENGTH, row % LENGTH, ids[:count], engine[:count],
                      np.minimum(engine + np.roll(noise, turn), 0)[:count], np.ones(count, bool)]  # fmt: skip
            typed = [pa.array(a.astype(t.to_pandas_dtype())) for a, t in zip(arrays, schema.types, strict=True)]
            writer.write_table(pa.table(typed, schema=schema))


def make_log(path: Path, mib: int) -> None:
    rest = '(SGLangEngine pid=77) [2026-10-17 21:03:03] INFO: 127.0.0.1:51234 - "POST /generate HTTP/1.1" 200 OK\n' * 60
    step = 0
    with path.open("w") as file:
        while file.tell() < mib << 20:
            for _ in range(20):
                file.write(rest)
            file.write(f"(MegatronTrainRayActor pid=1) [2026-10-17 21:03:03.000 actor] model.py:9 - step {step}: "
                f"{{'train/loss': "
                       f"0.1, 'train/train_rollout_logprob_abs_diff': {0.0136 + step % 28 * 1e-4:.4f}, "
                           f"'train/step': {step}}}\n")  # fmt: skip
            step += 1


def timed(arguments: list[str]) -> tuple[float, float, float, int]:
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "zerogap", "gap", *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    return wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, os.waitstatus_to_exitcode(status)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--log-mib", type=int, default=1024)
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        table, log = Path(folder) / "tokens.parquet", Path(folder) / "run.log"
        if arguments.tokens:
            make_table(table, arguments.tokens)
            wall, cpu, memory, code = timed([str(table)])
            print(f"Parquet, {arguments.tokens:,} tokens ({table.stat().st_size >> 20} MiB): {wall:.1f} s wall, "
                f"{cpu:.1f} s "
                  f"processor, {memory:.0f} MiB, exit {code}")  # fmt: skip
        if arguments.log_mib:
            make_log(log, arguments.log_mib)
            wall, cpu, memory, code = timed([str(log), "--gpu", "GB10", "--model", "Qwen3-0.6B"])
            print(f"log, {arguments.log_mib} MiB: {wall:.1f} s wall, {cpu:.1f} s processor, "
                f"{arguments.log_mib / wall:.0f} MiB/s, "
                  f"{memory:.0f} MiB, exit {code}")  # fmt: skip


if __name__ == "__main__":
    main()
