"""Diagnoses from stated facts about the weight sync: checksums, answers, adapters, identity syncs, order of calls."""

from __future__ import annotations

import re
from collections.abc import Callable

from zerogap.gap.diagnoses.base import Finding
from zerogap.gap.facts import NUMBER, Facts, as_number, is_on


def conversion(f: Facts) -> Finding | None:
    """A score before and after syncing unchanged weights."""
    before = f.find(rf"before\s+(?:the\s+)?(?:identity\s+)?sync\s*[=:]\s*({NUMBER})")
    after = f.find(rf"after\s+(?:the\s+|an\s+)?(?:identity\s+)?sync\s*[=:]\s*({NUMBER})")
    before = before if before is not None else f.number("logprob_before_sync", "before_sync")
    after = after if after is not None else f.number("logprob_after_sync", "after_sync", "after_identity_sync")
    if before is None or after is None:
        return None
    if before == after:
        return Finding("weights-differ/sync-ok", 0.9, f"identity sync kept the score at {before:g}")
    return Finding("weights-differ/conversion", 0.95, f"CONVERSION_NOT_IDENTITY: {before:g} before, {after:g} after an "
                   "identity sync", {"before": before, "after": after})  # fmt: skip


def identity_text(f: Facts) -> Finding | None:
    """Text before and after an identity sync; or the version rule that makes it likely."""
    pre, post = f.search(r"\bPRE\b[^\n]*->\s*\"([^\"]*)\""), f.search(r"\bPOST\b[^\n]*->\s*\"([^\"]*)\"")
    if pre and post and f.search(r"identity\s*sync|same weights"):
        if pre.group(1) == post.group(1):
            return Finding("weights-differ/sync-ok", 0.8, "identity sync kept the output")
        return Finding("weights-differ/identity-sync", 0.95, "IDENTITY_SYNC_CHANGED_OUTPUT: "
                       f"{pre.group(1)!r} became {post.group(1)!r}")  # fmt: skip
    version = f.search(r"vllm\s*(?:==|>=|=|-|:)\s*(\d+)\.(\d+)")
    raw = f.search(r"raw[_ ](?:model\.)?load_weights|load_weights\s*=\s*raw")
    if version and raw and (int(version.group(1)), int(version.group(2))) >= (0, 20) and f.search(r"\bmoe\b"):
        return Finding("weights-differ/moe-raw-reload", 0.8, f"vLLM {version.group(1)}.{version.group(2)}, MoE, raw "
                       "load_weights")  # fmt: skip
    return None


def layout(f: Facts) -> Finding | None:
    """Equal checksums with a gap that no rounding gives."""
    before = f.find(rf"gap\s+before\w*\s*=\s*({NUMBER})") or f.number("gap_before")
    after = f.find(rf"\bafter\w*\s*=\s*({NUMBER})") or f.number("gap_after")
    if before is None or after is None or after < 1 or after < 10 * before:
        return None
    equal = f.search(r"checksums?\s*(?:are\s+)?equal\s*(?:=\s*(?:true|yes))?|checksum_equal=true")
    text = " (checksums equal, function differs)" if equal else ""
    return Finding("weights-differ/layout", 0.95, f"LAYOUT_AFTER_SYNC{text}: gap {before:g} before, {after:g} after",
                   {"before": before, "after": after})  # fmt: skip


def resumed(f: Facts) -> Finding | None:
    """A high first gap after a resume."""
    if not f.search(r"\bresum"):
        return None
    first = f.find(rf"first\s+gap\s*[=:]\s*({NUMBER})") or f.number("first_gap")
    later = f.find(rf"next\s*(?:gap)?\s*[=:]?\s*({NUMBER})") or f.number("next_gap")
    version = f.first("engine_weight_version", "engine_version")
    if first is not None and later is not None and first > 8 * later:
        engine = f", engine weight version {version}" if version is not None else ""
        return Finding("weights-differ/resumed-on-base", 0.95, f"RESUME_ENGINE_HAS_BASE_WEIGHTS: first gap {first:g}, "
                       f"next {later:g}{engine}", {"first": first, "next": later})  # fmt: skip
    if str(version).lower() in ("default", "base", "0") and f.first("trainer_ckpt", "trainer_version") is not None:
        return Finding("weights-differ/resumed-on-base", 0.7, f"engine weight version {version}, trainer "
                       f"{f.first('trainer_ckpt', 'trainer_version')} after a resume")  # fmt: skip
    return None


def cached(f: Facts) -> Finding | None:
    """Requests with and without cached tokens."""
    rows = [(as_number(r.get("cached_tokens")), as_number(r.get("gap", r.get("abs_diff")))) for r in f.rows]
    known = sorted((n, g) for n, g in rows if n is not None and g is not None)
    if len(known) < 2 or known[0][0] == known[-1][0] or known[-1][1] < 3 * known[0][1] or known[-1][1] < 0.03:
        return None
    return Finding("stale-state/prefix-cache", 0.9, f"STALE_PREFIX_CACHE: gap {known[0][1]:g} with "
        f"{known[0][0]:g} cached "
                   f"tokens, {known[-1][1]:g} with {known[-1][0]:g}")  # fmt: skip


def bucket(f: Facts) -> Finding | None:
    """The outcome of a sync by bucket size."""
    found = re.findall(r"bucket\w*\s*=\s*(\d+)\s*(?:->|:)\s*([^;\n]*)", f.text)
    if len({b for b, _ in found}) < 2:
        return None
    good = [b for b, text in found if re.search(r"\bok\b|fine|good|equal", text, re.IGNORECASE)]
    bad = [b for b, _ in found if b not in good]
    if not good or not bad:
        return None
    return Finding(
        "weights-differ/bucket-size", 0.9, f"BUCKET_SIZE_DEPENDENT_SYNC: bucket {good[0]} works, {bad[0]} not"
    )


def lora_twice(f: Facts) -> Finding | None:
    """Base weights of the engine that are not the checkpoint while an adapter is active."""
    differs = f.search(r"base[^\n;]*checksum\s*(?:!=|≠|differs)|base_checksum_equal\s*=\s*(?:false|no)")
    if not differs or not f.search(r"adapter[^\n]*(?:active|loaded|on|true)|lora[^\n]*(?:active|loaded)"):
        return None
    return Finding("weights-differ/lora-twice", 0.9, "LORA_APPLIED_TWICE: the engine's base layer is not the "
        "checkpoint's "
                   "and an adapter is active")  # fmt: skip


def tied_head(f: Facts) -> Finding | None:
    """The warning about a tied output head, benign or not."""
    tied = f.first("tie_word_embeddings", "tied")
    if tied is None or not is_on(tied) or not f.search(r"loaded 0 of|lm_head"):
        return None
    moved = f.first("changed", "logprob_changed", "fixed_prompt_logprob_changed")
    if moved is None:
        return Finding("weights-differ/tied-head", 0.4, "a tied head was not loaded; whether log-probs move is not "
                       "stated", level="unknown")  # fmt: skip
    if is_on(moved):
        return Finding("weights-differ/tied-head-benign", 0.95, "OK (benign): log-probs of a fixed prompt changed")
    return Finding("weights-differ/tied-head", 0.95, "TIED_HEAD_STALE: log-probs of a fixed prompt did not change")


def call_order(f: Facts) -> Finding | None:
    """Flushing the cache before the KV memory is back."""
    calls = f.search(r"(?:seq\w*|calls|order)\s*[:=]\s*([^\n]*(?:->|→)[^\n]*)")
    if not calls:
        return None
    offloaded: set[str] = set()
    for call in re.split(r"->|→", calls.group(1)):
        name, _, rest = call.strip().partition("(")
        what = {"weights", "kv"} if not rest or "all" in rest or rest.startswith(")") else {
            kind for kind, words in {"kv": ("kv",), "weights": ("weight",)}.items() if any(w in rest for w in words)
        }  # fmt: skip
        if re.search("release|offload|sleep", name):
            offloaded |= what
        elif re.search("resume|wake|onload", name):
            offloaded -= what
        elif ("flush" in call and not re.search(r"flush\w*\s*=\s*(?:False|0)", call)) and "kv" in offloaded:
            return Finding("stale-state/flush-before-resume", 0.95, f"ORDER_ERROR flush_cache while kv_cache "
                f"offloaded: "
                           f"{call.strip()} came before resume(kv_cache)")  # fmt: skip
        elif re.search("update_weights", name) and "weights" in offloaded:
            return Finding("stale-state/flush-before-resume", 0.9, f"ORDER_ERROR {call.strip()} while weights are "
                           "offloaded")  # fmt: skip
    return None


def update_not_loaded(f: Facts) -> Finding | None:
    """Two checksums after an accepted update; or one that never changes."""
    sides = f.search(r"checksum\s+trainer\s*=\s*(\S+)\s+engine\s*=\s*(\S+)")
    a, b = sides.groups() if sides else (f.first("trainer_checksum", "checksum_trainer"),
                                         f.first("engine_checksum", "checksum_engine"))  # fmt: skip
    if a is not None and b is not None and str(a) != str(b):
        accepted = f.search(r"\b200\b|success\W+true")
        return Finding("weights-differ/update-not-loaded", 0.95, ("UPDATE_200_BUT_DIFFERENT" if accepted else
                       "checksums differ after the sync") + f": trainer {a}, engine {b}")  # fmt: skip
    sums = re.findall(r"(?:push|sync|sent)\w*\s+checksum\s*[=:]\s*(\S+)", f.text)
    if len(sums) >= 2 and len(set(sums)) == 1:
        return Finding(
            "weights-differ/no-op-sync", 0.9, f"the checksum of what is sent is {sums[0]} at all {len(sums)} syncs"
        )
    if f.search(r"\b0 (?:tensors|parameters|weights) (?:sent|loaded|updated)"):
        return Finding("weights-differ/no-op-sync", 0.9, "0 tensors sent")
    return None


def rejected(f: Facts) -> Finding | None:
    """An answer with success=false."""
    if not f.search(r"[\"']?success[\"']?\s*[:=]\s*false"):
        return None
    error = f.search(r"[\"']?(?:error|message|detail)[\"']?\s*[:=]\s*[\"']?([^\"'}\n]+)")
    return Finding(
        "weights-differ/sync-rejected", 0.95, f"SYNC_REJECTED error={error.group(1).strip() if error else '?'}"
    )


def adapter_unused(f: Facts) -> Finding | None:
    """An adapter that requests do not name."""
    loaded = f.search(r"loaded[^\n;]*(?:lora|adapter)[^\n;]*|(?:lora|adapter)[^\n;]*loaded")
    unused = f.search(r"request\w*[._ ](?:lora|adapter)\w*\s*=\s*(?:none|null|\"\")")
    if not loaded or not unused:
        return None
    return Finding("weights-differ/adapter-not-used", 0.95, "ADAPTER_LOADED_NOT_USED: requests carry no adapter")


def adapter_not_applied(f: Facts) -> Finding | None:
    """The trainer's adapter moves its scores, the engine's stay."""
    trainer = f.find(rf"trainer\s+base[\w ]*lora[\w ]*diff\s*=\s*({NUMBER})")
    trainer = trainer if trainer is not None else f.number("trainer_base_vs_lora", "trainer_base_vs_adapter")
    engine = f.find(rf"engine[\w ]*engine[\w ]*diff\s*=\s*({NUMBER})")
    engine = engine if engine is not None else f.number("engine_base_vs_lora", "engine_base_vs_adapter",
                                                        "engine_now_vs_engine_base")  # fmt: skip
    if trainer is None or engine is None or trainer < 1e-3 or engine > 0.1 * trainer:
        return None
    return Finding("weights-differ/adapter-not-applied", 0.95, f"ADAPTER_NOT_APPLIED: trainer moves {trainer:g}, "
        f"engine "
                   f"{engine:g}")  # fmt: skip


def lora_rounding(f: Facts) -> Finding | None:
    """How much of an adapter survives the merge."""
    changed = f.find(rf"changed(?: elements)?[^\n:=]*[:=]\s*({NUMBER})\s*%")
    if changed is None:
        share = f.number("changed_share", "merged_changed_share")
        changed = 100 * share if share is not None else None
    if changed is None or not f.search(r"lora|adapter|merge") or changed >= 50:
        return None
    return Finding("weights-differ/lora-rounding", 0.9, f"LORA_MERGE_ROUNDING: {changed:g} % of the elements "
        f"change in the "
                   "merge", {"changed_percent": changed})  # fmt: skip


def sync_steps(f: Facts) -> Finding | None:
    """Steps with grad_norm and gap: only a step with a gradient is evidence."""
    rows = [(int(n), float(g), float(v)) for n, g, v in re.findall(
        rf"step\s*(\d+)\s+grad_norm\s*=\s*({NUMBER})\s+gap\s*=\s*({NUMBER})", f.text)]  # fmt: skip
    if not rows:
        return None
    active = [r for r in rows if r[1] > 0]
    if not active:
        return Finding("weights-differ/sync-untested", 1.0, f"not testable yet (grad_norm=0) at step {rows[-1][0]}")
    quiet = [r[2] for r in rows if r[1] == 0] or [active[0][2]]
    if active[0][2] > 3 * max(quiet):
        return Finding("weights-differ/not-synced", 0.85, f"gap {max(quiet):g} before, {active[0][2]:g} at step "
                       f"{active[0][0]}, the first with a gradient")  # fmt: skip
    return Finding("weights-differ/sync-ok", 0.85, f"SYNC_OK: verdict only after step {active[0][0]}, the first with a "
                   f"gradient (grad_norm={active[0][1]:g}, gap={active[0][2]:g})")  # fmt: skip


def arms(f: Facts) -> Finding | None:
    """Two arms of a control: sync on, and off for a step."""
    found = re.findall(rf"sync\s+(on|off)[^\n;:]*:\s*mean\s*=\s*({NUMBER})(?:\s+max\s*=\s*({NUMBER}))?", f.text)
    arms_found = {kind: float(mean) for kind, mean, _ in found}
    if set(arms_found) != {"on", "off"}:
        return None
    apart = arms_found["off"] / max(arms_found["on"], 1e-12)
    if apart < 1.5:
        return Finding("weights-differ/sync-untested", 0.6, f"the arms do not separate: {arms_found['on']:g} and "
                       f"{arms_found['off']:g}", level="unknown")  # fmt: skip
    return Finding("weights-differ/not-synced", 0.9, f"detector separates A and B: sync on {arms_found['on']:g}, off "
                   f"{arms_found['off']:g} ({apart:.1f} "
                       f"times)", {"on": arms_found["on"], "off": arms_found["off"]})  # fmt: skip


SYNC_RULES: tuple[Callable[[Facts], Finding | None], ...] = (
    conversion, identity_text, layout, resumed, cached, bucket, lora_twice, tied_head, call_order, update_not_loaded,
    rejected, adapter_unused, adapter_not_applied, lora_rounding, sync_steps, arms,
)  # fmt: skip
