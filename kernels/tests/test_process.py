"""Threads, forks and interrupts: the bits stay, nothing hangs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import zerogap_kernels as kernels
from laws import assert_bits

WEIGHT = kernels.pack(np.random.default_rng(0).standard_normal((300, 256)).astype(np.float32), 4, 1)
X = np.random.default_rng(1).standard_normal((65, 256)).astype(np.float32)


def compute(threads: int) -> np.ndarray:
    y = np.empty((65, 300), np.float32)
    kernels.linear(X, WEIGHT, None, y, threads)
    return y


def in_child(work: object) -> None:
    """Run ``work`` in a forked child, which must end well within a minute."""
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(60)  # a child that hangs dies of it
            work()  # type: ignore[operator]
        except BaseException as error:
            print(f"child: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def same_in_child(expected: np.ndarray) -> None:
    for threads in (3, 1, 8, 2):
        for _ in range(5):
            assert_bits(compute(threads), expected)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_forked_child_computes_the_same_bits(threads: int) -> None:
    expected = compute(1)
    assert_bits(compute(threads), expected)  # with 3 a pool idles now
    in_child(lambda: same_in_child(expected))
    assert_bits(compute(3), expected)  # the parent's own pool still serves


def test_a_grandchild_too() -> None:
    expected = compute(3)
    in_child(lambda: (same_in_child(expected), in_child(lambda: same_in_child(expected))))


def test_a_fork_in_the_middle_of_another_threads_kernels() -> None:
    expected, stop = compute(3), threading.Event()
    failures: list[str] = []

    def busy() -> None:
        while not stop.is_set():
            if not np.array_equal(compute(2).view(np.int32), expected.view(np.int32)):
                failures.append("other bits")

    worker = threading.Thread(target=busy)
    worker.start()
    try:
        for _ in range(5):
            in_child(lambda: same_in_child(expected))
    finally:
        stop.set()
        worker.join()
    assert not failures


def worker_bits(threads: int) -> bytes:
    return compute(threads).tobytes()


def test_a_forked_pool_of_processes() -> None:
    expected = compute(3).tobytes()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert set(pool.map(worker_bits, [1, 2, 3, 5])) == {expected}


def test_calls_from_several_threads_take_turns() -> None:
    expected = compute(1)
    wrong: list[int] = []

    def work(threads: int) -> None:
        for _ in range(20):
            if not np.array_equal(compute(threads).view(np.int32), expected.view(np.int32)):
                wrong.append(threads)

    members = [threading.Thread(target=work, args=(threads,)) for threads in (1, 1, 2, 3, 5)]
    for member in members:
        member.start()
    for member in members:
        member.join()
    assert not wrong


INTERRUPTED = """
import os, signal, threading
import numpy as np
import zerogap_kernels as kernels

weight = kernels.pack(np.ones((4096, 2048), np.float32), 1, 2)
x, y = np.ones((2048, 2048), np.float32), np.empty((2048, 4096), np.float32)
timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
timer.start()
try:
    for _ in range(1000):
        kernels.linear(x, weight, None, y, 2)
    print("never interrupted")
except KeyboardInterrupt:
    y[:] = 0
    kernels.linear(x, weight, None, y, 3)
    print("interrupted", bool((y == 2048).all()))
"""


def test_an_interrupt_leaves_all_usable() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["interrupted", "True"], done.stderr
