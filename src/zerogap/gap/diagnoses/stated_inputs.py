"""Diagnoses from stated facts about inputs and values: ids, positions, padding, masks, counts, zeros, caps."""

from __future__ import annotations

import re
from collections.abc import Callable

from zerogap.gap.diagnoses.base import Finding
from zerogap.gap.facts import NUMBER, Facts, as_number, claims_contract

HEALTHY = 0.03  # nats; what a gap in a fact is called good by


def sides_disagree(f: Facts) -> Finding | None:
    """One setting with two values."""
    engine, trainer = f.sides["engine"], f.sides["trainer"]
    for key in engine.keys() & trainer.keys():
        if str(engine[key]).lower() == str(trainer[key]).lower():
            continue
        both = f"engine {key}={engine[key]}, trainer {key}={trainer[key]}"
        if "rope" in key or "position" in key or "yarn" in str(engine[key]) + str(trainer[key]):
            layers = f.search(r"(\w+) layers")
            where = f" layers={layers.group(1)}" if layers else ""
            return Finding("inputs-differ/rope-scaling", 0.9, f"ROPE_SCALING_DISAGREE{where}: {both}; no side blamed",
                           {"engine": str(engine[key]), "trainer": str(trainer[key])})  # fmt: skip
    return None


def left_pad_rows(f: Facts) -> Finding | None:
    """A few rows with padding and difference."""
    rows = [(as_number(r["left_pad"]), as_number(next((r[k] for k in ("max_diff", "diff", "gap", "mean_diff", "max") if
             k in r), None))) for r in f.rows if "left_pad" in r]  # fmt: skip
    known = [(p, d) for p, d in rows if p is not None and d is not None]
    if len(known) < 2 or len({p for p, _ in known}) < 2:
        return None
    known.sort()
    if known[-1][1] < 10 * max(known[0][1], 1e-6) or known[-1][1] < HEALTHY:
        return None
    return Finding("inputs-differ/left-pad", 0.85, f"LEFT_PAD_POSITION_IDS (diff correlates with left_pad): "
                   f"{known[0][1]:g} at {known[0][0]:g}, {known[-1][1]:g} at {known[-1][0]:g}")  # fmt: skip


def cp_positions(f: Facts) -> Finding | None:
    """Worst positions given as numbers."""
    worst = next((v for k, v in f.values.items() if "position" in k and isinstance(v, list)), None)
    length, cp = f.number("seq_len", "sequence_length", "total_length"), f.number("cp", "cp_size")
    if not worst or not length:
        return None
    for size in [int(cp)] if cp else [2, 4, 8, 16]:
        chunk = int(length) // (2 * size)
        if chunk > 2 and all(min((int(p) + 1) % chunk, chunk - (int(p) + 1) % chunk) <= 1 for p in worst):
            return Finding("inputs-differ/cp-boundary", 0.9, f"CP_BOUNDARY_LABEL: positions {worst} stand at multiples "
                           f"of {chunk} = {int(length)}/(2*{size})", {"cp": size})  # fmt: skip
    return None


def retokenised(f: Facts) -> Finding | None:
    """Two id lists."""
    ids = [f.first("engine_ids", "engine_token_ids", "rollout_ids", "sampled_ids"),
           f.first("trainer_ids", "trainer_token_ids", "train_ids")]  # fmt: skip
    if not all(isinstance(i, list) for i in ids) or ids[0] == ids[1]:
        return None
    a, b = ids
    index = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    same = f.search(r'\(("[^)]*")\).*\(("[^)]*")\)')
    text = ""
    if same:
        joined = ["".join(re.findall(r'"([^"]*)"', group)) for group in same.groups()]
        text = " (same text, different ids)" if joined[0] == joined[1] else " (different text)"
    return Finding("inputs-differ/retokenised", 0.95, f"RETOKENIZED at index {index}{text}", {"index": index})


def texts(f: Facts) -> Finding | None:
    """Texts compared instead of log-probs."""
    if not f.search(r"different (?:sampled )?(?:texts?|outputs?|completions?|generations?)|(?:texts?|outputs?) differ"):
        return None
    temperature = f.number("temperature", "rollout_temperature")
    if temperature == 0:
        return None
    gap = f.number("gap", "abs_diff")
    judged = f"; gap={gap:g} -> {'normal' if gap <= HEALTHY else 'above numerics'}" if gap is not None else ""
    return Finding("inputs-differ/texts-compared", 0.9, "sampled texts may differ; score the same ids on both sides: "
                   f"`zerogap gap TABLE`{judged}")  # fmt: skip


def ladder(f: Facts) -> Finding | None:
    """Correlations of prefill-prefill, decode-prefill and pipeline: the first broken rung names the class."""
    rungs = [f.number(*names) for names in (("prefill_prefill", "prefill_vs_prefill"),
             ("decode_prefill", "decode_vs_prefill"), ("pipeline",))]  # fmt: skip
    if any(r is None for r in rungs):
        return None
    same, decode, pipeline = (float(r or 0) for r in rungs)
    text = f"prefill_prefill={same:g} decode_prefill={decode:g} pipeline={pipeline:g}"
    if same < 0.98:
        return Finding("weights-differ/elevated", 0.85, f"rung 1 broken: {text}: weights or configuration disagree",
                       code="WEIGHTS_OR_CONFIG")  # fmt: skip
    if decode < 0.9:
        return Finding("numerics/dtype-or-kernel", 0.8, f"rung 2 broken: {text}: decode and prefill kernels disagree",
                       code="NUMERICS")  # fmt: skip
    if pipeline < 0.95 * decode:
        return Finding("inputs-differ/ladder", 0.9, f"INPUT_MISMATCH (rungs 1,2 fine, 3 broken): {text}")
    return None


def zero_metric(f: Facts) -> Finding | None:
    """A logged gap of exactly 0.0."""
    value = f.first("abs_diff", "logged_abs_diff", "gap", "train_rollout_logprob_abs_diff", "mean_abs_diff")
    if as_number(value) != 0.0 or isinstance(value, list) or claims_contract(f):
        return None
    nan = str(f.first("grad_norm")).lower() == "nan" or str(f.first("loss")).lower() == "nan"
    return Finding("metric-broken/exact-zero", 0.9 if nan else 0.7, "SUSPICIOUS_ZERO (NaN masked by metric?): logged "
                   f"0.0 without true on-policy{', grad_norm or loss is nan' if nan else ''}")  # fmt: skip


def clipped(f: Facts) -> Finding | None:
    """A maximum that equals the stated cap."""
    cap = f.number("cap", "clip_max", "clip_high")
    largest = f.find(rf"/max\s*[=:]\s*({NUMBER})") or f.number("max", "ratio_max")
    if cap is None or largest is None or largest != cap:
        return None
    return Finding("metric-broken/clipped-metric", 0.95, f"CLIPPED_METRIC: the logged max is the cap ({cap:g}), "
        f"true value "
                   "unknown", {"cap": cap})  # fmt: skip


def pad_in_mask(f: Facts) -> Finding | None:
    """A mask that is longer than the response."""
    real, mask = f.number("real_len", "real_length", "response_length"), f.number("mask_sum")
    if real is None or mask is None or mask <= real:
        return None
    return Finding("metric-broken/pad-in-mask", 0.95, f"PAD_IN_MASK {mask - real:g} tokens: mask_sum {mask:g}, "
                   f"{real:g} generated", {"n": mask - real})  # fmt: skip


def appended(f: Facts) -> Finding | None:
    """The trainer has more ids than the engine gave."""
    engine, trainer = f.find(r"engine ids len\s*=\s*(\d+)"), f.find(r"trainer ids len\s*=\s*(\d+)")
    engine = engine if engine is not None else f.number("engine_len", "engine_length")
    trainer = trainer if trainer is not None else f.number("trainer_len", "trainer_length")
    if engine is None or trainer is None or trainer <= engine:
        return None
    mask = f.number("mask")
    stated = "mask not stated" if mask is None else f"with mask={mask:g}"
    return Finding("metric-broken/appended-token", 0.95, f"FRAMEWORK_APPENDED_TOKEN {stated}: "
        f"{trainer - engine:g} tokens "
                   "after the engine's last", {"n": trainer - engine},
                   level="info" if mask == 0 else "fault")  # fmt: skip


def lengths(f: Facts) -> Finding | None:
    """Three lengths of one sample that do not agree."""
    mask, response, logprobs = (
        f.number("loss_mask", "mask_length"),
        f.number("response_length", "tokens"),
        (f.number("logprobs", "rollout_log_probs")),
    )
    if mask is None or response is None or mask >= response or mask in (0, 1):
        return None
    both = f", logprobs={logprobs:g}" if logprobs is not None else ""
    return Finding("metric-broken/mask-not-extended", 0.95, f"MASK_NOT_EXTENDED_ON_RESUME: loss_mask={mask:g}, "
                   f"response_length={response:g}{both}")  # fmt: skip


def masked_all(f: Facts) -> Finding | None:
    """Every token masked out."""
    if not f.search(r"(?:loss_)?mask\s*(?:is\s+)?all\s+(?:0|zero|false)|valid_tokens\s*=\s*0\b"):
        return None
    return Finding("metric-broken/no-data", 1.0, "NO_DATA (valid_tokens=0): neither a gap of 0 nor NaN")


def counted_values(f: Facts) -> Finding | None:
    """A distribution written as counts: ``995 at 0.0, 5 at 50``."""
    found = [(int(n), abs(float(v))) for n, v in re.findall(rf"\b(\d+)\s+(?:tokens?\s+)?at\s+({NUMBER})", f.text)]
    total = sum(n for n, _ in found)
    if len(found) < 2 or total < 20:
        return None
    found.sort(key=lambda item: item[1])

    def quantile(share: float) -> float:
        seen = 0
        for count, value in found:
            seen += count
            if seen >= share * total:
                return value
        return found[-1][1]

    mean = sum(n * v for n, v in found) / total
    median, largest = quantile(0.5), found[-1][1]
    if mean <= 50 * median:
        return None
    return Finding("metric-broken/outlier-dominated", 0.9, f"OUTLIER_DOMINATED mean={mean:.4g} median={median:.4g} "
                   f"p99={quantile(0.99):.4g} "
                       f"max={largest:.4g}", {"mean": mean, "median": median, "max": largest})  # fmt: skip


def probability_buckets(f: Facts) -> Finding | None:
    """Gap by probability written as text."""
    high = f.find(rf"p?\s*>\s*0?\.9\s*[:=]\s*({NUMBER})")
    low = f.find(rf"<\s*0?\.1\s*[:=]\s*({NUMBER})")
    middle = f.find(rf"0?\.1\s*-\s*0?\.9\s*[:=]\s*({NUMBER})")
    if high is None or low is None or low < 10 * high:
        return None
    if middle is not None and middle > 0.1:
        return None
    return Finding("numerics/low-prob-tail", 0.9, f"LOW_PROB_TAIL dominated; not a config error: p>0.9 {high:g}, "
                   f"p<0.1 {low:g}", {"high": high, "low": low})  # fmt: skip


INPUT_RULES: tuple[Callable[[Facts], Finding | None], ...] = (
    sides_disagree,
    left_pad_rows,
    cp_positions,
    retokenised,
    texts,
    ladder,
    zero_metric,
    clipped,
    pad_in_mask,
    appended,
    lengths,
    masked_all,
    counted_values,
    probability_buckets,
)
