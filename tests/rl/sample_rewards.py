"""Reward functions that the tests call in real worker processes; the working folder of the tests is this one."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def length(prompt, completion, answer):
    return len(completion)


def behave(prompt, completion, answer, mark="", **fields):
    """Do what the completion says; ``mark`` is a file that gets one byte per call."""
    if mark:
        with open(mark, "ab") as file:
            file.write(b".")
    match completion:
        case "raise":
            raise ValueError("bad\nanswer")
        case "exit":
            sys.exit(3)
        case "hang":
            time.sleep(600)
        case "hold":  # never lets another Python thread run
            sum(range(10**15))
        case "stubborn":
            while True:
                try:
                    time.sleep(600)
                except BaseException:
                    continue
        case "die":
            os._exit(7)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "child":
            child = subprocess.Popen(["sleep", "600"])
            Path(answer).write_text(str(child.pid))
            time.sleep(600)
        case "print":
            print("noise on stdout")
            os.write(1, b'{"kind": "ok", "value": 99.0}\n')
        case "nan":
            return float("nan")
        case "inf":
            return float("inf")
        case "none":
            return None
        case "text":
            return "1.0"
        case "true":
            return True
        case "numpy":
            import numpy

            return numpy.float32(0.5)
        case "torch?":
            return float("torch" in sys.modules)
        case "path":
            return float(os.environ.get("PYTHONPATH") == answer)
        case "environment":
            inherited = Path("/proc/self/environ").read_bytes().decode() + str(dict(os.environ))
            return float("hunter2" in inherited) + 2.0 * float("visible" in inherited)
    return 1.0


def sees_fields(prompt, completion, answer, *, level):
    return float(level) + float(prompt[0]["content"] == "hi")


def two_arguments(prompt, completion):
    return 1.0


NUMBER = 3


def mark(prompt, completion, answer):
    """Leave a file."""
    Path(answer).write_text("")
    if completion == "slow mark":
        time.sleep(0.5)
    return len(completion)


def slow_first(prompt, completion, answer):
    if completion == "slow":
        time.sleep(1.0)
    return len(completion)
