"""Diagnoses from stated facts about the sampler: log-prob modes, temperature, truncation, inherited values."""

from __future__ import annotations

import re
from collections.abc import Callable

from zerogap.gap.diagnoses.base import Finding
from zerogap.gap.facts import NUMBER, Facts, is_on

HEALTHY = 0.03  # nats; what a gap in a fact is called good by


def truncates(facts: Facts) -> str:
    """Return which truncation is on, as text."""
    parts = []
    top_p, top_k, min_p = facts.number("top_p"), facts.number("top_k"), facts.number("min_p")
    if top_p is not None and 0 < top_p < 1:
        parts.append(f"top_p={top_p:g}")
    if top_k is not None and top_k > 0:
        parts.append(f"top_k={top_k:g}")
    if min_p is not None and min_p > 0:
        parts.append(f"min_p={min_p:g}")
    return " ".join(parts)


def logprobs_mode(facts: Facts) -> str:
    """Return raw, processed, or nothing when the mode is not stated."""
    value = str(facts.first("logprobs_mode", "mode", "logprob_mode") or "")
    return "raw" if value.startswith("raw") else "processed" if value.startswith("processed") else ""


def raw_with_truncation(f: Facts) -> Finding | None:
    """Raw log-probs with truncation: a small gap that is not right."""
    cut = truncates(f)
    if logprobs_mode(f) != "raw" or not cut:
        return None
    gap = f.number("gap", "abs_diff", "mean_abs_diff")
    seen = f", gap={gap:g}" if gap is not None else ""
    return Finding("sampler/raw-with-truncation", 0.95, f"RAW_LOGPROBS_WITH_TRUNCATION: logprobs_mode=raw, {cut}{seen}",
                   {"gap": gap})  # fmt: skip


def temperature_gaps(f: Facts) -> Finding | None:
    """Gaps measured at two or more temperatures."""
    pattern = rf"(?:gap\s+)?at\s+T\s*=\s*({NUMBER})\s*[:=]\s*({NUMBER})"
    measured = [(float(t), float(g)) for t, g in re.findall(pattern, f.text)]
    measured += [(float(t), float(g)) for t, g in re.findall(rf"gap\W+T\W*({NUMBER})\W?\s*[=:]\s*({NUMBER})", f.text)]
    if len(set(measured)) < 2:
        return None
    stated = f.number("rollout_temperature", "temperature")
    best, gap = min(measured, key=lambda m: m[1])
    worst = max(g for _, g in measured)
    if gap > 0.3 * worst or stated is None or abs(best - stated) < 0.02:
        return None
    return Finding(
        "sampler/temperature",
        0.9,
        f"TEMPERATURE_MISMATCH: the gap is {gap:g} at T={best:g} and {worst:g} at the stated T={stated:g}: engine "
        f"scores at T={best:g}",
        {"temperature_engine": best, "temperature_trainer": stated},
    )


def ignores_temperature(f: Facts) -> Finding | None:
    """Scores of the same ids at two temperatures that are identical."""
    scores = re.findall(rf"score\w*\([^)]*?T\s*=\s*({NUMBER})\s*\)\s*=\s*({NUMBER})", f.text)
    if len({t for t, _ in scores}) < 2:
        return None
    values = {float(v) for _, v in scores}
    if len(values) > 1:
        return None
    asked = f.number("rollout_temperature", "temperature")
    level = "warn" if asked is None or asked == 1.0 else "fault"
    return Finding(
        "sampler/input-logprobs-ignore-temperature",
        0.95,
        f"INPUT_LOGPROBS_IGNORE_TEMPERATURE: {', '.join(f'T={t}: {v}' for t, v in scores)}"
        + (f"; rollout_temperature={asked:g} would be wrong with prefill re-scoring" if asked else ""),
        level=level,
    )


def prefill_rescoring(f: Facts) -> Finding | None:
    """Re-scoring by prefill at a temperature other than 1."""
    asked = f.number("rollout_temperature", "temperature")
    if not is_on(f.first("prefill_rescoring", "recompute_logprobs_via_prefill")) or asked in (None, 1.0):
        return None
    return Finding(
        "sampler/input-logprobs-ignore-temperature",
        0.7,
        f"prefill re-scoring with temperature {asked:g}: engines score given tokens without the temperature",
        level="warn",
    )


def inherited_sampling(f: Facts) -> Finding | None:
    """Values in generation_config.json that the run did not set."""
    block = f.search(r"generation_config(?:\.json)?\s*[:=]\s*(\{[^}]*\})")
    if not block:
        return None
    config = dict(re.findall(rf"[\"']?(\w+)[\"']?\s*:\s*({NUMBER})", block.group(1)))
    flags = f.search(r"run flags?\s*:\s*([^\n]*)")
    text = flags.group(1) if flags else f.text.replace(block.group(0), "")
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0.0, "repetition_penalty": 1.0, "min_p": 0.0,
               "presence_penalty": 0.0, "frequency_penalty": 0.0}  # fmt: skip
    left = [f"{k}={v}" for k, v in config.items()
            if k in neutral and float(v) != neutral[k] and not re.search(rf"\b{k}\s*=", text)]  # fmt: skip
    if not left:
        return None
    return Finding("sampler/inherited-sampling", 0.95, f"WARN INHERITED_SAMPLING {' '.join(left)}", {"inherited": left})


def semantics(f: Facts) -> Finding | None:
    """A calibration against hypotheses of what the engine's log-prob means."""
    engine = f.number("engine")
    names = {"raw": "RAW", "temp": "TEMPERATURE_ONLY", "temp_trunc": "TEMPERATURE_AND_TRUNCATION",
             "original": "ORIGINAL", "trunc": "TRUNCATION_ONLY"}  # fmt: skip
    block = re.findall(rf"\b(raw|temp\+trunc|temp|trunc|original)\s*=\s*({NUMBER})", f.text)
    if engine is None or len(block) < 2 or f.search("calibration") is None:
        return None
    near = sorted((abs(float(v) - engine), k) for k, v in block)
    best = near[0][1].replace("+", "_")
    if near[0][0] > 0.02 or near[1][0] < 3 * near[0][0]:
        return Finding("sampler/semantics", 0.3, f"semantics=UNKNOWN: no hypothesis gives {engine:g}", level="unknown")
    return Finding("sampler/semantics", 0.95, f"semantics={names[best]}: engine {engine:g}, {best} "
                   f"{dict(block)[near[0][1]]}", {"semantics": names[best]}, code=names[best])  # fmt: skip


def temperature_floor(f: Facts) -> Finding | None:
    """A temperature below the engine's floor."""
    asked, used = (
        f.number("temperature"),
        f.number("engine_effective", "effective_temperature", "temperature_effective"),
    )
    if asked is None or (used is None and not 0 < asked < 0.01) or (used is not None and used == asked):
        return None
    if used is None:
        return Finding("sampler/temperature-floor", 0.6, f"WARN TEMPERATURE_FLOOR: temperature={asked:g} is below the "
                       "0.01 at which vLLM floors it")  # fmt: skip
    if used < asked:
        return None
    return Finding("sampler/temperature-floor", 0.95, f"WARN TEMPERATURE_FLOOR: {asked:g} asked, {used:g} in effect")


def mode_row(f: Facts) -> Finding | None:
    """The row of the mode table that applies."""
    mode = logprobs_mode(f)
    if not mode or (mode == "raw" and truncates(f)):
        return None
    temperature = f.number("temperature", "rollout_temperature") or 1.0
    cut = truncates(f)
    if mode == "processed" and cut:
        row = f"processed with {cut}: trainer must replay the kept set" + (
            f" at temperature {temperature:g}" if temperature != 1 else ""
        )
        level = "warn"
    elif mode == "processed":
        row, level = (
            (
                f"temperature only: trainer must divide logits by {temperature:g}"
                if temperature != 1
                else "no temperature, no truncation: trainer's plain log-softmax"
            ),
            "info",
        )
    else:
        row = "raw: trainer's plain log-softmax, never divided" + (
            f"; the importance ratio then ignores temperature {temperature:g}" if temperature != 1 else ""
        )
        level = "warn" if temperature != 1 else "info"
    return Finding(
        "sampler/logprobs-mode", 0.9, f'row "{row}"', {"mode": mode, "temperature": temperature}, level=level
    )


def signed_list(f: Facts) -> Finding | None:
    """Signed differences written as a list."""
    found = re.search(rf"engine\s*-\s*trainer\s*[:=]\s*\[?((?:{NUMBER}\s*,\s*)+{NUMBER})", f.text)
    sign = 1.0
    if not found:
        found = re.search(rf"trainer\s*-\s*engine\s*[:=]\s*\[?((?:{NUMBER}\s*,\s*)+{NUMBER})", f.text)
        sign = -1.0
    if not found:
        return None
    import math

    values = [sign * float(v) for v in found.group(1).split(",")]
    material = [v for v in values if abs(v) > 1e-3]
    mass = sum(math.exp(-v) for v in values) / len(values)
    if len(material) < 3 or min(material) < 0 or mass > 0.985:
        return None
    given = f.number("mean_ratio") or f.find(rf"mean ratio\s*[=:]\s*({NUMBER})")
    mass = given if given is not None else mass
    return Finding("sampler/truncation", 0.85, f"SAMPLER_TRUNCATION kept_mass~{mass:.2f}: no negative among "
                   f"{len(values)} differences", {"kept_mass": mass})  # fmt: skip


SAMPLER_RULES: tuple[Callable[[Facts], Finding | None], ...] = (
    raw_with_truncation,
    temperature_gaps,
    ignores_temperature,
    prefill_rescoring,
    inherited_sampling,
    semantics,
    temperature_floor,
    mode_row,
    signed_list,
)
