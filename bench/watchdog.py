"""What the watchdog costs: pump throughput against a plain pipe, CPU and memory of the judge, hard inputs survived.

    python bench/watchdog.py [--seconds 20]

Prints one table. The pump's figure is the ratio to `COMMAND | cat` run in turn with it; the judge's figures are shares
of one core while a log comes in at 10 MB/s, made of rollout texts, engine lines and step lines in usual proportions.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
FLOOD = "import os,sys; b=bytes(range(256))*4096; n=int(sys.argv[1]); [os.write(1,b) for _ in range(n)]"
LOG = r"""
import os, random, sys, time
random.seed(0)
words = ("the model answers step by step and the reward checks whether error handling in this function returns a "
         "value that timed tests accept before waiting for another connection to train").split()
def line(number):
    kind = number % 40
    if kind == 0:
        return f"[2026-10-17 21:03:03 TP0] Decode batch. #running-req: {number % 64}, #token: {number}, usage: 0.12"
    if kind == 1:
        return f"(RolloutManager pid=1191) INFO: 127.0.0.1:4242 - \"POST /generate HTTP/1.1\" 200 OK {number}"
    return " ".join(random.choices(words, k=random.randint(8, 120)))
pool = [line(number) for number in range(4000)]
rate, seconds = float(sys.argv[1]), float(sys.argv[2])
begun, sent, number = time.monotonic(), 0, 0
while time.monotonic() - begun < seconds:
    block = "\n".join(pool[number % 3000:number % 3000 + 400]) + "\n"
    if number % 20000 == 0:
        block += f"step {number}: {{'train/loss': 0.1}}\n"
    number += 400
    os.write(1, block.encode())
    sent += len(block)
    ahead = sent / rate - (time.monotonic() - begun)
    if ahead > 0.005:
        time.sleep(ahead)
"""
LINES = r"""
import os, sys, time
block = b"".join(b"line %d of a very chatty program\n" % number for number in range(10000))
for _ in range(int(sys.argv[1])):
    begun = time.monotonic()
    os.write(1, block)
    time.sleep(max(0.0, 0.1 - (time.monotonic() - begun)))
"""
LONG = r"import sys; w=sys.stdout.buffer; [w.write(b'\xc3(\xff x' * (10 << 20) + b'\n') for _ in range(3)]"


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def run_line(folder: Path, script: str, *arguments: object) -> list[str]:
    own = [sys.executable, "-m", "zerogap", "run", "--dir", str(folder)]
    return [*own, "--", sys.executable, "-c", script, *map(str, arguments)]


def judge_of(folder: Path) -> psutil.Process:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            return psutil.Process(json.loads((folder / "judge.json").read_text())["pid"])
        except (OSError, ValueError, psutil.Error):
            time.sleep(0.05)
    raise SystemExit("the judge did not start")


def throughput(scratch: Path, megabytes: int, turn: int) -> tuple[float, float]:
    """MB/s of the pump and of a plain pipe, each from the first byte to the last."""
    begun = time.monotonic()
    subprocess.run(f"{sys.executable} -c '{FLOOD}' {megabytes} | cat > {scratch / 'plain'}", shell=True, check=True)
    plain = megabytes * 1.048576 / (time.monotonic() - begun)
    with (scratch / "pumped").open("wb") as out:
        begun = time.monotonic()
        subprocess.run(run_line(scratch / f"t{turn}", FLOOD, megabytes), stdout=out, env=environment(), check=True)
        took = time.monotonic() - begun
    records = json.loads((scratch / f"t{turn}" / "ended.json").read_text())
    started = json.loads((scratch / f"t{turn}" / "run.json").read_text())["started_at"]
    same = (
        hashlib.file_digest((scratch / "plain").open("rb"), "sha256").digest()
        == hashlib.file_digest((scratch / "pumped").open("rb"), "sha256").digest()
    )
    assert same, "the pump changed bytes"
    assert took > 0
    return megabytes * 1.048576 / (records["at"] - started), plain


def judge_cost(scratch: Path, seconds: float) -> tuple[float, float, float]:
    """(share of one core, of which with no log at all, peak MB of resident memory)."""
    shares = []
    memory = 0.0
    silent = "import sys, time; time.sleep(float(sys.argv[2]))"
    for name, script in (("loud", LOG), ("silent", silent)):
        folder = scratch / name
        line = run_line(folder, script, 10e6, seconds + 4)
        process = subprocess.Popen(line, stdout=subprocess.DEVNULL, env=environment())
        judge = judge_of(folder)
        time.sleep(2)
        before, begun = judge.cpu_times(), time.monotonic()
        while time.monotonic() - begun < seconds:
            memory = max(memory, judge.memory_info().rss / 1e6)
            time.sleep(0.5)
        after = judge.cpu_times()
        shares.append((after.user + after.system - before.user - before.system) / (time.monotonic() - begun))
        process.wait(60)
    return shares[0], shares[1], memory


def survives(scratch: Path, name: str, script: str, *arguments: object) -> str:
    begun = time.monotonic()
    done = subprocess.run(
        run_line(scratch / name, script, *arguments),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    took = time.monotonic() - begun
    return f"{'survived' if done.returncode == 0 and not done.stderr else 'FAILED'} in {took:.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--megabytes", type=int, default=1000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        turns = [throughput(scratch, options.megabytes, turn) for turn in range(3)]
        pumped, plain = max(turn[0] for turn in turns), max(turn[1] for turn in turns)
        share, idle, memory = judge_cost(scratch, options.seconds)
        rows = [
            (
                "pump, start-up included",
                f"{pumped:.0f} MB/s",
                f"{pumped / plain:.2f} of COMMAND | cat ({plain:.0f} MB/s)",
            ),
            ("judge at 10 MB/s of log", f"{100 * share:.2f} % of a core", f"{100 * idle:.2f} % with no log"),
            ("judge, resident memory", f"{memory:.0f} MB", "peak"),
            ("100,000 lines a second for 5 s", survives(scratch, "lines", LINES, 50), ""),
            ("three lines of 50 MB, invalid UTF-8", survives(scratch, "long", LONG), ""),
        ]
    width = max(len(row[0]) for row in rows)
    for row in rows:
        print(f"{row[0]:<{width}}  {row[1]:<22}  {row[2]}")


if __name__ == "__main__":
    main()
