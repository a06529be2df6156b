"""What the rows share: the machine, the model, and the sides, each started when first needed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from machine import Machine
from measure import Busy, Row, Side, SideError, rounds, tell
from model_costs import Costs
from peer_setup import gguf_file, llama_server, vllm_python

SIDES = Path(__file__).resolve().parents[1] / "sides"
GRPO_SAMPLES, GRPO_TOKENS = 8, 64


class Bench:
    """One run of the benchmark; a context manager that ends its sides.

    Args:
        model: folder of the model.
        machine: its measured peaks.
        count: rounds of each row.
        short: a tenth of the tokens, to see that all works.
        only_sides: leave out other engines than these; None takes all.
        logs: folder for what the sides print.
    """

    def __init__(
        self, model: Path, machine: Machine, count: int, short: bool, only_sides: set[str] | None, logs: Path
    ) -> None:
        self.model, self.machine, self.count, self.short = model, machine, count, short
        self.only_sides, self.logs = only_sides, logs
        self.threads = machine.threads
        self.costs = Costs.of(model)
        self._sides: dict[str, Side] = {}
        self._failed: dict[str, str] = {}

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exception: object) -> None:
        for side in self._sides.values():
            side.close()

    def scaled(self, tokens: int) -> int:
        return max(4, tokens // 10) if self.short else tokens

    def about(self) -> dict[str, Any]:
        """Return what the sides said of themselves."""
        return {name: {k: v for k, v in side.about.items() if k != "ready"} for name, side in self._sides.items()}

    def side(self, name: str) -> Side:
        """Return a side, started if need be.

        Raises:
            SideError: it cannot be started.
        """
        if name in self._failed:
            raise SideError(self._failed[name])
        if name not in self._sides:
            tell(f"starting {name} ...")
            try:
                command, more = self._command(name)
                environment = {**os.environ, "OMP_NUM_THREADS": str(self.threads), **more}
                self._sides[name] = Side(name, command, environment, self.logs / f"{name}.log")
            except (SideError, OSError) as error:
                self._failed[name] = str(error)
                raise SideError(str(error)) from None
        return self._sides[name]

    def end(self, name: str) -> None:
        """End a side whose memory is wanted back."""
        if name in self._sides:
            self._sides.pop(name).close()

    def in_turn(
        self,
        name: str,
        what: str,
        sides: Sequence[str],
        ask: Callable[[Side, int], dict[str, Any]],
        warm: Callable[[Side], object],
        value: str = "seconds",
    ) -> Row:
        """Run a row's sides in turn; the first is ours."""
        asked, problems = {}, []
        for side in sides:
            if side != sides[0] and self.only_sides is not None and side not in self.only_sides:
                continue
            try:
                asked[side] = self.side(side)
            except SideError as error:
                problems.append(str(error))
                tell(str(error))
        busy = Busy()
        answers, more = rounds(asked, self.count, ask, warm, lambda text: tell(f"{name}: {text}"))
        values = {side: [answer[value] for answer in given] for side, given in answers.items()}
        row = Row(name, what, values.pop(sides[0], []), values, problems=problems + more)
        row.extra = {"answers": answers}
        busy.note(row)
        return row

    def _command(self, name: str) -> tuple[list[str], dict[str, str]]:
        """Return a side's command and what stands in its environment besides ours.

        The project's own processes wait passively, as its command does; a peer's threads wait as its makers chose,
        which cannot disturb anyone, since a side that is not asked is stopped.
        """
        model, python = str(self.model), sys.executable
        source = Path(__file__).resolve().parents[2] / "src"
        path = {"PYTHONPATH": os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH")]))}
        ours = [python, str(SIDES / "ours_side.py"), model]
        if name == "ours-1-thread":
            return ours, {**path, "OMP_NUM_THREADS": "1"}
        if name == "torch-ops":
            return [*ours, "--inexact"], path
        if name == "ours-bf16":
            return [*ours, "--weights", "bfloat16"], path
        if name.startswith("ours"):
            return ours, path
        if name == "transformers":
            return [python, str(SIDES / "hf_side.py"), model], {}
        if name == "trl":
            return [python, str(SIDES / "trl_side.py"), model, str(GRPO_SAMPLES), str(self.scaled(GRPO_TOKENS))], {}
        if name == "vllm":
            return [self._there(vllm_python()), str(SIDES / "vllm_side.py"), model], {}
        kind = name.removeprefix("llama.cpp-")
        program, weights = self._there(llama_server()), self._there(gguf_file(self.model, kind))
        vocabulary = self.costs.vocabulary
        return [python, str(SIDES / "llama_side.py"), program, weights, str(vocabulary)], {}

    @staticmethod
    def _there(path: Path) -> str:
        if not path.exists():
            raise SideError(f"{path} is not there: run make bench-peers")
        return str(path)
