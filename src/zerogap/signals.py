"""What Ctrl-C and a request to end do: while modules load the process goes at once, later the command unwinds."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_Handler = Callable[[int, FrameType | None], None]


def _quit(number: int, frame: FrameType | None) -> None:
    # Not as an exception: libraries that are half loaded turn one into a crash or another error.
    os.write(2, b"zerogap: interrupted at its start; nothing was written\n")
    os._exit(2)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def _handling(handler: _Handler) -> Iterator[None]:
    """Give the signals a handler, except those that the caller has ignored (nohup, a background job)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    changed = [number for number, old in before.items() if old not in (signal.SIG_IGN, None)]
    try:
        for number in changed:
            signal.signal(number, handler)
        yield
    finally:
        for number in changed:
            signal.signal(number, before[number])


def quitting() -> AbstractContextManager[None]:
    """Return a context in which a signal ends the process at once; for imports, when nothing has begun."""
    return _handling(_quit)


def unwinding() -> AbstractContextManager[None]:
    """Return a context in which each of the signals raises KeyboardInterrupt, so that files and processes are ended."""
    return _handling(_interrupt)


def ignore() -> None:
    """Let nothing disturb the end of the process."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
