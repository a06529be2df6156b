"""What the accumulator counts: the numbers of all tokens, of one step, and profiles over groups."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Profile:
    """Mean abs(d) over groups of tokens, such as by position: label -> (tokens, mean abs(d), signed mean)."""

    name: str
    rows: list[tuple[str, int, float, float]] = field(default_factory=list)


@dataclass
class Numbers:
    """What is known about the gap of a set of tokens. ``d = logprob_trainer - logprob_engine``, in nats."""

    tokens: int = 0
    masked_out: int = 0
    compared: int = 0
    missing: dict[str, dict[str, int]] = field(default_factory=dict)
    mean_abs: float = math.nan
    max_abs: float = math.nan
    mean_signed: float = math.nan
    std: float = math.nan
    different: int = 0
    different_share: float = math.nan
    quantiles: dict[str, float] = field(default_factory=dict)
    share_over_0_1: float = math.nan
    k1: float = math.nan
    k2: float = math.nan
    k3: float = math.nan
    k3_clamped: float = math.nan
    ratio_mean: float = math.nan
    ratio_min: float = math.nan
    ratio_max: float = math.nan
    ess_share: float = math.nan
    clip_low_share: float = math.nan
    clip_high_share: float = math.nan
    exp_clamped: int = 0
    sequences: int = 0
    sequence_mean_abs: float = math.nan
    sequence_log_ratio_mean: float = math.nan
    sequence_log_ratio_min: float = math.nan
    sequence_log_ratio_max: float = math.nan
    sampler_part: float = math.nan
    log_kept_mass_mean: float = math.nan
    numerics_part: float = math.nan
    numerics_mean_abs: float = math.nan
    kept_mass_mean: float = math.nan
    kept_mass_tokens: int = 0
    kept_replayed_share: float = math.nan
    quantiles_exact: bool = True

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


@dataclass
class StepNumbers:
    """The numbers of one step of one run."""

    tokens: int = 0
    compared: int = 0
    sum_abs: float = 0.0
    sum_signed: float = 0.0
    max_abs: float = 0.0
    different: int = 0
    sum_ratio: float = 0.0
