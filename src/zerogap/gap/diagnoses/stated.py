"""Diagnoses from stated facts: sampler settings, log-prob modes, ladders, configuration of both sides, contracts."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from zerogap.gap.diagnoses.base import Finding
from zerogap.gap.diagnoses.stated_sync import SYNC_RULES
from zerogap.gap.facts import NUMBER, Facts, as_number, is_on

Rule = Callable[[Facts], Finding | None]
HEALTHY = 0.03  # nats; what a gap in a fact is called good by


def diagnose_facts(facts: Facts) -> list[Finding]:
    """Return what the stated facts alone say."""
    if not facts.values and not facts.text:
        return []
    return [found for rule in (*RULES, *SYNC_RULES) if (found := rule(facts)) is not None]


def _truncates(facts: Facts) -> str:
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


def _mode(facts: Facts) -> str:
    value = str(facts.first("logprobs_mode", "mode", "logprob_mode") or "")
    return "raw" if value.startswith("raw") else "processed" if value.startswith("processed") else ""


def raw_with_truncation(f: Facts) -> Finding | None:
    """Raw log-probs with truncation: a small gap that is not right."""
    cut = _truncates(f)
    if _mode(f) != "raw" or not cut:
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
    config = {k: v for k, v in re.findall(rf"[\"']?(\w+)[\"']?\s*:\s*({NUMBER})", block.group(1))}
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
    mode = _mode(f)
    if not mode or (mode == "raw" and _truncates(f)):
        return None
    temperature = f.number("temperature", "rollout_temperature") or 1.0
    cut = _truncates(f)
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


def quantised_layers(f: Facts) -> Finding | None:
    """Layers with another dtype on each side; fused names are taken apart."""
    words = ("fp8", "mxfp8", "nvfp4", "mxfp4", "int8", "int4", "fp4", "bf16", "fp16", "unquantized", "none", "fp32")
    layers: dict[str, dict[str, str]] = {"engine": {}, "trainer": {}}
    fused = {"gate_up_proj": ("gate_proj", "up_proj"), "qkv_proj": ("q_proj", "k_proj", "v_proj")}
    for side in layers:
        for key, value in f.sides[side].items():
            kind = str(value).lower()
            if kind not in words:
                continue
            parts = next(([key.replace(n, p) for p in ps] for n, ps in fused.items() if key.endswith(n)), [key])
            for part in parts:
                layers[side][part] = "unquantised" if kind in ("unquantized", "none", "bf16", "fp16", "fp32") else kind
    differ = [k for k in layers["engine"].keys() & layers["trainer"].keys()
              if layers["engine"][k] != layers["trainer"][k]]  # fmt: skip
    if not differ:
        return None
    ignored = f.first("ignored_layers") or f.sides["engine"].get("ignored_layers") or []
    ignored = ignored if isinstance(ignored, list) else [ignored]
    by_part = [str(i) for i in ignored if any(str(i).replace(".", "_") in key and not key.endswith(
        str(i).replace(".", "_")) for key in f.sides["engine"])]  # fmt: skip
    names = ", ".join(sorted(differ)[:4])
    why = f" (substring match of {', '.join(map(repr, by_part))})" if by_part else ""
    return Finding("weights-differ/quant-layers", 0.95, f"QUANT_LAYER_SET_DIFFERS{why}: {names}", {"layers": differ})


def cascade(f: Facts) -> Finding | None:
    """Shared-prompt batches against single prompts, or the setting that allows the fault."""
    shared, single = (
        f.number("batch_of_identical_prompts", "shared_prefix_gap", "identical_prompts", "shared_prefix"),
        (f.number("single_prompt", "single_prompt_gap", "no_shared_prefix")),
    )
    engine = str(f.first("engine") or "") + f.text
    off = is_on(f.first("disable_cascade_attn"))
    if shared is not None and single is not None and shared > 3 * single and shared > HEALTHY and not off:
        return Finding("numerics/cascade-attention", 0.9, f"CASCADE_ATTENTION suspected: {shared:g} with a shared prompt, "
                       f"{single:g} alone", {"shared": shared, "single": single})  # fmt: skip
    capability = f.find(r"sm_?(\d+)")
    samples = f.number("n_samples", "n", "num_generations") or 0
    if (
        "vllm" in engine.lower()
        and capability is not None
        and capability != 90
        and samples > 1
        and ("disable_cascade_attn" in f and not off)
    ):
        return Finding("numerics/cascade-attention", 0.5, f"vLLM on sm{capability:g} with {samples:g} samples a prompt "
                       "and cascade attention not disabled", level="warn")  # fmt: skip
    return None


def trainer_itself(f: Facts) -> Finding | None:
    """Trainer old against new at the first minibatch."""
    gap = f.find(rf"max\s*\|?\s*(?:abs\()?old\s*-\s*new\)?\|?\s*[=:]\s*({NUMBER})")
    gap = gap if gap is not None else f.number("max_old_new", "trainer_old_new_max", "trainer_trainer_max")
    if not gap:
        return None
    train, score = (
        f.find(rf"ppo_micro_batch_size_per_gpu\s*=\s*({NUMBER})"),
        (f.find(rf"log_prob_micro_batch_size_per_gpu\s*=\s*({NUMBER})")),
    )
    sizes = f"; micro batches {train:g} and {score:g}" if train and score else ""
    hint = "use equal micro batches" if train != score else ""
    return Finding("numerics/trainer-not-batch-invariant", 0.95, f"TRAINER_NOT_BATCH_INVARIANT: max|old-new|={gap:g} at "
                   f"the first minibatch{sizes}", {"max": gap}, hint=hint)  # fmt: skip


def trainer_layout(f: Facts) -> Finding | None:
    """One trainer, several layouts of the same row."""
    pattern = rf"(alone|padded|packed|chunk\w*)\s+(?:vs\.?|and|against)\s+(alone|padded|packed|chunk\w*)\s+\w*\s*=?\s*({NUMBER})"
    pairs = [(a, b, float(v)) for a, b, v in re.findall(pattern, f.text)]
    bad = [p for p in pairs if p[2] > 1e-3]
    if not bad:
        return None
    a, b, value = max(bad, key=lambda p: p[2])
    return Finding("numerics/trainer-layout", 0.95, f"TRAINER_LAYOUT_DEPENDENT pair=({a},{b}): max {value:g}",
                   {"pair": [a, b], "max": value})  # fmt: skip


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


def retraction(f: Facts) -> Finding | None:
    """A request's gap before and after a retraction."""
    at = f.find(rf"retract\w*\s+at\s+(?:token|position)?\s*({NUMBER})")
    before, after = f.find(rf"<\s*\d+\s*[:=]\s*({NUMBER})"), f.find(rf">=\s*\d+\s*[:=]\s*({NUMBER})")
    if at is None or before is None or after is None or before < 5 * after:
        return None
    return Finding("numerics/retract-routes", 0.9, f"RETRACT_ROUTE_MISPAIR: {before:g} before token {at:g}, {after:g} after",
                   {"before": before, "after": after, "at": at})  # fmt: skip


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


def _contract(f: Facts) -> bool:
    return is_on(f.first("true_on_policy", "contract", "true_on_policy_mode")) or bool(
        f.search(r"\btrue_on_policy\b(?!\s*[=:]\s*(?:0|false|no|off))")
    )


def contract_numbers(f: Facts) -> Finding | None:
    """A non-zero gap under a contract."""
    from zerogap.gap.diagnoses.numerics import size_class

    mean, largest = f.number("mean", "abs_diff", "mean_abs_diff"), f.number("max", "max_abs_diff", "max_diff")
    count, tokens = f.number("mismatch_count"), f.number("token_count")
    if count is not None and tokens:
        largest = f.number("max_absdiff_fp32", "max_absdiff", "max") or 0.0
        if count:
            return size_class(largest * count / tokens, largest, int(count), int(tokens))
        return None
    if not _contract(f) or largest is None or mean is None or not largest:
        return None
    return size_class(mean, largest, None, None)


def log_softmax(f: Facts) -> Finding | None:
    """Equal logits with tiny log-prob differences."""
    if not f.search(
        r"logits?[^.;\n]*(?:digests?|bits?|equal)[^.;\n]*(?:equal|same|true)|logits_(?:equal|digest_equal)=true"
    ):
        return None
    largest = f.find(rf"(?:max|diff)\w*(?:\s+diff)?\s*=\s*({NUMBER})")
    if largest is None or not 0 < largest < 1e-5:
        return None
    return Finding("numerics/log-softmax", 0.95, f"LOGSOFTMAX_IMPL (first differing tensor = logprob): max {largest:g} "
                   "with equal logits", {"max": largest})  # fmt: skip


def padded_vocab(f: Facts) -> Finding | None:
    """Padding of the vocabulary in the normaliser."""
    vocab, padded = f.number("vocab", "vocab_size"), f.number("padded", "padded_vocab_size", "padded_vocab")
    if not vocab or not padded or padded <= vocab:
        return None
    if not f.search(r"logsumexp|log_softmax|softmax|normali[sz]er|pad_logit"):
        return None
    if f.search(r"(?:truncated|cut|sliced|excluded|masked)[^\n]{0,40}(?:before|from)"):
        return None
    return Finding("numerics/padded-vocab", 0.9, f"PADDED_VOCAB_IN_SOFTMAX: {padded - vocab:g} padded columns "
                   f"({vocab:g} to {padded:g}) enter the normaliser")  # fmt: skip


def backward(f: Facts) -> Finding | None:
    """Forward gap 0 with a gradient that is off."""
    forward = f.number("forward_diff", "forward") if f.number("forward_diff", "forward") is not None else f.find(
        rf"forward diff\s*=\s*({NUMBER})")  # fmt: skip
    cosine = f.number("cos", "cosine", "grad_cos")
    if forward is None or cosine is None or forward > HEALTHY or cosine > 0.99:
        return None
    return Finding("numerics/backward", 0.95, f"FORWARD_OK_BACKWARD_BAD: forward {forward:g}, gradient cos {cosine:g}",
                   {"cos": cosine})  # fmt: skip


def contract_layout(f: Facts) -> Finding | None:
    """True on-policy with engine tensor parallelism and the wrong target."""
    gpus = f.find(rf"rollout-num-gpus-per-engine[= ]+({NUMBER})") or f.number("rollout_tp", "engine_tp", "tp_size")
    target = f.first("rl_on_policy_target")
    if not gpus or gpus <= 1 or target is None or "tp" in str(target):
        return None
    if not f.search(r"true[-_ ]on[-_ ]policy|rl_on_policy_target"):
        return None
    return Finding("numerics/contract-layout", 0.95, f"FAIL TRUE_ON_POLICY_TP>1 needs fsdp_tp target: engine on {gpus:g} "
                   f"GPUs, target {target}")  # fmt: skip


def profile(f: Facts) -> Finding | None:
    """A model that the installed profile table lacks."""
    table = f.first("miles_true_on_policy_model_profiles", "model_profiles", "profiles")
    asked = f.first("requested", "model")
    if not isinstance(table, list) or asked is None:
        return None
    plain = {re.sub(r"[^a-z0-9]", "", str(name).lower()) for name in table}
    if re.sub(r"[^a-z0-9]", "", str(asked).lower()) in plain:
        return None
    return Finding("numerics/not-in-profile", 0.95, f"FAIL NOT_IN_PROFILE: {asked} is not among {table} (installed "
                   "version), newer versions may add it")  # fmt: skip


def arrows(f: Facts) -> Finding | None:
    """``gap: a -> b`` with what else is stated."""
    moved: Any = f.first("gap", "abs_diff", "mean_abs_diff")
    if not (isinstance(moved, list) and len(moved) == 2):
        return None
    first, last = float(moved[0]), float(moved[1])
    if last < 1.8 * first:
        return None
    lr = f.number("lr", "learning_rate")
    length: Any = f.first("mean_len", "response_length", "mean_length", "length")
    beside = ""
    if isinstance(length, list) and length[-1] > 1.5 * length[0]:
        beside = f"; covariate=response length ({length[0]:g} to {length[-1]:g})"
    name = "stale-state/growing-at-lr0" if lr == 0 else "stale-state/growing"
    return Finding(name, 0.85, f"baseline {first:g}, now {last:g}{beside}", {"baseline": first, "now": last})


def zero_metric(f: Facts) -> Finding | None:
    """A logged gap of exactly 0.0."""
    value = f.first("abs_diff", "logged_abs_diff", "gap", "train_rollout_logprob_abs_diff", "mean_abs_diff")
    if as_number(value) != 0.0 or isinstance(value, list) or _contract(f):
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
    return Finding("metric-broken/clipped-metric", 0.95, f"CLIPPED_METRIC: the logged max is the cap ({cap:g}), true value "
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
    return Finding("metric-broken/appended-token", 0.95, f"FRAMEWORK_APPENDED_TOKEN {stated}: {trainer - engine:g} tokens "
                   "after the engine's last", {"n": trainer - engine}, level="info" if mask == 0 else "fault")  # fmt: skip


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


def one_grid(f: Facts) -> Finding | None:
    """Log-probs of one side that lie on a bf16 grid, given as lists too short or unequal for a table."""
    import numpy as np

    from zerogap.gap.diagnoses.numerics import GRID_SHARE, grid_share

    shares = {}
    for side, names in (("trainer", ("trainer_logps", "trainer_logprobs", "trainer")),
                        ("engine", ("engine_logps", "engine_logprobs", "engine"))):  # fmt: skip
        values = f.first(*names)
        if isinstance(values, list):
            numbers = [v for v in map(as_number, values) if v is not None]
            if len(numbers) >= 2:
                shares[side] = (grid_share(np.array(numbers, dtype=np.float32))[0], len(numbers))
    on = [side for side, (share, _) in shares.items() if share >= GRID_SHARE]
    if len(on) != 1 or shares[on[0]][1] < 3:
        return None
    other = "; the other side is off it: HEAD_DTYPE_ONE_SIDED" if len(shares) == 2 else ""
    return Finding("numerics/bf16-logits", 0.8, f"LOGITS_BF16 side={on[0]}: every value lies on the bf16 grid{other}",
                   {"side": on[0]})  # fmt: skip


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
                   f"p99={quantile(0.99):.4g} max={largest:.4g}", {"mean": mean, "median": median, "max": largest})  # fmt: skip


def masked_all(f: Facts) -> Finding | None:
    """Every token masked out."""
    if not f.search(r"(?:loss_)?mask\s*(?:is\s+)?all\s+(?:0|zero|false)|valid_tokens\s*=\s*0\b"):
        return None
    return Finding("metric-broken/no-data", 1.0, "NO_DATA (valid_tokens=0): neither a gap of 0 nor NaN")


RULES: tuple[Rule, ...] = (
    raw_with_truncation, temperature_gaps, ignores_temperature, prefill_rescoring, inherited_sampling, semantics,
    temperature_floor, mode_row, signed_list, ladder, sides_disagree, quantised_layers, cascade, trainer_itself,
    trainer_layout, left_pad_rows, cp_positions, retokenised, retraction, probability_buckets, texts, contract_numbers,
    log_softmax, padded_vocab, backward, contract_layout, profile, arrows, zero_metric, clipped, pad_in_mask, appended,
    lengths, masked_all, one_grid, counted_values,
)  # fmt: skip
