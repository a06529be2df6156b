"""What a source without tokens gives: one value for each step and quantity, cut into runs and restarts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zerogap.gap.names import GAP_QUANTITIES, JUDGED, metric_for
from zerogap.gap.table import Array


@dataclass
class Series:
    """The metrics of one run over its steps.

    Attributes:
        label: the run's name.
        steps: int64 [N] step numbers as logged; ``restarts`` says where they were taken up again.
        values: quantity -> float64 [N]; NaN where the step has no value or logged NaN (see ``nonfinite``).
        names: quantity -> the metric name it was read from.
        nonfinite: quantity -> indices at which the source itself said nan or inf.
        restarts: indices of first steps after a resume.
        other: metric name -> float64 [N] for whatever else was numeric (for the report).
    """

    label: str
    steps: Array
    values: dict[str, Array]
    names: dict[str, str] = field(default_factory=dict)
    nonfinite: dict[str, list[int]] = field(default_factory=dict)
    restarts: list[int] = field(default_factory=list)
    other: dict[str, Array] = field(default_factory=dict)
    source: str = ""
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.steps)

    def judged(self) -> str | None:
        """Return the quantity that a range is put on: the most telling of those that are there."""
        return next((quantity for quantity in JUDGED if quantity in self.values), None)

    def finite(self, quantity: str) -> tuple[Array, Array]:
        """Return (indices, values) of the steps where the quantity is a number."""
        values = self.values[quantity]
        rows = np.flatnonzero(np.isfinite(values))
        return rows, values[rows]

    def at(self, quantity: str, index: int) -> float:
        """Return one value, NaN if there is none."""
        return float(self.values[quantity][index]) if quantity in self.values else math.nan


@dataclass
class _Run:
    label: str
    records: dict[int, dict[str, float]] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    restarts: list[int] = field(default_factory=list)
    overwritten: int = 0


@dataclass
class SeriesBuilder:
    """Collects ``(process, step, metrics)`` in the order they were logged.

    The same step from one process with the same values is a doubled line; with new names it completes the step. A step
    that comes again with other values is a resume when it is not the first step, and another run when it is.
    Values of two processes that contradict each other at the same steps are two runs.
    """

    source: str = ""
    per_process: dict[str, list[_Run]] = field(default_factory=dict)
    doubled: int = 0
    out_of_order: int = 0
    _implicit: dict[str, int] = field(default_factory=dict)

    def add(self, process: str, step: int | None, found: Mapping[str, float]) -> None:
        """Take one logged line; without a step number lines are counted from 0."""
        if step is None:
            step = self._implicit.get(process, -1) + 1
            self._implicit[process] = step
        runs = self.per_process.setdefault(process, [_Run("")])
        run = runs[-1]
        held = run.records.get(step)
        if held is None:
            if run.order and step < run.order[-1]:
                if step < run.order[0] and run.order[0] - step > 0 and step == 0:
                    run = self._next_run(runs)
                elif run.order[-1] - step > 2 and step < min(run.order[-3:]):
                    run.restarts.append(step)
                else:
                    self.out_of_order += 1
            run.records[step] = dict(found)
            run.order.append(step)
            return
        clash = [k for k, v in found.items() if k in held and not _same(held[k], v)]
        if not clash:
            if all(key in held for key in found):
                self.doubled += 1
            held.update(found)
        elif step <= run.order[0] or (step == run.order[-1] and len(run.order) == 1):
            run = self._next_run(runs)
            run.records[step] = dict(found)
            run.order.append(step)
        elif self._interleaved(runs, step):
            other = runs[-2]
            if step in other.records and any(k in other.records[step] for k in clash):
                run.records[step].update(found)
            else:
                other.records[step] = dict(found)
                other.order.append(step)
        else:
            # Resumed: what was logged after this step belongs to work that was thrown away.
            dropped = [s for s in run.order if s >= step]
            run.overwritten += len(dropped)
            run.order = [s for s in run.order if s < step]
            for s in dropped:
                del run.records[s]
            run.records[step] = dict(found)
            run.order.append(step)
            run.restarts.append(step)

    @staticmethod
    def _interleaved(runs: list[_Run], step: int) -> bool:
        return len(runs) > 1 and runs[-1].order[-1] == step and runs[-2].order[-1] in (step, step - 1)

    @staticmethod
    def _next_run(runs: list[_Run]) -> _Run:
        runs.append(_Run(""))
        return runs[-1]

    def build(self, label: str) -> list[Series]:
        """Return one series per run that has any gap quantity (or, failing that, any known one)."""
        runs = self._merged()
        made = [self._series(run, label) for run in runs if run.records]
        with_gap = [s for s in made if GAP_QUANTITIES & set(s.values)]
        made = with_gap or [s for s in made if s.values or s.other]
        for number, series in enumerate(made):
            series.label = label if len(made) == 1 else f"{label}#{number + 1}"
            if len(made) > 1:
                series.notes.append(f"{len(made)} runs in one source")
        return made

    def _merged(self) -> list[_Run]:
        """Bring together what several processes of one run logged about the same steps."""
        result: list[_Run] = []
        for runs in self.per_process.values():
            for number, run in enumerate(runs):
                home = next((h for h in result if _compatible(h, run)), None) if len(runs) == 1 or number == 0 else None
                if home is None:
                    result.append(run)
                    continue
                for step in run.order:
                    if step in home.records:
                        home.records[step].update(run.records[step])
                    else:
                        home.records[step] = run.records[step]
                        home.order.append(step)
                home.restarts = sorted(set(home.restarts) | set(run.restarts))
        return result

    def _series(self, run: _Run, label: str) -> Series:
        steps = sorted(run.records)
        values: dict[str, Array] = {}
        names: dict[str, str] = {}
        nonfinite: dict[str, list[int]] = {}
        other: dict[str, Array] = {}
        for index, step in enumerate(steps):
            for name, value in run.records[step].items():
                metric = metric_for(name)
                if metric is None:
                    other.setdefault(name, np.full(len(steps), np.nan))[index] = value
                    continue
                quantity = metric.quantity
                if names.setdefault(quantity, name) != name:
                    continue  # the first name that gives a quantity keeps it; unlike names are not mixed
                values.setdefault(quantity, np.full(len(steps), np.nan))[index] = value
                if not math.isfinite(value):
                    nonfinite.setdefault(quantity, []).append(index)
        notes = []
        if self.doubled:
            notes.append(f"{self.doubled} doubled lines ignored")
        if self.out_of_order:
            notes.append(f"{self.out_of_order} steps were logged out of order and sorted")
        if run.restarts:
            at = ", ".join(map(str, run.restarts[:5]))
            notes.append(f"resumed at step {at}; {run.overwritten} steps that were done again are left out")
        restarts = [steps.index(step) for step in run.restarts if step in run.records]
        return Series(
            label,
            np.array(steps, dtype=np.int64),
            values,
            names,
            nonfinite,
            restarts,
            other,
            self.source,
            notes,
        )


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def _compatible(a: _Run, b: _Run) -> bool:
    """Whether two processes speak of one run: they never contradict each other, and share steps or names differ."""
    shared = [step for step in b.order if step in a.records]
    return all(
        _same(a.records[step][key], value)
        for step in shared
        for key, value in b.records[step].items()
        if key in a.records[step]
    )


def series_of_steps(steps: Mapping[tuple[str, int], Any], label: str, source: str = "") -> list[Series]:
    """Return the series that the per-step numbers of a table make (see ``metrics.StepNumbers``)."""
    made = []
    for run in sorted({key[0] for key in steps}):
        keys = sorted(key for key in steps if key[0] == run and steps[key].compared)
        if not keys:
            continue
        numbers = [steps[key] for key in keys]
        made.append(
            Series(
                f"{label}:{run}" if run else label,
                np.array([key[1] for key in keys], dtype=np.int64),
                {
                    "abs_mean": np.array([n.sum_abs / n.compared for n in numbers]),
                    "abs_max": np.array([n.max_abs for n in numbers]),
                    "signed_mean": np.array([n.sum_signed / n.compared for n in numbers]),
                    "different": np.array([float(n.different) for n in numbers]),
                    "compared": np.array([float(n.compared) for n in numbers]),
                },
                {name: f"{name} of the tokens" for name in ("abs_mean", "abs_max", "different", "compared")},
                source=source,
            )
        )
    return made
