"""Launch commands of Miles, slime, SGLang, vLLM, TRL and verl: read from scripts, logs, YAML and argv, never run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zerogap.errors import UsageError
from zerogap.facts import flags as flag_reader
from zerogap.facts import runlog
from zerogap.facts.fact import EachOf, Fact, Facts, Value
from zerogap.facts.pairs import json_object, parse_yaml, read_yaml, yaml_settings
from zerogap.facts.shell import Command, read_script
from zerogap.facts.shellwords import HIDDEN, SCRIPT_LIMIT, Budget, Word

_NESTING = 4
_TRAINERS = ("miles", "slime", "trl", "verl", "torchtitan", "zerogap")
_MILES_ONLY = frozenset(
    ("train-backend", "true-on-policy-mode", "sglang-true-on-policy-contract", "recompute-logprobs-via-prefill")
)
_TRL_FLAGS = frozenset(("use-vllm", "vllm-mode", "vllm-server-base-url", "vllm-importance-sampling-correction"))
_SNAPSHOT = re.compile(r"^### \d+\s*$", re.MULTILINE)


@dataclass
class _Found:
    """One launch command: whose, and its facts."""

    program: str
    facts: Facts
    framework: str | None


@dataclass
class _Reading:
    """What one reading of a launch gathers.

    Attributes:
        name: what to call the text in evidence.
        folder: where relative files lie, or None.
    """

    name: str
    folder: Path | None
    found: list[_Found] = field(default_factory=list)
    budget: Budget = field(default_factory=Budget)


def read_launch(path: Path) -> Facts:
    """Return the facts of a launch file: a shell script, a log, a YAML or JSON configuration.

    Raises:
        UsageError: it cannot be read, is none of these, or starts nothing that is known.
    """
    if not path.is_file():
        raise UsageError(f"--launch {path}: no such file; name a script, a log or a configuration")
    if path.suffix == ".py":
        raise UsageError(
            f"--launch {path}: a Python launcher builds its command as it runs; give the log with its EXEC: line, "
            "or call zerogap.check(launch=train_args) in it"
        )
    name = path.name
    try:
        with open(path, "rb") as stream:
            data = stream.read(runlog.LIMIT)
    except OSError as error:
        raise UsageError(f"--launch {path}: {error.strerror or error}") from None
    text = data.decode("utf-8", "replace")
    if path.suffix in (".yaml", ".yml"):
        if len(data) > SCRIPT_LIMIT:
            raise UsageError(f"--launch {path}: larger than {SCRIPT_LIMIT // 2**20} MiB; it is no launch configuration")
        return _finish(_configuration(parse_yaml(text, name), name))
    return read_text(text, name, path.resolve().parent)


def read_text(text: str, name: str = "launch", folder: Path | None = None) -> Facts:
    """Return the facts of launch text: a script, a command line, a log, or a JSON object of server arguments."""
    if text.lstrip().startswith("{") and (body := json_object(text)) is not None:
        return _finish(_configuration(body, name))
    if runlog.is_log(text):
        return _from_log(text, name)
    reading = _Reading(name, folder)
    _script(_plain_snapshot(text), reading, 0, ())
    if not reading.found:
        raise UsageError(
            f"{name}: no launch command of Miles, slime, SGLang, vLLM, TRL or verl was found in it; "
            "give the script that holds it, or the command after --"
        )
    return _finish(reading)


def read_command(argv: Sequence[str]) -> Facts:
    """Return the facts of a command given word by word, as after ``--``."""
    if any(HIDDEN in word for word in argv):
        raise UsageError("the command holds NUL bytes")
    if len(argv) == 1 and re.search(r"\s", argv[0]):
        return read_text(argv[0], "command")
    reading = _Reading("command", Path.cwd())
    _command(Command(tuple(Word(word, 0) for word in argv), {}, 0, False), {}, reading, 0)
    if not reading.found:
        raise UsageError(
            f"the command {argv[0][:80]!r} … starts nothing of Miles, slime, SGLang, vLLM, TRL or verl that is known"
        )
    return _finish(reading)


def _plain_snapshot(text: str) -> str:
    """Launch snapshots list one word or flag a line under ``### N``; as a script each block is one command."""
    if not _SNAPSHOT.search(text):
        return text
    blocks = []
    for block in _SNAPSHOT.split(re.sub(r"<([A-Z_]+)>", r"\1", text)):
        lines = [line.strip() for line in block.splitlines() if line.strip() and not line.startswith("# ")]
        blocks.append(" ".join(line.replace("\\n", " ") if line.startswith('"') else line for line in lines))
    return "\n".join(blocks)


# -- scripts and commands


def _script(text: str, reading: _Reading, depth: int, arguments: Sequence[Word]) -> None:
    script = read_script(text, reading.name, reading.folder, arguments, reading.budget)
    for command in script.commands:
        _command(command, script.exported, reading, depth)


def _command(command: Command, exported: dict[str, Word], reading: _Reading, depth: int) -> None:
    words = command.words
    place = _program(words)
    if place is None:
        if depth < _NESTING:
            _inner(words, reading, depth)
        return
    program, index = place
    environment = {**exported, **command.env, **_environment(words[:index])}
    arguments = flag_reader.parse(words[index:], "miles" if program == "train.py" else program, reading.name)
    framework: str | None = program
    if program == "train.py":
        program, framework = _whose_train(arguments, words, environment)
        if program == "":
            return
    elif program == "script":
        if not _TRL_FLAGS & {flag.name for flag in arguments.flags}:
            return
        program = framework = "trl"
        arguments = flag_reader.parse(words[index:], "trl", reading.name)
    facts = flag_reader.facts_of(arguments, program)
    facts = _environment_facts(environment, reading.name).over(facts)
    facts = _side_files(arguments, program, facts, reading)
    if program in ("sglang", "vllm") and words[index:] and not words[index].text.startswith("-"):
        facts = _positional_model(words[index], reading.name).over(facts)
    reading.found.append(_Found(program, flag_reader.implied(facts, program), framework))


def _program(words: Sequence[Word]) -> tuple[str, int] | None:
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


def _whose_train(
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


def _inner(words: Sequence[Word], reading: _Reading, depth: int) -> None:
    """``bash -c TEXT`` and ``bash FILE`` hold commands of their own."""
    for index, word in enumerate(words):
        base = word.text.rsplit("/", 1)[-1]
        following = words[index + 1] if index + 1 < len(words) else None
        if base in ("bash", "sh") and following is not None:
            if re.fullmatch(r"-\w*c", following.text) and index + 2 < len(words):
                inner = words[index + 2].text
                if HIDDEN not in inner:
                    _script(inner, reading, depth + 1, ())
                return
            if not following.text.startswith("-"):
                _file(following, words[index + 2 :], reading, depth)
                return
        if index == 0 and base.endswith((".sh", ".bash")):
            _file(word, words[1:], reading, depth)
            return


def _file(word: Word, arguments: Sequence[Word], reading: _Reading, depth: int) -> None:
    if HIDDEN in word.text or reading.folder is None:
        return
    path = reading.folder / word.text
    if reading.budget.may_read(path):
        inner = _Reading(path.name, path.resolve().parent, reading.found, reading.budget)
        _script(path.read_text(encoding="utf-8", errors="replace"), inner, depth + 1, arguments)


def _environment(words: Sequence[Word]) -> dict[str, Word]:
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


def _environment_facts(environment: dict[str, Word], name: str) -> Facts:
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


def _positional_model(word: Word, name: str) -> Facts:
    if HIDDEN in word.text:
        return Facts(
            {}, {"engine.model": f"{name} line {word.line}: {', '.join(word.hidden)} is known to the run only"}
        )
    return Facts({"engine.model": Fact(word.text, f"{name} line {word.line}" if word.line else name)})


# -- files that a command names


def _side_files(arguments: flag_reader.Arguments, program: str, facts: Facts, reading: _Reading) -> Facts:
    if program in ("miles", "slime") and (named := arguments.last(["sglang-config"])):
        flag = named[-1]
        body, why = _named_yaml(flag, reading)
        return (Facts({}, _engine_unknown(why)) if body is None else _server_groups(body, flag.where)).over(facts)
    if program in ("trl", "sglang", "vllm") and (named := arguments.last(["config"])):
        flag = named[-1]
        body, why = _named_yaml(flag, reading)
        if body is None:
            # A flag wins over the file, but what no flag sets may be set in it.
            defaults = {name: why for name, fact in facts.items() if fact.source.startswith("not set;")}
            return Facts({}, defaults).over(facts)
        stated = flag_reader.facts_of(
            flag_reader.from_mapping(yaml_settings(body), str(flag.value)), program, defaults=False
        )
        explicit = {name: fact for name, fact in facts.items() if not fact.source.startswith("not set;")}
        return Facts(explicit, facts.unknown).over(stated.over(facts))
    return facts


def _named_yaml(flag: flag_reader.Flag, reading: _Reading) -> tuple[object | None, str]:
    value = flag.value or ""
    why = f"{flag.where}: --{flag.name} {value.replace(HIDDEN, '…')} may set it, and that file was not read"
    if not value or HIDDEN in value or reading.folder is None or not (reading.folder / value).is_file():
        return None, why
    return read_yaml(reading.folder / value), ""


def _engine_unknown(why: str) -> dict[str, str]:
    return {row["fact"]: why for row in flag_reader.rows("sglang")}


def _server_groups(body: object, where: str) -> Facts:
    """Return a ``--sglang-config`` file's overrides for the trained models; unequal groups stand side by side."""
    models = body.get("sglang") if isinstance(body, dict) else None
    if not isinstance(models, list):
        return Facts({}, _engine_unknown(f"{where}: that file has no `sglang:` list of models"))
    groups: list[Facts] = []
    for model in models[:1000]:
        if not isinstance(model, dict) or model.get("update_weights") is False:
            continue
        listed = model.get("server_groups")
        for group in listed[:1000] if isinstance(listed, list) else []:
            if isinstance(group, dict) and group.get("worker_type") != "placeholder":
                settings = yaml_settings(group.get("overrides"))
                groups.append(flag_reader.facts_of(flag_reader.from_mapping(settings, where), "sglang", defaults=False))
    known: dict[str, Fact] = {}
    unknown: dict[str, str] = {}
    for name in dict.fromkeys(name for group in groups for name in group):
        values = tuple(dict.fromkeys(group[name].value for group in groups if name in group))
        if len(values) == 1 and all(name in group for group in groups):
            known[name] = Fact(values[0], f"{where}, overrides of every server group")
        elif all(name in group for group in groups):
            settled: tuple[Value, ...] = tuple(value for value in values if not isinstance(value, EachOf))
            known[name] = Fact(EachOf(settled), f"{where}, overrides of {len(groups)} server groups")
        else:
            unknown[name] = f"{where}: only some server groups override it"
    return Facts(known, unknown)


def _configuration(body: object, name: str) -> _Reading:
    """A configuration file by itself: TRL's, verl's, a server-group file, or SGLang's server arguments as JSON."""
    reading = _Reading(name, None)
    if not isinstance(body, dict):
        raise UsageError(f"{name}: holds no mapping; it is no launch configuration")
    inner = body.get("server_args")
    settings = yaml_settings(inner if isinstance(inner, dict) else body)
    names = {flag_reader.plain(key) for key in settings}
    if isinstance(body.get("sglang"), list):
        facts, program = _server_groups(body, name), "sglang"
    elif any(key.startswith("actor-rollout-ref.") for key in names):
        program = "verl"
        facts = flag_reader.facts_of(flag_reader.from_mapping(settings, name), program)
    elif {"model-path", "attention-backend"} <= names:
        program = "sglang"
        facts = flag_reader.facts_of(flag_reader.from_mapping(settings, name), program, resolved=True)
    elif names & {"model-name-or-path", "use-vllm", "num-generations", "vllm-mode"}:
        program = "trl"
        facts = flag_reader.facts_of(flag_reader.from_mapping(settings, name), program)
    else:
        raise UsageError(f"{name}: neither a TRL, verl or --sglang-config file nor SGLang server arguments")
    reading.found.append(_Found(program, flag_reader.implied(facts, program), program))
    return reading


# -- logs


def _from_log(text: str, name: str) -> Facts:
    log = runlog.read(text, name)
    reading = _Reading(name, None)
    for line, command in log.commands:
        inner = _Reading(f"{name} line {line} (EXEC)", None, reading.found, reading.budget)
        _script(command, inner, 0, ())
    if not reading.found and not log.engines:
        raise UsageError(f"{name}: a log, but no line of it shows a launch command or an engine's arguments")
    facts = _finish(reading) if reading.found else Facts({"launch.given": Fact(True, name)})
    for program, stated in log.engines:
        resolved = Facts({"engine.kind": Fact(program, name)}).over(flag_reader.implied(stated, program))
        if not reading.found:
            resolved = Facts({"launch.framework": Fact(program, name)}).over(resolved)
        facts = resolved.over(facts)
    return facts


# -- putting commands together


def _finish(reading: _Reading) -> Facts:
    trainers = [found for found in reading.found if found.program in _TRAINERS]
    engines = [found for found in reading.found if found.program not in _TRAINERS]
    facts = _merge([found.facts for found in engines]).over(_merge([found.facts for found in trainers]))
    given = {"launch.given": Fact(True, reading.name)}
    lead = (trainers or engines)[0]
    unknown: dict[str, str] = {}
    if lead.framework:
        given["launch.framework"] = Fact(lead.framework, reading.name)
    else:
        unknown["launch.framework"] = (
            f"{reading.name}: train.py with flags of both Miles and slime; nothing names either"
        )
    kind = next((found.program for found in engines), "sglang" if lead.program in ("miles", "slime") else None)
    if kind:
        given["engine.kind"] = Fact(kind, reading.name)
    return Facts(given, unknown).over(facts)


def _merge(several: list[Facts]) -> Facts:
    """Put the facts of several commands together; where they differ, which one counts is unknown."""
    merged = Facts()
    for facts in several:
        unknown = dict(facts.unknown)
        for name in facts:
            if name in merged and merged[name].value != facts[name].value:
                unknown[name] = f"two launch commands differ: {merged[name].source}, and {facts[name].source}"
        known = {name: fact for name, fact in facts.items() if name not in unknown and name not in merged.unknown}
        merged = Facts(known, {**unknown, **merged.unknown}).over(merged)
    return merged
