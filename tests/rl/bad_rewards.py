"""Reward functions that fail; called in worker processes."""

import math
import os
import signal
import time


def raises(prompt, completion, answer):
    raise ValueError("no\nway")


def raises_megabytes(prompt, completion, answer):
    raise ValueError("x" * 10_000_000)


def hangs(prompt, completion, answer):
    time.sleep(600)


def nan(prompt, completion, answer):
    return math.nan


def beyond_float32(prompt, completion, answer):
    return 1e300 if len(completion) % 2 else -1e300


def unprintable(prompt, completion, answer):
    class Strange:
        def item(self):
            raise RuntimeError("no")

        def __repr__(self):
            raise RuntimeError("no")

    return Strange()


def killed(prompt, completion, answer):
    os.kill(os.getpid(), signal.SIGKILL)


def prints_megabytes(prompt, completion, answer):
    print("x" * 1_000_000)
    return float(completion == answer)
