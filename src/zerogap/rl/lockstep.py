"""Runs many rollout functions at once, so that the engine gets their generate calls as one batch.

Each function runs in a thread of its own and sees an ordinary blocking ``generate``. The engine runs in the calling
thread, whenever every function either waits for it or has ended. By the row law the tokens do not depend on who shares
a batch; the price is that a turn waits for the slowest function.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from zerogap.errors import UsageError

Answer = TypeVar("Answer")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Call:
    """One generate call: which function made it (its index) and with what."""

    index: int
    prompt_ids: tuple[int, ...]
    params: dict[str, Any]


class Cancelled(Exception):  # noqa: N818
    """Raised inside the waiting functions when the batch ends early; not an error of theirs."""


class _Lockstep(Generic[Answer, Result]):
    def __init__(self, functions: Sequence[Callable[[Callable[..., Answer]], Result]]) -> None:
        self.functions = functions
        self.changed = threading.Condition()
        self.calls: dict[int, Call] = {}
        self.answers: dict[int, Answer] = {}
        self.results: dict[int, Result] = {}
        self.errors: dict[int, BaseException] = {}
        self.cancelled = False

    def laggard(self) -> int:
        """Return the lowest index of the functions that neither wait nor have ended."""
        return min(set(range(len(self.functions))) - self.calls.keys() - self.results.keys())

    def work(self, index: int) -> None:
        def generate(prompt_ids: Sequence[int], **params: Any) -> Answer:
            with self.changed:
                self.calls[index] = Call(index, tuple(prompt_ids), params)
                self.changed.notify_all()
                self.changed.wait_for(lambda: index in self.answers or self.cancelled)
                if self.cancelled:
                    raise Cancelled
                return self.answers.pop(index)

        try:
            result = self.functions[index](generate)
        except BaseException as error:
            with self.changed:
                self.errors[index] = error
                self.changed.notify_all()
        else:
            with self.changed:
                self.results[index] = result
                self.changed.notify_all()

    def settled(self) -> bool:
        """Whether every function waits for the engine or has ended."""
        return bool(self.errors) or len(self.calls) + len(self.results) == len(self.functions)

    def cancel(self) -> None:
        with self.changed:
            self.cancelled = True
            self.changed.notify_all()


def run_in_lockstep(
    functions: Sequence[Callable[[Callable[..., Answer]], Result]],
    generate_batch: Callable[[list[Call]], Sequence[Answer]],
    time_limit_s: float | None = None,
    name: Callable[[int], str] = "function {}".format,
    ended: Callable[[int, Result], None] = lambda index, result: None,
) -> list[Result]:
    """Run ``functions``, each as ``function(generate)``, and return what they return, in their order.

    Args:
        functions: each may call ``generate(prompt_ids, **params)`` any number of times.
        generate_batch: answers a list of calls (sorted by index), in the calling thread.
        time_limit_s: how long they may run between two batches, seconds; None is without limit.
        name: names a function by its index, for the error line.
        ended: told, in the calling thread, what each function returned: before the next batch, by index.

    Raises:
        UsageError: a function was at work for longer than the limit; its thread ends with the process.
        Exception: what a function raised (the one of lowest index), after the others were told to end.
    """
    state: _Lockstep[Answer, Result] = _Lockstep(functions)
    for index in range(len(functions)):
        try:
            threading.Thread(target=state.work, args=(index,), daemon=True, name=f"rollout-{index}").start()
        except RuntimeError:
            state.cancel()
            raise UsageError(
                f"rollout: the system gives no more than {index} threads, one per sample of a step; "
                "lower rollout.prompts_per_step"
            ) from None
    told: set[int] = set()
    try:
        while len(told) < len(functions):
            with state.changed:
                if not state.changed.wait_for(state.settled, time_limit_s):
                    raise UsageError(
                        f"{name(state.laggard())}: at work for over {time_limit_s:g} s without calling the engine; "
                        "mend it or raise rollout.time_limit_s"
                    )
                if state.errors:
                    raise state.errors[min(state.errors)]
                calls = [state.calls.pop(index) for index in sorted(state.calls)]
                new = sorted(state.results.keys() - told)
            for index in new:
                ended(index, state.results[index])
            told.update(new)
            if not calls:
                break
            answers = generate_batch(calls)
            with state.changed:
                state.answers |= {call.index: answer for call, answer in zip(calls, answers, strict=True)}
                state.changed.notify_all()
    except BaseException:
        state.cancel()
        raise
    return [state.results[index] for index in range(len(functions))]
