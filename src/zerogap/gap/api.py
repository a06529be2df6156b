"""The gap in process: compare arrays in any training loop, or record them step by step and write the table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zerogap.errors import UsageError
from zerogap.gap.judge import Options, Verdict, judge
from zerogap.gap.numbers import Numbers
from zerogap.gap.readers.loaded import Loaded, add_tables
from zerogap.gap.readers.records import write_table
from zerogap.gap.series import series_of_steps
from zerogap.gap.table import Array, GapTable, concatenate, schema


@dataclass
class GapReport:
    """What ``compare`` found.

    Attributes:
        numbers: mean, max, quantiles, KL estimates, ... (``zerogap.gap.metrics.Numbers``).
        verdict: status, findings and the range that was used.
        table: the rows, for ``write``.
    """

    numbers: Numbers
    verdict: Verdict
    table: GapTable

    @property
    def mean(self) -> float:
        """Mean abs(d), nats."""
        return self.numbers.mean_abs

    @property
    def max(self) -> float:
        """Largest abs(d), nats."""
        return self.numbers.max_abs

    @property
    def different(self) -> int:
        """Tokens whose two float32 words are not the same."""
        return self.numbers.different

    @property
    def status(self) -> str:
        """Return zero, healthy, out-of-range, fault or unknown."""
        return self.verdict.status

    def metrics(self, prefix: str = "gap/") -> dict[str, float]:
        """Return the numbers that belong on a dashboard."""
        n = self.numbers
        return {
            f"{prefix}mean": n.mean_abs,
            f"{prefix}max": n.max_abs,
            f"{prefix}signed_mean": n.mean_signed,
            f"{prefix}tokens_compared": float(n.compared),
            f"{prefix}tokens_different": float(n.different),
            f"{prefix}tokens_missing": float(sum(sum(kinds.values()) for kinds in n.missing.values())),
            f"{prefix}k3": n.k3,
            f"{prefix}ratio_mean": n.ratio_mean,
        }

    def write(self, path: str | Path) -> None:
        """Write the table as Parquet, or JSONL by its name."""
        write_table(self.table, Path(path))

    def __str__(self) -> str:
        n = self.numbers
        lines = [
            f"gap: {self.verdict.status}: {self.verdict.summary}",
            f"  mean {n.mean_abs:.4g}, max {n.max_abs:.4g}, {n.different} of {n.compared} tokens differ",
        ]
        lines += [f"  {f.code}: {f.observed}" for f in self.verdict.findings]
        return "\n".join(lines)


def _array(values: Any, name: str) -> Array:
    """Return a numpy array of a numpy, torch or nested-list argument, without importing torch."""
    if hasattr(values, "detach"):
        values = values.detach()
        if "bfloat16" in str(getattr(values, "dtype", "")):
            values = values.float()
        values = values.cpu().numpy()
    try:
        return np.asarray(values)
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"{name}: {error}; pass rows of one length, padded where the mask is 0, or a list of rows"
        ) from None


def _ragged(values: Any) -> bool:
    return isinstance(values, list | tuple) and bool(len(values)) and hasattr(values[0], "__len__")


def make_table(
    logprobs_engine: Any, logprobs_trainer: Any, *, mask: Any = None, step: int = 0, **columns: Any
) -> GapTable:
    """Return a table from arrays [T], [B, T] or lists of rows of different length.

    Raises:
        UsageError: the shapes do not match, or a keyword is no column of the table.
    """
    known = schema()
    for name in columns:
        if name not in known:
            from zerogap.errors import nearest

            raise UsageError(f"compare: the gap table has no column {name!r}{nearest(name, known)}")
    given: dict[str, Any] = {"logprob_engine": logprobs_engine, "logprob_trainer": logprobs_trainer, **columns}
    if mask is not None:
        given["loss_mask"] = mask
    if _ragged(logprobs_engine):
        return _ragged_table(given, step)
    arrays = {name: _array(value, name) for name, value in given.items() if value is not None}
    shape = arrays["logprob_engine"].shape
    made: dict[str, Array] = {}
    for name, array in arrays.items():
        if array.ndim < len(shape) and array.shape in ((), shape[:1]):
            # One value for the call, or one for each row.
            array = np.broadcast_to(array if array.ndim == 0 else array[:, None], shape)
        if array.shape != shape:
            raise UsageError(
                f"compare: {name} has shape {array.shape}, logprobs_engine {shape}; one value per token is needed"
            )
        made[name] = array.reshape(-1)
    rows = shape if len(shape) == 2 else (1, int(np.prod(shape)))
    made.setdefault("sample", np.repeat(np.arange(rows[0]), rows[1]))
    made.setdefault("position", np.tile(np.arange(rows[1]), rows[0]))
    made.setdefault("step", np.full(int(np.prod(rows)), step))
    return _typed(made)


def _ragged_table(given: Mapping[str, Any], step: int) -> GapTable:
    rows = len(given["logprob_engine"])
    parts: dict[str, list[Array]] = {}
    for row in range(rows):
        engine = _array(given["logprob_engine"][row], "logprobs_engine")
        for name, values in given.items():
            if values is None:
                continue
            if len(values) != rows:
                raise UsageError(f"compare: {name} has {len(values)} rows, logprobs_engine {rows}")
            array = _array(values[row], name)
            if array.ndim == 0:
                array = np.broadcast_to(array, engine.shape)
            if array.shape != engine.shape:
                raise UsageError(
                    f"compare: row {row}: {name} has {array.shape[0] if array.ndim else 1} values, logprobs_engine "
                    f"{engine.shape[0]}"
                )
            parts.setdefault(name, []).append(array)
        parts.setdefault("sample", []).append(np.full(len(engine), row)) if "sample" not in given else None
        parts.setdefault("position", []).append(np.arange(len(engine))) if "position" not in given else None
        parts.setdefault("step", []).append(np.full(len(engine), step)) if "step" not in given else None
    return _typed({name: np.concatenate(arrays) for name, arrays in parts.items()})


def _typed(arrays: Mapping[str, Array]) -> GapTable:
    columns: dict[str, Array] = {}
    nulls: dict[str, Array] = {}
    for name, array in arrays.items():
        kind = schema()[name]
        if array.dtype == object and kind.type != "string":
            nulls[name] = np.array([v is None for v in array])
            array = np.array([np.nan if v is None else v for v in array], dtype=np.float64)
        if kind.type == "string" and name != "sample":
            columns[name] = array.astype(str).astype(object)
        elif name == "sample":
            columns[name] = array if array.dtype.kind in "iu" else array.astype(str).astype(object)
        else:
            columns[name] = np.ascontiguousarray(array, dtype=kind.dtype)
    return GapTable(columns, nulls, "compare")


def _report(table: GapTable, options: Options) -> GapReport:
    loaded = Loaded("compare", "arrays")
    add_tables([table], len(table), loaded)
    loaded.series = series_of_steps(loaded.accumulator.steps, "compare")
    verdict = judge(loaded, options)
    return GapReport(loaded.accumulator.numbers(), verdict, table)


def compare(
    logprobs_engine: Any,
    logprobs_trainer: Any,
    *,
    mask: Any = None,
    step: int = 0,
    gpu: str | None = None,
    model: str | None = None,
    baseline: str | None = None,
    contract: str | None = None,
    noise_floor: float | None = None,
    **columns: Any,
) -> GapReport:
    """Compare the log-probs of both sides for the same tokens.

    Args:
        logprobs_engine: nats, as recorded when the tokens were sampled: numpy or torch [T], [B, T], or a list of rows.
        logprobs_trainer: the trainer's values for the same tokens, same shape.
        mask: true or 1 = trained token; every token by default.
        step: training step, kept in the table.
        gpu, model, baseline: choose the healthy range (``zerogap gap --baselines`` lists them).
        contract: name of the bit-exact contract that should hold, if one does.
        noise_floor: mean abs(d) that numerics alone give here, if known.
        **columns: further columns of the table (``token_id``, ``temperature``, ``kept_mass``, ``cached_tokens``, ...).

    Raises:
        UsageError: shapes that do not match.
    """
    table = make_table(logprobs_engine, logprobs_trainer, mask=mask, step=step, **columns)
    return _report(table, Options(gpu, model, baseline, contract, floor=noise_floor))


class Recorder:
    """Collects steps of a loop; ``report()`` judges them together, ``write()`` makes the table that the command reads.

    Memory grows with the tokens recorded, about 50 bytes each; ``limit`` keeps the newest steps within it.
    """

    def __init__(self, limit: int = 20_000_000) -> None:
        self._limit = limit
        self._tables: list[GapTable] = []
        self._tokens = 0

    def add(
        self, logprobs_engine: Any, logprobs_trainer: Any, *, step: int, mask: Any = None, **columns: Any
    ) -> GapReport:
        """Record one batch and return its report; arguments as in ``compare``."""
        table = make_table(logprobs_engine, logprobs_trainer, mask=mask, step=step, **columns)
        self._tables.append(table)
        self._tokens += len(table)
        while self._tokens > self._limit and len(self._tables) > 1:
            self._tokens -= len(self._tables.pop(0))
        return _report(table, Options())

    @property
    def tokens(self) -> int:
        """Tokens held."""
        return self._tokens

    def table(self) -> GapTable:
        """Return all recorded rows.

        Raises:
            UsageError: nothing was recorded.
        """
        if not self._tables:
            raise UsageError("Recorder: nothing was recorded yet; call add() in the loop")
        return concatenate(self._tables, "recorder")

    def report(self, **options: Any) -> GapReport:
        """Judge everything recorded; keywords as the fields of ``judge.Options``."""
        return _report(self.table(), Options(**options))

    def write(self, path: str | Path) -> None:
        """Write the table as Parquet, or JSONL by its name; whole or not at all."""
        write_table(self.table(), Path(path))
