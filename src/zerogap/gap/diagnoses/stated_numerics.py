"""Diagnoses from stated facts about numerics and contracts: layouts, kernels, quantised layers, profiles."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from zerogap.gap.diagnoses.base import Finding
from zerogap.gap.facts import NUMBER, Facts, as_number, claims_contract, is_on

HEALTHY = 0.03  # nats; what a gap in a fact is called good by


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
        return Finding("numerics/cascade-attention", 0.9, f"CASCADE_ATTENTION suspected: {shared:g} with a "
            f"shared prompt, "
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
    return Finding("numerics/trainer-not-batch-invariant", 0.95, f"TRAINER_NOT_BATCH_INVARIANT: "
        f"max|old-new|={gap:g} at "
                   f"the first minibatch{sizes}", {"max": gap}, hint=hint)  # fmt: skip


def trainer_layout(f: Facts) -> Finding | None:
    """One trainer, several layouts of the same row."""
    layout = r"(alone|padded|packed|chunk\w*)"
    pattern = rf"{layout}\s+(?:vs\.?|and|against)\s+{layout}\s+\w*\s*=?\s*({NUMBER})"
    pairs = [(a, b, float(v)) for a, b, v in re.findall(pattern, f.text)]
    bad = [p for p in pairs if p[2] > 1e-3]
    if not bad:
        return None
    a, b, value = max(bad, key=lambda p: p[2])
    return Finding("numerics/trainer-layout", 0.95, f"TRAINER_LAYOUT_DEPENDENT pair=({a},{b}): max {value:g}",
                   {"pair": [a, b], "max": value})  # fmt: skip


def retraction(f: Facts) -> Finding | None:
    """A request's gap before and after a retraction."""
    at = f.find(rf"retract\w*\s+at\s+(?:token|position)?\s*({NUMBER})")
    before, after = f.find(rf"<\s*\d+\s*[:=]\s*({NUMBER})"), f.find(rf">=\s*\d+\s*[:=]\s*({NUMBER})")
    if at is None or before is None or after is None or before < 5 * after:
        return None
    return Finding("numerics/retract-routes", 0.9, f"RETRACT_ROUTE_MISPAIR: {before:g} before token {at:g}, "
        f"{after:g} after",
                   {"before": before, "after": after, "at": at})  # fmt: skip


def contract_numbers(f: Facts) -> Finding | None:
    """A non-zero gap under a contract."""
    from zerogap.gap.diagnoses.contract import size_class

    mean, largest = f.number("mean", "abs_diff", "mean_abs_diff"), f.number("max", "max_abs_diff", "max_diff")
    count, tokens = f.number("mismatch_count"), f.number("token_count")
    if count is not None and tokens:
        largest = f.number("max_absdiff_fp32", "max_absdiff", "max") or 0.0
        if count:
            return size_class(largest * count / tokens, largest, int(count), int(tokens))
        return Finding("zero/bit-equal", 0.9, f"0 of {tokens:g} tokens differ")
    if claims_contract(f) and mean == 0 and largest == 0:
        return Finding("zero/bit-equal", 0.8, "mean 0 and max 0 under a contract")
    if not claims_contract(f) or largest is None or mean is None or not largest:
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
    return Finding("numerics/contract-layout", 0.95, f"FAIL TRUE_ON_POLICY_TP>1 needs fsdp_tp target: engine on "
        f"{gpus:g} "
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


NUMERICS_RULES: tuple[Callable[[Facts], Finding | None], ...] = (
    quantised_layers,
    cascade,
    trainer_itself,
    trainer_layout,
    retraction,
    contract_numbers,
    log_softmax,
    padded_vocab,
    backward,
    contract_layout,
    profile,
    arrows,
    one_grid,
)
