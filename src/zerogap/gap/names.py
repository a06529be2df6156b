"""Which quantity a metric name stands for, from ``metric_names.toml``: one table for every framework, no code."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

# Quantities of the gap itself; the rest (lr, reward, ...) stands beside it.
GAP_QUANTITIES = frozenset(
    [
        "abs_mean",
        "abs_max",
        "abs_min",
        "abs_std",
        "k1",
        "k2",
        "k3",
        "k3_max",
        "k3_reverse",
        "ess",
        "clip_share",
        "ratio_mean",
        "ratio_max",
        "ratio_min",
        "chi2",
        "js",
        "mult_prob_error",
        "seq_mult_prob_error",
        "prob_abs_mean",
        "prob_abs_max",
        "prob_abs_std",
        "prob_pearson",
        "log_ppl_abs",
        "over_1e6_share",
        "different",
        "compared",
        "trainer_trainer_kl",
    ]
)
# One number per step that a range can be put on, the most telling first.
JUDGED = ("abs_mean", "k3", "mult_prob_error", "k1", "k2", "abs_max", "prob_abs_mean", "log_ppl_abs")


@dataclass(frozen=True)
class Metric:
    """One known metric: the names it goes by and its exact definition."""

    names: tuple[str, ...]
    quantity: str
    formula: str
    frameworks: tuple[str, ...] = ()
    trap: str = ""
    source: str = ""
    exact: bool = False


@cache
def metrics() -> tuple[Metric, ...]:
    """Return every known metric."""
    text = resources.files("zerogap.gap").joinpath("metric_names.toml").read_text(encoding="utf-8")
    return tuple(
        Metric(
            tuple(entry["names"]),
            entry["quantity"],
            entry["formula"],
            tuple(entry.get("frameworks", ())),
            entry.get("trap", ""),
            entry.get("source", ""),
            entry.get("exact", False),
        )
        for entry in tomllib.loads(text)["metric"]
    )


@cache
def _by_name() -> tuple[dict[str, Metric], dict[str, Metric]]:
    anywhere: dict[str, Metric] = {}
    exact: dict[str, Metric] = {}
    for metric in metrics():
        for name in metric.names:
            (exact if metric.exact else anywhere).setdefault(name.lower(), metric)
    return anywhere, exact


@cache
def metric_for(name: str) -> Metric | None:
    """Return what ``name`` means, trying it whole and then behind its path parts, or None."""
    anywhere, exact = _by_name()
    key = name.strip().strip("'\"").lower().replace(" ", "_")
    if key in exact:
        return exact[key]
    while True:
        if key in anywhere:
            return anywhere[key]
        if "/" not in key:
            return None
        key = key.split("/", 1)[1]


_GAP_COLUMN = re.compile(r"(?:^|_)(?:gap|abs_?diff|logprob_diff)(?:_|$)", re.IGNORECASE)


def run_label(name: str) -> str | None:
    """Return the run a column such as ``gap_sleep_on`` speaks of, or None if it is no gap column."""
    if metric_for(name) is not None or "/" in name or not _GAP_COLUMN.search(name):
        return None
    if re.search(r"max|min|std|kl|ratio", name, re.IGNORECASE):
        return None
    return _GAP_COLUMN.sub("_", name).strip("_ ") or None


@cache
def hint_fragments() -> tuple[bytes, ...]:
    """Return short byte strings, one of which stands in every log line that holds a gap metric.

    They are few, since each is searched through the whole log. ``also`` names come only beside one that has a fragment.
    """
    fragments = (b"prob", b"diff", b"kl", b"gap", b"rollout_corr", b"behave_")
    also = (b"ois", b"tis", b"tis_clipfrac", b"ess_ratio", b"importance_sampling_ratio", b"sampling_importance_ratio",
            b"js_divergence_error", b"token_count", b"tokens_compared", b"mismatch_count",
            b"tis_token_clip")  # fmt: skip
    named = [n.lower().encode() for m in metrics() if m.quantity in GAP_QUANTITIES for n in m.names]
    missing = [n for n in named if not any(part in n for part in (*fragments, *also))]
    return (*fragments, *missing)


@cache
def known_name_pattern() -> re.Pattern[bytes]:
    """Return a pattern that finds the last part of any gap metric's name: the second, exact look at a line."""
    tails = {n.lower().encode() for m in metrics() if m.quantity in GAP_QUANTITIES for n in m.names}
    words = sorted({re.escape(t) for t in tails} | {re.escape(t.replace(b"_", b" ")) for t in tails if b"_kl" in t})
    return re.compile(rb"(?i)(?<![a-z0-9])(?:" + b"|".join(words) + rb")(?![a-z0-9])")
