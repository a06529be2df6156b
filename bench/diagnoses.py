"""Recall and false alarms of every diagnosis, on real log-probs of a small model with real faults.

The rows come from ``bench/data/smollm2.parquet`` (made by ``bench/make_noise.py``): log-probs of the same tokens in
float32 and bfloat16 and under forward passes that carry one fault. A trial draws whole sequences of one half of the
prompts, pairs the columns of the two sides, and asks what is found. The thresholds were set on the even prompts with
seeds below 1000; what is printed is measured on the odd prompts with seeds from 1000.

    python bench/diagnoses.py [--trials 60] [--half calibrate|measure]
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from zerogap.gap.judge import Options, Verdict, judge
from zerogap.gap.readers.loaded import Loaded, add_tables
from zerogap.gap.series import Series, series_of_steps
from zerogap.gap.table import GapTable

DATA = Path(__file__).parent / "data" / "smollm2.parquet"
SEQUENCES = 32  # sequences of one trial
NOISE = (0.4, 1.0)  # of bf16 against float32: 0.4 gives the mean of a good GPU setup


class Rows:
    """The measured columns, cut into sequences, of one half of the prompts."""

    def __init__(self, half: str) -> None:
        table = pq.read_table(DATA)
        prompts = table.column("prompt").to_numpy()
        keep = np.flatnonzero(prompts % 2 == (1 if half == "measure" else 0))
        self.columns = {name: table.column(name).to_numpy()[keep] for name in table.column_names}
        sample = self.columns["sample"]
        starts = np.flatnonzero(np.r_[True, sample[1:] != sample[:-1]])
        self.spans = list(zip(starts, np.append(starts[1:], len(sample)), strict=True))

    def draw(self, rng: np.random.Generator, count: int = SEQUENCES) -> Draw:
        """Take sequences with replacement."""
        chosen = rng.integers(len(self.spans), size=count)
        rows = np.concatenate([np.arange(*self.spans[i]) for i in chosen])
        lengths = [self.spans[i][1] - self.spans[i][0] for i in chosen]
        return Draw(self, rng, rows, np.repeat(np.arange(count), lengths), float(rng.choice(NOISE)))


class Draw:
    """One trial's tokens: any column at the drawn rows, with the noise of the trial."""

    def __init__(self, rows: Rows, rng: np.random.Generator, index: np.ndarray, sample: np.ndarray, noise: float):
        self.rng, self.index, self.sample, self.noise, self._rows = rng, index, sample, noise, rows
        self.position = self["position"]
        self.count = int(sample.max()) + 1

    def __getitem__(self, name: str) -> np.ndarray:
        return self._rows.columns[name][self.index]

    def noisy(self, base: np.ndarray) -> np.ndarray:
        """Put the trial's share of the real bf16 error on a column."""
        return (base + self.noise * (self["lp_bf16"].astype(np.float64) - self["lp_fp32"])).astype(np.float32)

    def table(
        self, engine: np.ndarray | None = None, trainer: np.ndarray | None = None, **more: np.ndarray
    ) -> GapTable:
        """Make the table; bf16 engine against float32 trainer unless said otherwise."""
        columns = {
            "step": np.zeros(len(self.index), dtype=np.int64),
            "sample": self.sample.astype(np.int64),
            "position": self.position.astype(np.int64),
            "token_id": self["token_id"].astype(np.int64),
            "logprob_engine": np.minimum(self.noisy(self["lp_fp32"]) if engine is None else engine, 0).astype(
                np.float32
            ),
            "logprob_trainer": (self["lp_fp32"] if trainer is None else trainer).astype(np.float32),
            **more,
        }
        return GapTable(columns)

    def some(self, share: float) -> np.ndarray:
        """Rows of a share of the sequences."""
        bad = self.rng.permutation(self.count) < max(1, round(share * self.count))
        return bad[self.sample]


Made = GapTable | list[Series]
Maker = Callable[[Draw], Made]
FAULTS: dict[str, tuple[str, Maker, dict[str, object]]] = {}


def fault(name: str, cause: str, **options: object) -> Callable[[Maker], Maker]:
    """Register a maker under a name with the cause that must be found."""

    def register(maker: Maker) -> Maker:
        FAULTS[name] = (cause, maker, options)
        return maker

    return register


def _sampler(name: str) -> Maker:
    return lambda d: d.table(
        d[f"{name}_engine"],
        (d[f"{name}_trainer"]),
        token_id=d[f"{name}_token"].astype(np.int64),
    )


for _name in ("top_p0.7", "top_p0.8", "top_p0.9", "top_p0.95", "top_k20", "min_p0.05"):
    FAULTS[f"truncation {_name}"] = ("sampler/truncation", _sampler(_name), {})
for _name in ("t0.6", "t0.8", "t1.2"):
    FAULTS[f"temperature {_name} on the engine"] = ("sampler/temperature", _sampler(_name), {})
    FAULTS[f"temperature {_name} on the trainer"] = (
        "sampler/temperature",
        lambda d, n=_name: d.table(d[f"{n}_trainer"], d[f"{n}_engine"], token_id=d[f"{n}_token"].astype(np.int64)),
        {},
    )
for _name in ("penalty1.1", "penalty1.2"):
    FAULTS[_name] = ("sampler/penalties", _sampler(_name), {})


@fault("kept sets known, top_p 0.8", "sampler/truncation")
def kept_known(d: Draw) -> Made:
    return d.table(d["top_p0.8_engine"], d["top_p0.8_trainer"], kept_mass=d["top_p0.8_mass"])


def _shift(values: np.ndarray, sample: np.ndarray, by: int) -> np.ndarray:
    moved = np.roll(values, -by)
    edge = np.roll(sample, -by) != sample
    moved[edge] = values[edge]
    return moved


for _by in (-1, 1):
    FAULTS[f"shift by {_by:+d}"] = (
        "inputs-differ/off-by-one",
        lambda d, by=_by: d.table(trainer=_shift(d["lp_fp32"], d.sample, by)),
        {},
    )


@fault("retokenised in a tenth of the sequences", "inputs-differ/retokenised")
def retokenised(d: Draw) -> Made:
    ids = d["token_id"].astype(np.int64)
    engine = np.where(d.some(0.1) & (d.position > 20), ids + 1, ids)
    return d.table(engine_token_id=engine)


@fault("other chat template", "inputs-differ/context")
def template(d: Draw) -> Made:
    return d.table(trainer=d["lp_template"])


@fault("packing leak, place in pack known", "inputs-differ/packing")
def packing(d: Draw) -> Made:
    place = (d.sample % 4).astype(np.int64)
    return d.table(trainer=np.where(place > 0, d["lp_packed"], d["lp_fp32"]), pack_row=place)


@fault("label at context-parallel borders", "inputs-differ/cp-boundary")
def cp(d: Draw) -> Made:
    length = np.bincount(d.sample)[d.sample]
    chunk = np.maximum(length // 4, 1)
    border = ((d.position + 1) % chunk == 0) & (d.position + 1 < length)
    wrong = d["lp_fp32"] - d.rng.uniform(3, 12, len(d.index))
    return d.table(trainer=np.where(border, wrong, d["lp_fp32"]))


@fault("rotary scaling beyond a window", "inputs-differ/positions")
def rope_window(d: Draw) -> Made:
    return d.table(trainer=np.where(d.position >= 50, d["lp_rope_10k"], d["lp_fp32"]))


@fault("rotary base 10k for 100k, short text", "weights-differ/elevated")
def rope(d: Draw) -> Made:
    return d.table(trainer=d["lp_rope_10k"])


@fault("left padding is attended to", "inputs-differ/left-pad")
def left_pad(d: Draw) -> Made:
    bare = d.some(0.25)  # every micro-batch has a longest row without padding
    pads = np.where(bare, 0, np.maximum(d["left_pad"], 1)).astype(np.int64)
    return d.table(trainer=np.where(bare, d["lp_fp32"], d["lp_left_pad"]), left_pad=pads)


@fault("half of the sequences from another prompt", "inputs-differ/some-sequences")
def some(d: Draw) -> Made:
    return d.table(trainer=np.where(d.some(0.3), d["lp_template"] - 0.5, d["lp_fp32"]))


def _steps(d: Draw, trainer_of: Callable[[int], np.ndarray], steps: int = 12) -> Made:
    """A run over steps, each with its own sequences of the draw; judged from its averages alone."""
    made: dict[tuple[str, int], object] = {}
    loaded = Loaded("run")
    for step in range(steps):
        part = d._rows.draw(d.rng)
        part.noise = d.noise
        table = part.table(trainer=part[trainer_of(step)] if isinstance(trainer_of(step), str) else trainer_of(step))
        table.columns["step"][:] = step
        add_tables([table], len(table), loaded)
    made.update(loaded.accumulator.steps)
    return series_of_steps(made, "run")


@fault("weights not synced (one update at 1e-4)", "weights-differ/not-synced")
def stale(d: Draw) -> Made:
    first = int(d.rng.integers(1, 8))
    d.noise = 0.4
    return _steps(d, lambda step: "lp_updated_1e-4" if step >= first else "lp_fp32")


@fault("gap grows from a good first step", "stale-state/growing")
def growing(d: Draw) -> Made:
    slope = d.rng.uniform(0.0005, 0.0012)
    steps = np.arange(0, 31)
    values = 0.011 + slope * steps + d.rng.normal(0, 0.0012, len(steps))
    return [Series("run", steps, {"abs_mean": values}, {"abs_mean": "gap"})]


@fault("grows at learning rate 0", "stale-state/growing-at-lr0")
def growing_lr0(d: Draw) -> Made:
    (series,) = growing(d)  # type: ignore[misc]
    series.values["lr"] = np.zeros(len(series))
    return [series]


@fault("grows and resets with the engine", "stale-state/prefix-cache")
def saw_tooth(d: Draw) -> Made:
    steps = np.arange(0, 30)
    values = 0.012 + 0.004 * (steps % 10) + d.rng.normal(0, 0.0008, len(steps))
    return [Series("run", steps, {"abs_mean": values}, {"abs_mean": "gap"})]


@fault("resumed on other weights", "weights-differ/resumed-on-base")
def resumed(d: Draw) -> Made:
    steps = np.arange(120, 140)
    values = 0.013 + d.rng.normal(0, 0.001, len(steps))
    values[0] = d.rng.uniform(0.3, 2.0)
    return [Series("run", steps, {"abs_mean": values}, {"abs_mean": "gap"})]


@fault("wrong layout after a sync", "weights-differ/layout")
def layout(d: Draw) -> Made:
    steps = np.arange(0, 8)
    values = 0.015 + d.rng.normal(0, 0.001, len(steps))
    values[3:] = d.rng.uniform(3.8, 7.0)
    return [Series("run", steps, {"abs_mean": values}, {"abs_mean": "gap"})]


@fault("4-bit engine weights", "weights-differ/elevated")
def int4(d: Draw) -> Made:
    return d.table(engine=d["lp_int4"])


@fault("fp8 engine weights, noise floor stated", "weights-differ/elevated", floor=0.012)
def fp8(d: Draw) -> Made:
    d.noise = 0.3
    return d.table(engine=d.noisy(d["lp_fp8"]))


@fault("prefix cache kept over an update", "stale-state/prefix-cache")
def prefix(d: Draw) -> Made:
    hit = d.some(0.5)
    trainer = np.where(hit, d["lp_stale_kv_updated_1e-4"], d["lp_updated_1e-4"])
    return d.table(d.noisy(d["lp_updated_1e-4"]), trainer, cached_tokens=np.where(hit, d["prompt_length"], 0).astype(
        np.int64))  # fmt: skip


@fault("other log-softmax, contract", "numerics/log-softmax", contract="c")
def log_softmax(d: Draw) -> Made:
    return d.table(d["lp_fp32"], d["lp_other_lse"])


@fault("one op in another dtype, contract", "numerics/dtype-or-kernel", contract="c")
def dtype(d: Draw) -> Made:
    d.noise = 0.02
    return d.table()


@fault("bf16 log-softmax on the trainer", "numerics/bf16-logits")
def grid(d: Draw) -> Made:
    return d.table(trainer=d["lp_bf16_softmax"])


@fault("trainer against itself", "numerics/trainer-not-batch-invariant")
def second(d: Draw) -> Made:
    return d.table(logprob_trainer_second=d["lp_bf16"])


@fault("shared-prefix batches", "numerics/cascade-attention")
def cascade(d: Draw) -> Made:
    shared = d.some(0.5)
    engine = np.where(shared, d["lp_updated_1e-4"], d.noisy(d["lp_fp32"]))
    d.noise = 0.4
    return d.table(engine, batch_shared_prefix=np.where(shared, 64, 0).astype(np.int64))


@fault("retracted requests", "numerics/retract-routes")
def retract(d: Draw) -> Made:
    d.noise = 0.4
    hit = d.some(0.3) & (d.position < 60)
    at = np.where(d.some(0.3) | hit, 60, 0)
    engine = np.where((at > 0) & (d.position < at), d["lp_updated_1e-4"], d.noisy(d["lp_fp32"]))
    return d.table(engine, retracted_at=at.astype(np.int64))


@fault("two kinds of hosts", "numerics/hosts-differ")
def hosts(d: Draw) -> Made:
    bad = d.some(0.5)
    d.noise = 0.3
    low = d.noisy(d["lp_fp32"])
    d.noise = 1.0
    return d.table(np.where(bad, d.noisy(d["lp_fp32"]), low), host=np.where(bad, "L20", "H20").astype(object))


@fault("NaN in a hundredth of the tokens", "metric-broken/missing-logprobs")
def nan(d: Draw) -> Made:
    made = d.table()
    made.columns["logprob_engine"][d.rng.random(len(made)) < 0.01] = np.nan
    return made


@fault("sentinel -9999", "metric-broken/padded-logprobs")
def sentinel(d: Draw) -> Made:
    made = d.table()
    made.columns["logprob_engine"][d.rng.random(len(made)) < 0.01] = -9999
    return made


@fault("tail filled with 0.0", "metric-broken/padded-logprobs")
def zero_tail(d: Draw) -> Made:
    length = np.bincount(d.sample)[d.sample]
    made = d.table()
    made.columns["logprob_engine"][d.some(0.2) & (d.position >= length - 6)] = 0.0
    return made


@fault("padding in the mask", "metric-broken/pad-in-mask")
def pad_mask(d: Draw) -> Made:
    length = np.bincount(d.sample)[d.sample]
    return d.table(real_length=np.where(d.some(0.2), length - 9, length).astype(np.int64))


@fault("five tokens make the mean", "metric-broken/outlier-dominated")
def outliers(d: Draw) -> Made:
    d.noise = 0.02
    made = d.table()
    made.columns["logprob_trainer"][d.rng.choice(len(made), 5, replace=False)] -= 50
    return made


@fault("logged exactly 0.0", "metric-broken/exact-zero")
def exact_zero(d: Draw) -> Made:
    return [Series("run", np.arange(20), {"abs_mean": np.zeros(20)}, {"abs_mean": "gap"})]


@fault("NaN logged", "metric-broken/nan-masked")
def nan_logged(d: Draw) -> Made:
    values = 0.014 + d.rng.normal(0, 0.001, 20)
    values[7] = np.nan
    return [Series("run", np.arange(20), {"abs_mean": values}, {"abs_mean": "gap"}, {"abs_mean": [7]})]


@fault("maximum at its cap", "metric-broken/clipped-metric")
def capped(d: Draw) -> Made:
    values = {"abs_mean": 0.014 + d.rng.normal(0, 0.001, 20), "ratio_max": np.full(20, 2.0)}
    return [Series("run", np.arange(20), values, {"abs_mean": "gap"})]


def clean(d: Draw) -> Made:
    """A healthy table, with the columns that the diagnoses look at, or a healthy series."""
    kind = int(d.rng.integers(6))
    if kind == 5:
        values = d.rng.normal(0.0148, 0.0006, 40) * np.linspace(1, d.rng.uniform(0.6, 1.2), 40)
        return [Series("run", np.arange(40), {"abs_mean": values}, {"abs_mean": "gap"})]
    length = np.bincount(d.sample)[d.sample]
    cold = d.some(0.5)
    more = {
        "cached_tokens": np.where(cold, 0, d["prompt_length"]).astype(np.int64),
        "left_pad": d["left_pad"].astype(np.int64),
        "pack_row": (d.sample % 4).astype(np.int64),
        "host": np.where(d.some(0.5), "a", "b").astype(object),
        "batch_shared_prefix": np.where(d.some(0.5), 40, 0).astype(np.int64),
        "retracted_at": np.where(d.some(0.3), 40, 0).astype(np.int64),
        "real_length": length.astype(np.int64),
        "engine_token_id": d["token_id"].astype(np.int64),
        "prompt_length": d["prompt_length"].astype(np.int64),
    }
    if kind in (1, 2):
        return d.table(**more)
    if kind == 3:  # the roles turned round
        return d.table(d["lp_fp32"], d.noisy(d["lp_fp32"]), **more)
    return d.table()


def verdict_of(made: Made, options: dict[str, object]) -> Verdict:
    """Judge what a maker made."""
    loaded = Loaded("trial")
    if isinstance(made, GapTable):
        add_tables([made], len(made), loaded)
        loaded.series = series_of_steps(loaded.accumulator.steps, "trial")
    else:
        loaded.series = made
    return judge(loaded, Options(contract=options.get("contract"), floor=options.get("floor")))  # type: ignore[arg-type]


def alarms(verdict: Verdict) -> set[str]:
    """Names of findings that claim something is wrong."""
    return {f.name for f in verdict.findings if f.level in ("fault", "warn")}


def trials(rows: Rows, maker: Maker, count: int, seed: int) -> Iterator[Made]:
    for number in range(count):
        yield maker(rows.draw(np.random.default_rng(seed + number)))


def measure(half: str, count: int, only: str = "") -> tuple[dict[str, tuple[float, Counter[str]]], Counter[str], int]:
    """Return ({fault: (recall, other alarms)}, false alarms on clean tables by cause, clean trials)."""
    rows = Rows(half)
    seed = 1000 if half == "measure" else 0
    results = {}
    for name, (cause, maker, options) in FAULTS.items():
        if only not in name:
            continue
        hits, others = 0, Counter[str]()
        for made in trials(rows, maker, count, seed):
            found = alarms(verdict_of(made, options))
            hits += cause in found
            others.update(found - {cause})
        results[name] = (hits / count, others)
    false: Counter[str] = Counter()
    total = 5 * count
    for made in trials(rows, clean, total, seed + 100_000):
        false.update(alarms(verdict_of(made, {})))
    return results, false, total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--half", choices=("calibrate", "measure"), default="measure")
    parser.add_argument("--only", default="", help="faults whose name contains this")
    arguments = parser.parse_args()
    results, false, total = measure(arguments.half, arguments.trials, arguments.only)
    print(f"{arguments.half} half, {arguments.trials} trials a fault, {total} clean trials\n")
    print(f"{'fault':<44} {'recall':>6}  {'cause':<36} {'false alarms':>12}  also said")
    for name, (recall, others) in results.items():
        cause = FAULTS[name][0]
        also = ", ".join(f"{n} {c / arguments.trials:.0%}" for n, c in others.most_common(3))
        print(f"{name:<44} {recall:>6.2f}  {cause:<36} {false[cause] / total:>12.3f}  {also}")
    extra = {name: count for name, count in false.items() if name not in {FAULTS[f][0] for f in results}}
    for name, count in sorted(extra.items()):
        print(f"{'(clean)':<44} {'':>6}  {name:<36} {count / total:>12.3f}")


if __name__ == "__main__":
    main()
