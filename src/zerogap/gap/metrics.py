"""The numbers: one pass over the tokens, in float64 from the float32 words, in bounded memory.

``Accumulator.add`` takes tables in sequence order and may be called any number of times; a sequence may be cut between
two calls. Quantiles are exact up to ``EXACT_LIMIT`` tokens and read from a histogram of the float32 words above that
(relative error under 0.8 %).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import asdict
from typing import Any

import numpy as np

from zerogap.gap.numbers import Numbers, Profile, StepNumbers
from zerogap.gap.table import Array, GapTable, Kind, classify, sequence_starts

EXACT_LIMIT = 2_000_000
CLIP_LOW, CLIP_HIGH = 0.8, 1.2  # the PPO range that clip shares are counted against
QUANTILES = (0.5, 0.9, 0.99, 0.999)
_EXP_LIMIT = 20.0  # log-ratios are clamped before exp, as trainers do; the share that was clamped is reported
_POSITION_BINS = 32  # 0, 1, 2-3, 4-7, ...
PROBABILITY_EDGES = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)
_SHIFT = 16  # float32 words are binned by their upper 16 bits: 128 bins per power of two


class Accumulator:
    """Sums that grow with tables; ``numbers()`` reads them at any time."""

    def __init__(self) -> None:
        self._n = Numbers()
        self._missing: dict[str, Counter[str]] = {"engine": Counter(), "trainer": Counter()}
        self._sums = np.zeros(10)
        self._max_abs = 0.0
        self._ratio_min, self._ratio_max = math.inf, -math.inf
        self._exact: list[Array] = []
        self._histogram = np.zeros(1 << (32 - _SHIFT), dtype=np.int64)
        self._position = np.zeros((3, _POSITION_BINS))
        self._probability = np.zeros((3, len(PROBABILITY_EDGES)))
        self._groups: dict[str, dict[str, Array]] = {"turn": {}, "staleness": {}, "host": {}, "rank": {}}
        self._sequence = np.zeros(2)
        self._sequence_range = [math.inf, -math.inf]
        self._open: tuple[tuple[Any, ...], int, float, float, int] | None = None
        self._kept = np.zeros(6)
        self.steps: dict[tuple[str, int], StepNumbers] = {}
        self.boundary_nulls = 0

    @property
    def tokens(self) -> int:
        """Rows counted so far, compared or not."""
        return self._n.tokens

    def add(self, table: GapTable) -> None:
        """Count the rows of ``table`` (in sequence order; it needs both log-prob columns).

        Zeros at a sequence's end may be padding, which its tail decides: a sequence cut in two by the end of a piece is
        judged as two.
        """
        n = len(table)
        if not n:
            return
        starts = sequence_starts(table)
        kinds_engine, kinds_trainer = classify(table, starts)
        mask = table.mask()
        self._n.tokens += n
        self._n.masked_out += int(n - np.count_nonzero(mask))
        for side, kinds in (("engine", kinds_engine), ("trainer", kinds_trainer)):
            if kinds.any():
                for kind, count in zip(*np.unique(kinds[mask], return_counts=True), strict=True):
                    if kind != Kind.OK:
                        self._missing[side][Kind(int(kind)).name.lower()] += int(count)
        use = mask & (kinds_engine == Kind.OK) & (kinds_trainer == Kind.OK)
        everything = bool(use.all())
        engine = table.columns["logprob_engine"]
        trainer = table.columns["logprob_trainer"]
        self._add_steps(table, use, everything)
        if not everything:
            engine, trainer = engine[use], trainer[use]
        if not len(engine):
            self._add_sequences(table, starts, use, np.zeros(0))
            return
        d = np.subtract(trainer, engine, dtype=np.float64)
        magnitude = np.abs(d)
        changed = engine.view(np.uint32) != trainer.view(np.uint32)
        clamped = np.clip(d, -_EXP_LIMIT, _EXP_LIMIT)
        excess = np.expm1(clamped)  # r - 1, without cancellation for tiny d
        ratio = excess + 1.0
        count = len(d)
        self._n.compared += count
        self._n.different += int(np.count_nonzero(changed))
        self._n.exp_clamped += int(np.count_nonzero(clamped != d)) if magnitude.max() > _EXP_LIMIT else 0
        total_ratio = ratio.sum()
        total_d = d.sum()
        squares = float(np.dot(d, d))
        k3 = excess - clamped
        k3_sum = k3.sum()
        self._sums += np.array(
            (
                magnitude.sum(),
                total_d,
                squares,
                k3_sum,
                np.minimum(k3, 10.0).sum() if magnitude.max() > 2 else k3_sum,
                total_ratio,
                float(np.dot(ratio, ratio)),
                np.count_nonzero(ratio < CLIP_LOW),
                np.count_nonzero(ratio > CLIP_HIGH),
                np.count_nonzero(magnitude > 0.1),
            ),
            dtype=np.float64,
        )
        self._max_abs = max(self._max_abs, float(magnitude.max()))
        self._ratio_min = min(self._ratio_min, float(ratio.min()))
        self._ratio_max = max(self._ratio_max, float(ratio.max()))
        self._add_quantiles(magnitude.astype(np.float32))
        self._add_profiles(table, use, everything, magnitude, d, engine)
        self._add_sequences(table, starts, use, d)
        if table.has("kept_mass"):
            self._add_kept(table, use, d)

    def _add_quantiles(self, magnitude: Array) -> None:
        words = magnitude.view(np.uint32) >> _SHIFT
        self._histogram += np.bincount(words, minlength=len(self._histogram))
        if self._n.compared <= EXACT_LIMIT:
            self._exact.append(magnitude)
        else:
            self._exact.clear()

    def _add_steps(self, table: GapTable, use: Array, everything: bool) -> None:
        """Per-step sums; steps come in stretches, so a row needs no dictionary look-up."""
        n = len(table)
        step = table.columns.get("step")
        run = table.columns.get("run")
        change = np.zeros(n, dtype=bool)
        change[0] = True
        for values in (step, run):
            if values is not None:
                change[1:] |= values[1:] != values[:-1]
        starts = np.flatnonzero(change)
        if len(starts) > 4096:  # interleaved steps: bring them together first
            order = np.lexsort((table.get("step"), table.codes("run")))
            part = table.where(order)
            self._add_steps(part, use[order], everything)
            return
        engine, trainer = table.columns["logprob_engine"], table.columns["logprob_trainer"]
        for start, end in zip(starts, np.append(starts[1:], n), strict=True):
            key = (str(run[start]) if run is not None else "", int(step[start]) if step is not None else 0)
            numbers = self.steps.setdefault(key, StepNumbers())
            rows = slice(int(start), int(end))
            numbers.tokens += int(end - start)
            a, b = engine[rows], trainer[rows]
            if not everything:
                a, b = a[use[rows]], b[use[rows]]
            if not len(a):
                continue
            d = np.subtract(b, a, dtype=np.float64)
            numbers.compared += len(d)
            numbers.sum_signed += float(d.sum())
            numbers.different += int(np.count_nonzero(a.view(np.uint32) != b.view(np.uint32)))
            numbers.sum_ratio += float(np.exp(np.clip(d, -_EXP_LIMIT, _EXP_LIMIT)).sum()) if n < EXACT_LIMIT else 0.0
            np.abs(d, out=d)
            numbers.sum_abs += float(d.sum())
            numbers.max_abs = max(numbers.max_abs, float(d.max()))

    def _add_profiles(
        self, table: GapTable, use: Array, everything: bool, magnitude: Array, d: Array, engine: Array
    ) -> None:
        if table.has("position"):
            position = table.columns["position"]
            position = np.maximum(position if everything else position[use], 0).astype(np.float64)
            bins = np.minimum(np.frexp(position)[1], _POSITION_BINS - 1)
            _tally(self._position, bins, magnitude, d)
        edges = np.log(np.array(PROBABILITY_EDGES[1:-1]))
        bins = np.zeros(len(engine), dtype=np.int64)
        for edge in edges:
            bins += engine >= edge
        _tally(self._probability, bins, magnitude, d)
        groups: dict[str, Array] = {}
        for name in ("turn", "host", "rank"):
            if table.has(name):
                groups[name] = table.columns[name][use]
        if table.has("version_engine", "version_trainer"):
            groups["staleness"] = (table.columns["version_trainer"] - table.columns["version_engine"])[use]
        for name, values in groups.items():
            unique, inverse = np.unique(values.astype(str) if values.dtype == object else values, return_inverse=True)
            sums = np.zeros((3, len(unique)))
            _tally(sums, inverse, magnitude, d)
            for label, column in zip(unique[:64], sums.T, strict=False):
                held = self._groups[name].setdefault(str(label), np.zeros(3))
                held += column

    def _add_sequences(self, table: GapTable, starts: Array, use: Array, d: Array) -> None:
        """Sums over whole sequences; the last one of a call stays open, for the next call may continue it."""
        full = np.zeros(len(table))
        full[use] = d
        sums = np.add.reduceat(full, starts)
        sizes = np.add.reduceat(np.abs(full), starts)
        counts = np.add.reduceat(use.astype(np.int64), starts)

        def key(row: int) -> tuple[Any, ...]:
            return tuple(table.columns[c][row] for c in ("run", "step", "sample") if c in table.columns)

        if self._open is not None:
            held, position, total, size, count = self._open
            known = table.has("position") or bool(held)  # else nothing says where a sequence ends
            if known and held == key(0) and (not table.has("position") or table.columns["position"][0] > position):
                sums[0] += total
                sizes[0] += size
                counts[0] += count
            else:
                self._close(np.array([total]), np.array([size]), np.array([count]))
        self._close(sums[:-1], sizes[:-1], counts[:-1])
        end = int(table.columns["position"][-1]) if table.has("position") else 0
        self._open = (key(int(starts[-1])), end, float(sums[-1]), float(sizes[-1]), int(counts[-1]))

    def _close(self, sums: Array, sizes: Array, counts: Array) -> None:
        filled = counts > 0
        if not filled.any():
            return
        sums, sizes, counts = sums[filled], sizes[filled], counts[filled]
        self._n.sequences += len(sums)
        self._sequence += (float((sizes / counts).sum()), float(sums.sum()))
        self._sequence_range[0] = min(self._sequence_range[0], float(sums.min()))
        self._sequence_range[1] = max(self._sequence_range[1], float(sums.max()))

    def _add_kept(self, table: GapTable, use: Array, d: Array) -> None:
        mass = table.columns["kept_mass"][use].astype(np.float64)
        known = (mass > 0) & (mass <= 1.0 + 1e-3)
        if "kept_mass" in table.nulls:
            known &= ~table.nulls["kept_mass"][use]
        log_mass = np.log(np.minimum(mass[known], 1.0))
        replayed = table.get("kept_replayed", False)[use][known]
        sampler = np.where(replayed, 0.0, log_mass)
        numerics = d[known] - sampler
        sums = (sampler.sum(), np.abs(numerics).sum(), mass[known].sum(), log_mass.sum(), replayed.sum())
        self._kept += np.array((len(sampler), *sums), dtype=np.float64)
        self._n.numerics_part = (0.0 if math.isnan(self._n.numerics_part) else self._n.numerics_part) + float(
            numerics.sum()
        )

    def numbers(self) -> Numbers:
        """Return the numbers of everything added so far."""
        n = Numbers(**{**asdict(self._n)})
        n.missing = {side: dict(sorted(counts.items())) for side, counts in self._missing.items()}
        if self._open is not None:
            other = Accumulator()
            other._sequence, other._sequence_range = self._sequence.copy(), list(self._sequence_range)
            other._n.sequences = self._n.sequences
            _, _, total, size, held = self._open
            other._close(np.array([total]), np.array([size]), np.array([held]))
            n.sequences = other._n.sequences
            sequence, low_high = other._sequence, other._sequence_range
        else:
            sequence, low_high = self._sequence, self._sequence_range
        count = n.compared
        if not count:
            return n
        s = self._sums
        n.mean_abs, n.mean_signed, n.max_abs = s[0] / count, s[1] / count, self._max_abs
        n.std = math.sqrt(max(0.0, s[2] / count - n.mean_signed**2))
        n.different_share = n.different / count
        n.k1, n.k2, n.k3, n.k3_clamped = (
            0.0 - n.mean_signed,
            s[2] / count / 2,
            max(0.0, s[3] / count),
            max(0.0, s[4] / count),
        )
        n.ratio_mean, n.ratio_min, n.ratio_max = s[5] / count, self._ratio_min, self._ratio_max
        n.ess_share = s[5] ** 2 / (count * s[6])
        n.clip_low_share, n.clip_high_share, n.share_over_0_1 = s[7] / count, s[8] / count, s[9] / count
        n.quantiles, n.quantiles_exact = self._quantiles()
        if n.sequences:
            n.sequence_mean_abs = sequence[0] / n.sequences
            n.sequence_log_ratio_mean = sequence[1] / n.sequences
            n.sequence_log_ratio_min, n.sequence_log_ratio_max = low_high
        if self._kept[0]:
            n.kept_mass_tokens = int(self._kept[0])
            n.sampler_part = self._kept[1] / self._kept[0]
            n.numerics_part = n.numerics_part / self._kept[0]
            n.numerics_mean_abs = self._kept[2] / self._kept[0]
            n.kept_mass_mean = self._kept[3] / self._kept[0]
            n.log_kept_mass_mean, n.kept_replayed_share = self._kept[4] / self._kept[0], self._kept[5] / self._kept[0]
        for name, value in vars(n).items():
            if isinstance(value, np.floating):
                setattr(n, name, float(value))
        return n

    def _quantiles(self) -> tuple[dict[str, float], bool]:
        labels = [f"p{100 * q:g}" for q in QUANTILES]
        if self._exact:
            values = np.quantile(np.concatenate(self._exact).astype(np.float64), QUANTILES)
            return {k: float(v) for k, v in zip(labels, values, strict=True)}, True
        below = np.cumsum(self._histogram)
        bins = np.searchsorted(below, np.array(QUANTILES) * below[-1])
        middle = ((bins.astype(np.uint32) << _SHIFT) | np.uint32(1 << (_SHIFT - 1))).astype(np.uint32)
        values = np.where(bins == 0, np.float32(0), middle.view(np.float32))
        return {k: float(v) for k, v in zip(labels, values, strict=True)}, False

    def profiles(self) -> dict[str, Profile]:
        """Return mean abs(d) by position, by the engine's probability, and by turn, staleness, host, rank if known."""
        made: dict[str, Profile] = {}
        labels = ["0", *(f"{1 << (i - 1)}-{(1 << i) - 1}" if i > 1 else "1" for i in range(1, _POSITION_BINS))]
        made["position"] = _profile("position", labels, self._position.T)
        ranges = [f"{a:g}-{b:g}" for a, b in itertools.pairwise(PROBABILITY_EDGES)]
        made["probability"] = _profile("probability", ranges, self._probability.T)
        for name, groups in self._groups.items():
            if groups:
                keys = sorted(groups, key=lambda label: (len(label), label))
                made[name] = _profile(name, keys, [groups[key] for key in keys])
        return {name: profile for name, profile in made.items() if profile.rows}


def _tally(into: Array, bins: Array, magnitude: Array, d: Array) -> None:
    width = into.shape[1]
    into[0] += np.bincount(bins, minlength=width)[:width]
    into[1] += np.bincount(bins, weights=magnitude, minlength=width)[:width]
    into[2] += np.bincount(bins, weights=d, minlength=width)[:width]


def _profile(name: str, labels: list[str], sums: Any) -> Profile:
    rows = [
        (label, int(count), float(total / count), float(signed / count))
        for label, (count, total, signed) in zip(labels, sums, strict=False)
        if count
    ]
    return Profile(name, rows)


def measure(table: GapTable) -> Numbers:
    """Return the numbers of one table in memory."""
    accumulator = Accumulator()
    accumulator.add(table.sorted())
    return accumulator.numbers()
