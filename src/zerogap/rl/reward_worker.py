"""The process that calls the reward function: ``python -m zerogap.rl.reward_worker FD``.

It reads one JSON line per call from the socket ``FD`` and answers with one JSON line. It imports nothing heavy, is the
leader of its own session (so that it can be ended together with whatever the reward started), and ends when its parent
is gone.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import numbers
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from zerogap.errors import UsageError
from zerogap.rl.functions import describe, load_function

_LARGEST = (2 - 2**-23) * 2.0**127  # of float32, which the loss computes in


def accepted_fields(function: Callable[..., Any], reference: str) -> Callable[[str], bool]:
    """Return which field names the function takes besides its three leading parameters prompt, completion and answer.

    Raises:
        UsageError: the function cannot be called with three positional arguments.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return lambda name: False  # a C function without a signature: the three arguments only
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_more = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if len(positional) < 3 and not takes_more:
        raise UsageError(
            f"task.reward = '{reference}': takes {len(positional)} positional arguments; "
            "it must be reward(prompt, completion, answer, **fields) -> float"
        )
    leading = {p.name for p in positional[:3]}
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)} - leading
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return lambda name: name in named or (takes_any and name not in leading)


def number_of(value: Any) -> float | None:
    """Return a float for what a reward function returned (also bool, numpy scalars), or None if float32 has none."""
    if not isinstance(value, numbers.Real) and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, numbers.Real):
        return None
    result = float(value)
    return result if abs(result) <= _LARGEST else None  # also false for NaN


def call(function: Callable[..., Any], job: Mapping[str, Any], accepts: Callable[[str], bool]) -> dict[str, Any]:
    """Call the reward function once and return its outcome as JSON values: kind, value or None, seconds, detail."""
    fields = {name: value for name, value in job["fields"].items() if accepts(name)}
    started = time.perf_counter()
    kind, value, detail = "ok", None, ""
    try:
        returned = function(job["prompt"], job["completion"], job["answer"], **fields)
        value = number_of(returned)
        if value is None:
            kind, detail = "not_finite", f"returned {type(returned).__name__} {' '.join(repr(returned).split())[:100]}"
    except BaseException as error:
        # Also SystemExit and KeyboardInterrupt: what a reward does ends its call, not its worker.
        kind, detail = "raised", describe(error)
    return {"kind": kind, "value": value, "seconds": time.perf_counter() - started, "detail": detail}


def _print_to(log: str | None) -> None:
    """Append standard output and error to a file, if it can be written: no log is no reason to lose a reward."""
    if log is not None:
        with contextlib.suppress(OSError):
            descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.close(descriptor)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Serve calls until the other end closes."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    with channel.makefile("rb") as lines:

        def answer(record: Mapping[str, Any]) -> None:
            channel.sendall(json.dumps(record).encode() + b"\n")

        hello = json.loads(next(lines))
        reference = hello["function"]
        _print_to(hello["log"])
        # The search path was for this process; what a reward starts shall see the person's own.
        os.environ.pop("PYTHONPATH", None)
        if hello["python_path"] is not None:
            os.environ["PYTHONPATH"] = hello["python_path"]
        try:
            function = load_function(reference, "task.reward")
            accepts = accepted_fields(function, reference)
        except UsageError as error:
            answer({"error": str(error)})
            return
        answer({"ready": True})
        try:
            for line in lines:
                job = json.loads(line)
                if "log" in job:
                    _print_to(job["log"])
                else:
                    answer(call(function, job, accepts))
        except (BrokenPipeError, ConnectionResetError):
            return


if __name__ == "__main__":
    main()
