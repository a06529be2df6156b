"""Builds the report: everything in one file, no script, a strict policy, and all text treated as hostile."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from matplotlib.figure import Figure

from zerogap import __version__
from zerogap.console import printable
from zerogap.gap.diagnoses.context import Context
from zerogap.gap.judge import Verdict
from zerogap.gap.numbers import Numbers
from zerogap.gap.readers import Loaded
from zerogap.gap.readers.loaded import Rollout
from zerogap.gap.series import Series
from zerogap.report import plots
from zerogap.report.check import machine_facts, read_check
from zerogap.report.probe import read_probe
from zerogap.report.text import clean
from zerogap.report.tokens import shade, token_texts

ROLLOUTS, ROLLOUT_TOKENS = 12, 600


@dataclass(frozen=True)
class Image:
    """One figure of the page: a data address and what it shows."""

    source: str
    text: str


def build(verdict: Verdict, loaded: Loaded) -> str:
    """Return the HTML of a report."""
    package = resources.files("zerogap.report")
    style = package.joinpath("style.css").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(package.joinpath("page.html.jinja").read_text(encoding="utf-8"))
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return template.render(
        title=clean(Path(verdict.label).name or verdict.label),
        style=jinja2.utils.markupsafe.Markup(style),
        style_hash=f"sha256-{digest}",
        verdict=verdict,
        version=__version__,
        cards=_cards(verdict),
        figures=list(_figures(verdict, loaded)),
        numbers=_numbers(verdict.numbers),
        profiles=[p for p in verdict.profiles.values() if len(p.rows) > 1],
        check=read_check(loaded.folder),
        probe=read_probe(loaded.folder),
        rollouts=_rollouts(loaded),
        configuration=_configuration(loaded),
        notes=[clean(note) for note in dict.fromkeys(verdict.notes)],
    )


def _number(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.4g}"


def _cards(verdict: Verdict) -> list[tuple[str, str]]:
    cards: list[tuple[str, str]] = []
    n = verdict.numbers
    if n is not None and n.compared:
        cards += [("mean abs(d), nats", _number(n.mean_abs)), ("max abs(d), nats", _number(n.max_abs)),
                  ("tokens that differ", f"{n.different:,}"), ("tokens compared", f"{n.compared:,}")]  # fmt: skip
    elif verdict.value is not None:
        cards.append((f"{verdict.quantity}, median over steps", _number(verdict.value)))
    series = next((s for s in verdict.series if s.judged()), None)
    if series is not None:
        cards.append(("steps", f"{len(series):,}"))
        for name, title in (("reward", "last reward"), ("eval", "last evaluation")):
            if name in series.values:
                _, values = series.finite(name)
                if len(values):
                    cards.append((title, _number(float(values[-1]))))
    return cards


def _image(figure: Figure, text: str) -> Image:
    data = base64.b64encode(plots.svg(figure).encode()).decode()
    return Image(f"data:image/svg+xml;base64,{data}", text)


def _all_series(verdict: Verdict, loaded: Loaded) -> list[Series]:
    return [*verdict.series, *loaded.other.values()]


def _figures(verdict: Verdict, loaded: Loaded) -> list[Image]:
    made: list[Image] = []
    series = _all_series(verdict, loaded)
    wanted = (
        ("reward", "Reward", "reward"), ("eval", "Evaluation", "score"), ("abs_mean", "Gap: mean abs(d)", "nats"),
        ("abs_max", "Gap: max abs(d)", "nats"), ("different", "Gap: tokens that differ", "tokens"),
        ("k3", "Gap: k3 KL", "nats"), ("mult_prob_error", "Gap: E[exp|d|]", "ratio"),
        ("prob_abs_mean", "Gap of probabilities", "probability"), ("throughput", "Throughput", "tokens per second"),
        ("response_length", "Response length", "tokens"),
    )  # fmt: skip
    for quantity, title, unit in wanted:
        lines = _distinct(plots.gap_lines(series, quantity))
        if lines:
            band = plots.band_of(verdict) if quantity == verdict.quantity else None
            made.append(_image(plots.curve(title, unit, lines[:5], band), f"{title} over steps"))
    if loaded.has_tokens and loaded.table is not None:
        context = Context(loaded.table)
        if len(context.rows):
            made.append(_image(plots.scatter(context), "Engine log-probs against trainer log-probs of the same tokens"))
            for name in ("position", "probability", "turn", "staleness", "host"):
                profile = verdict.profiles.get(name)
                if profile is not None and (len(profile.rows) > 1 or name == "position"):
                    made.append(_image(plots.bars(profile, f"gap by {name}"), f"Mean gap by {name}"))
            made.append(_image(plots.samples(context), "Mean gap of each sample"))
    return made


def _distinct(lines: Sequence[tuple[str, np.ndarray, np.ndarray]]) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Drop lines without a single number, and a log's copy of what the tokens gave."""
    kept: list[tuple[str, np.ndarray, np.ndarray]] = []
    for line in lines:
        if np.isfinite(line[2]).any() and not any(len(k[1]) == len(line[1]) and k[0] == line[0] for k in kept):
            kept.append(line)
    return kept


def _numbers(n: Numbers | None) -> list[tuple[str, str]]:
    if n is None or not n.tokens:
        return []
    missing = ", ".join(
        f"{side} {kind} {count:,}" for side, kinds in n.missing.items() for kind, count in kinds.items()
    )
    rows = [
        ("Tokens", f"{n.tokens:,} ({n.compared:,} compared, {n.masked_out:,} masked out)"),
        ("Different in bits", f"{n.different:,} ({n.different_share:.2%})" if n.compared else "-"),
        ("Missing, not averaged in", missing or "none"),
        ("Mean d (trainer - engine)", _number(n.mean_signed)),
        ("Quantiles of abs(d)", ", ".join(f"{k} {v:.3g}" for k, v in n.quantiles.items()) or "-"),
        ("Share over 0.1", _number(n.share_over_0_1)),
        ("KL k1, k2, k3", f"{_number(n.k1)}, {_number(n.k2)}, {_number(n.k3)}"),
        ("Importance ratio mean, min, max", f"{_number(n.ratio_mean)}, {_number(n.ratio_min)}, {_number(n.ratio_max)}"),
        ("Effective sample size share", _number(n.ess_share)),
        ("Clip share below 0.8, above 1.2", f"{_number(n.clip_low_share)}, {_number(n.clip_high_share)}"),
        ("Sequences, mean log-ratio (min, max)", f"{n.sequences:,}, {_number(n.sequence_log_ratio_mean)} "
         f"({_number(n.sequence_log_ratio_min)}, {_number(n.sequence_log_ratio_max)})"),
    ]  # fmt: skip
    if n.kept_mass_tokens:
        rows.append(("Sampler part, numerics part", f"{_number(n.sampler_part)}, {_number(n.numerics_part)}"))
        if n.kept_replayed_share:
            rows.append(("Kept sets replayed by the trainer", f"{n.kept_replayed_share:.0%} of the tokens; "
                         f"without it a sampler part of {_number(n.log_kept_mass_mean)}"))  # fmt: skip
    return rows


def _configuration(loaded: Loaded) -> list[tuple[str, str]]:
    made: list[tuple[str, str]] = []
    if loaded.folder is not None:
        for name in ("config.toml", "numerics.json", "machine.json", "incident.json"):
            try:
                text = (loaded.folder / name).read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            made.append((name, clean(text)))
    machine = machine_facts(loaded.folder)
    if machine:
        made.append(("machine, as checked before the run", clean(machine)))
    facts = {k: v for k, v in loaded.facts.items() if not k.startswith("config.")}
    if facts:
        made.append(("facts found in the source", clean("\n".join(f"{k} = {v}" for k, v in sorted(facts.items())))))
    return made


def _rollouts(loaded: Loaded) -> list[dict[str, Any]]:
    chosen = _choose(loaded.rollouts)
    model = loaded.facts.get("config.model.path")
    texts = token_texts(str(model)) if chosen and isinstance(model, str) else {}
    made = []
    for rollout in chosen:
        tokens = []
        for index in range(min(len(rollout.engine), ROLLOUT_TOKENS)):
            engine, trainer = (
                rollout.engine[index],
                rollout.trainer[index] if index < len(rollout.trainer) else math.nan,
            )
            level = shade(engine, trainer)
            number = rollout.token_ids[index] if index < len(rollout.token_ids) else None
            text = texts.get(number, "") if number is not None else ""
            text = text or (f" {number} " if number is not None else f" {index} ")
            gap = (
                "no number"
                if level is None
                else f"engine {engine:.6g}, trainer {trainer:.6g}, d {trainer - engine:+.3g}"
            )
            tokens.append((printable(text), "gx" if level is None else f"g{level}", gap))
        made.append(
            {
                "step": rollout.step,
                "sample": clean(rollout.sample),
                "reward": None if math.isnan(rollout.reward) else rollout.reward,
                "prompt": clean(rollout.prompt),
                "text": clean(rollout.text),
                "tokens": tokens,
                "texts_known": bool(texts),
                "more": max(0, len(rollout.engine) - ROLLOUT_TOKENS),
            }
        )
    return made


def _choose(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Take the worst by mean gap, and first and last of the run beside them."""

    def gap(rollout: Rollout) -> float:
        sizes = [abs(b - a) for a, b in zip(rollout.engine, rollout.trainer, strict=False)
                 if math.isfinite(a) and math.isfinite(b)]  # fmt: skip
        return sum(sizes) / len(sizes) if sizes else 0.0

    worst = [r for r in sorted(rollouts, key=gap, reverse=True)[: ROLLOUTS // 2] if gap(r) > 0]
    spread = [rollouts[i] for i in np.linspace(0, len(rollouts) - 1, ROLLOUTS).astype(int)] if rollouts else []
    kept: list[Rollout] = []
    for rollout in [*worst, *spread]:
        if all(rollout is not other for other in kept) and len(kept) < ROLLOUTS:
            kept.append(rollout)
    return kept
