"""Whose command it is, and the environment that its launcher sets."""

from __future__ import annotations

import re
from collections.abc import Sequence

from zerogap.facts import flags as flag_reader
from zerogap.facts.fact import Fact, Facts
from zerogap.facts.pairs import json_object
from zerogap.facts.shellwords import HIDDEN, Word

_MILES_ONLY = frozenset(
    ("train-backend", "true-on-policy-mode", "sglang-true-on-policy-contract", "recompute-logprobs-via-prefill")
)


def find_program(words: Sequence[Word]) -> tuple[str, int] | None:
    """Return whose command this is and where its arguments begin."""
    for index, word in enumerate(words):
        base = word.text.rsplit("/", 1)[-1]
        following = words[index + 1].text if index + 1 < len(words) else ""
        if base in ("train.py", "train_async.py"):
            return "train.py", index + 1
        if word.text.startswith("sglang.launch_server") or (base == "sglang" and following == "serve"):
            return "sglang", index + (2 if base == "sglang" else 1)
        if word.text.startswith("vllm.entrypoints.") or (base == "vllm" and following == "serve"):
            return "vllm", index + (2 if base == "vllm" else 1)
        if base.partition(":")[0] == "vllm-openai":
            return "vllm", index + 1  # the image starts the server itself
        if base == "trl" and following == "vllm-serve":
            return "vllm", index + 2
        if base == "trl" and re.fullmatch(r"grpo|rloo|online_dpo|gkd|gold|dpo|sft|kto|reward", following):
            return "trl", index + 2
        if re.match(r"verl\.\w+\.main|verl\.trainer\.\w+", word.text) or base in ("main_ppo.py", "main_dapo.py"):
            return "verl", index + 1
        if word.text.startswith("torchtitan.") or "/torchtitan/" in word.text:
            return "torchtitan", index + 1
        if base == "zerogap" and following == "train":
            return "zerogap", index + 2
        if base.endswith(".py") and HIDDEN not in base:
            return "script", index + 1
        if re.match(r"actor_rollout_ref\.", word.text):
            return "verl", index
    return None


def whose_train(
    arguments: flag_reader.Arguments, words: Sequence[Word], environment: dict[str, Word]
) -> tuple[str, str | None]:
    """``train.py`` is Miles's, slime's or somebody else's: its flags and paths tell."""
    names = {flag.name for flag in arguments.flags}
    text = " ".join([*(word.text for word in words), *(word.text for word in environment.values())]).lower()
    if names & _MILES_ONLY or re.search(r"\bmiles\b", text):
        return "miles", "miles"
    if re.search(r"\bslime\b", text):
        return "slime", "slime"
    if "hf-checkpoint" in names or any(name.startswith(("sglang-", "rollout-")) for name in names) or arguments.opaque:
        return "miles", None
    return ("torchtitan", "torchtitan") if any(name.startswith("job.") for name in names) else ("", None)


def environment_of(words: Sequence[Word]) -> dict[str, Word]:
    """Return the variables that a launcher sets: Ray's runtime environment, ``env A=1``, ``docker run -e A=1``."""
    environment: dict[str, Word] = {}
    for index, word in enumerate(words):
        head, equals, value = word.text.partition("=")
        if head == "--runtime-env-json":
            text = value if equals else words[index + 1].text if index + 1 < len(words) else ""
            body = json_object(text)
            variables = body.get("env_vars") if body else None
            if isinstance(variables, dict):
                for key, item in variables.items():
                    if isinstance(item, str):
                        environment[key] = Word(item, word.line, word.hidden)
            elif HIDDEN in text:
                for key in flag_reader.table()["environment"]:
                    environment[key] = Word(HIDDEN, word.line, word.hidden)
        elif equals and re.fullmatch(r"[A-Z][A-Z0-9_]*", head) and not word.text.startswith("-"):
            environment[head] = Word(value, word.line, word.hidden)
    return environment


def environment_facts(environment: dict[str, Word], name: str) -> Facts:
    """Return the variables that matter as facts."""
    known: dict[str, Fact] = {}
    unknown: dict[str, str] = {}
    for key in flag_reader.table()["environment"]:
        if word := environment.get(key):
            where = f"{name} line {word.line}" if word.line else name
            if HIDDEN in word.text:
                unknown[f"env.{key}"] = f"{where}: {', '.join(word.hidden) or 'its value'} is known to the run only"
            elif word.text:
                known[f"env.{key}"] = Fact(word.text[:200], where)
    return Facts(known, unknown)


def positional_model(word: Word, name: str) -> Facts:
    """Return the model that stands behind ``vllm serve`` without a flag."""
    if HIDDEN in word.text:
        return Facts(
            {}, {"engine.model": f"{name} line {word.line}: {', '.join(word.hidden)} is known to the run only"}
        )
    return Facts({"engine.model": Fact(word.text, f"{name} line {word.line}" if word.line else name)})
