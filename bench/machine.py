"""What this machine can do, measured: bytes read from memory and fused multiply-adds per second, on all threads.

A C program of a few lines, compiled here with gcc, is the yardstick of every row's roofline.
"""

from __future__ import annotations

import os
import platform
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BUFFER_BYTES = 1 << 30
TRIALS = 7

SOURCE = r"""
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

typedef float vec __attribute__((vector_size(VECTOR_BYTES)));
typedef int bits __attribute__((vector_size(VECTOR_BYTES)));
#define LANES (VECTOR_BYTES / 4)
#define CHAINS 12
#define ROUNDS 40000000L

static pthread_barrier_t barrier;
static char *buffer;
static size_t part;
static volatile float sink;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

/* Variables of their own: an array would live on the stack. */
#define EACH12(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11)
#define EACH8(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7)

static void fma_loop(void) {
    vec x, y;
    for (int l = 0; l < LANES; l++) { x[l] = 0.999f; y[l] = 1e-3f; }
#define MAKE(c) vec a##c = x * (float)c;
    EACH12(MAKE)
    for (long r = 0; r < ROUNDS / LANES; r++) {
#define STEP(c) a##c = a##c * x + y; __asm__("" : "+v"(a##c));
        EACH12(STEP)
    }
#define ADD(c) sink += a##c[0];
    EACH12(ADD)
}

static void read_loop(const char *from) {
    const bits *p = (const bits *)from, *end = (const bits *)(from + part);
#define ZERO(c) bits b##c = {0};
    EACH8(ZERO)
    for (; p < end; p += 8) {
#define TAKE(c) b##c ^= p[c]; __asm__("" : "+v"(b##c));
        EACH8(TAKE)
    }
#define MIX(c) sink += b##c[0];
    EACH8(MIX)
}

static int mode;
static double began[64], ended[64]; /* by the workers: whoever waits for them may be late */
static void *work(void *id) {
    size_t me = (size_t)(intptr_t)id;
    char *mine = buffer + me * part;
    if (mode) memset(mine, 1, part);
    pthread_barrier_wait(&barrier);
    for (int trial = 0; trial < TRIALS; trial++) {
        pthread_barrier_wait(&barrier);
        began[me] = now();
        if (mode) read_loop(mine); else fma_loop();
        ended[me] = now();
        pthread_barrier_wait(&barrier);
    }
    return NULL;
}

int main(int argc, char **argv) {
    int threads = atoi(argv[1]);
    size_t bytes = strtoull(argv[2], NULL, 10);
    part = bytes / threads / 4096 * 4096;
    for (mode = 0; mode < 2; mode++) {
        if (mode) {
            buffer = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (buffer == MAP_FAILED) return 1;
            madvise(buffer, bytes, MADV_HUGEPAGE);
        }
        pthread_t ids[64];
        pthread_barrier_init(&barrier, NULL, threads + 1);
        for (int t = 0; t < threads; t++) pthread_create(&ids[t], NULL, work, (void *)(intptr_t)t);
        pthread_barrier_wait(&barrier);
        for (int trial = 0; trial < TRIALS; trial++) {
            pthread_barrier_wait(&barrier);
            pthread_barrier_wait(&barrier);
            double first = began[0], last = ended[0];
            for (int t = 1; t < threads; t++) {
                if (began[t] < first) first = began[t];
                if (ended[t] > last) last = ended[t];
            }
            double s = last - first;
            printf("%.6g ", mode ? threads * (double)part / s
                                 : 2.0 * threads * CHAINS * LANES * (double)(ROUNDS / LANES) / s);
        }
        for (int t = 0; t < threads; t++) pthread_join(ids[t], NULL);
        printf("\n");
    }
    return 0;
}
"""


@dataclass(frozen=True)
class Machine:
    """The machine and its measured peaks.

    Attributes:
        cpu: model name.
        threads: that the peaks were measured with, and every side runs with.
        read_bytes_per_s: the best of the trials, over a buffer far beyond the caches.
        flops_per_s: likewise; a fused multiply-add counts as two.
        read_spread: worst trial over best.
        flops_spread: likewise.
    """

    cpu: str
    threads: int
    read_bytes_per_s: float
    flops_per_s: float
    read_spread: float
    flops_spread: float

    def floor(self, bytes_read: float, flops: float) -> float:
        """Return the least seconds that this many bytes and operations can take."""
        return max(bytes_read / self.read_bytes_per_s, flops / self.flops_per_s)

    def about(self) -> dict[str, Any]:
        return asdict(self)


def measure(threads: int) -> Machine:
    """Compile and run the yardstick.

    Raises:
        RuntimeError: there is no gcc, or the program fails.
    """
    flags = Path("/proc/cpuinfo").read_text()
    vector = 64 if "avx512f" in flags else 32 if "avx2" in flags else 16
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "peak.c"), Path(folder, "peak")
        source.write_text(SOURCE)
        command = ["gcc", "-O3", "-march=native", "-ffp-contract=fast", "-pthread", f"-DVECTOR_BYTES={vector}"]
        command += [f"-DTRIALS={TRIALS}", str(source), "-o", str(program)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
            ran = subprocess.run([program, str(threads), str(BUFFER_BYTES)], check=True, capture_output=True, text=True)
        except FileNotFoundError:
            raise RuntimeError("gcc is missing: the roofline cannot be measured (apt-get install gcc)") from None
        except subprocess.CalledProcessError as error:
            raise RuntimeError(f"the roofline program failed: {error.stderr.strip()[-200:]}") from None
    flops, reads = ([float(word) for word in line.split()] for line in ran.stdout.splitlines())
    return Machine(_cpu_name(flags), threads, max(reads), max(flops), min(reads) / max(reads), min(flops) / max(flops))


def _cpu_name(cpuinfo: str) -> str:
    names = [line.split(":", 1)[1].strip() for line in cpuinfo.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


if __name__ == "__main__":
    found = measure(int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0)))))
    print(f"{found.cpu}: reads {found.read_bytes_per_s / 1e9:.1f} GB/s, {found.flops_per_s / 1e9:.0f} GFLOP/s")
