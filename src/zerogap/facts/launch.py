"""Launch commands of Miles, slime, SGLang, vLLM, TRL and verl: read from scripts, logs, YAML and argv, never run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zerogap.errors import UsageError
from zerogap.facts import flags as flag_reader
from zerogap.facts import runlog
from zerogap.facts.fact import Fact, Facts
from zerogap.facts.launchfiles import server_groups, side_by_side, side_files
from zerogap.facts.pairs import json_object, parse_yaml, yaml_settings
from zerogap.facts.programs import environment_facts, environment_of, find_program, positional_model, whose_train
from zerogap.facts.shell import Command, read_script
from zerogap.facts.shellwords import HIDDEN, SCRIPT_LIMIT, Budget, Word

_NESTING = 4
_TRAINERS = ("miles", "slime", "trl", "verl", "torchtitan", "zerogap")
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
        text = runlog.load(path)
    except OSError as error:
        raise UsageError(f"--launch {path}: {error.strerror or error}") from None
    if path.suffix in (".yaml", ".yml"):
        if len(text) > SCRIPT_LIMIT:
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
    place = find_program(words)
    if place is None:
        if depth < _NESTING:
            _inner(words, reading, depth)
        return
    program, index = place
    environment = {**exported, **command.env, **environment_of(words[:index])}
    arguments = flag_reader.parse(words[index:], "miles" if program == "train.py" else program, reading.name)
    framework: str | None = program
    if program == "train.py":
        program, framework = whose_train(arguments, words, environment)
        if program == "":
            return
    elif program == "script":
        if not _TRL_FLAGS & {flag.name for flag in arguments.flags}:
            return
        program = framework = "trl"
        arguments = flag_reader.parse(words[index:], "trl", reading.name)
    facts = flag_reader.facts_of(arguments, program)
    facts = environment_facts(environment, reading.name).over(facts)
    facts = side_files(arguments, program, facts, reading.folder)
    if program in ("sglang", "vllm") and words[index:] and not words[index].text.startswith("-"):
        facts = positional_model(words[index], reading.name).over(facts)
    reading.found.append(_Found(program, flag_reader.implied(facts, program), framework))


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


def _configuration(body: object, name: str) -> _Reading:
    """A configuration file by itself: TRL's, verl's, a server-group file, or SGLang's server arguments as JSON."""
    reading = _Reading(name, None)
    if not isinstance(body, dict):
        raise UsageError(f"{name}: holds no mapping; it is no launch configuration")
    inner = body.get("server_args")
    settings = yaml_settings(inner if isinstance(inner, dict) else body)
    names = {flag_reader.plain(key) for key in settings}
    if isinstance(body.get("sglang"), list):
        facts, program = server_groups(body, name), "sglang"
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
    for program, stated in _engines(log, name):
        resolved = Facts({"engine.kind": Fact(program, name)}).over(flag_reader.implied(stated, program))
        if not reading.found:
            resolved = Facts({"launch.framework": Fact(program, name)}).over(resolved)
        facts = resolved.over(facts)
    return facts


def _engines(log: runlog.RunLog, name: str) -> list[tuple[str, Facts]]:
    """SGLang prints one line per engine, which stand side by side; vLLM prints several lines about one engine."""
    sglang = [facts for program, facts in log.engines if program == "sglang"]
    others = [(program, facts) for program, facts in log.engines if program != "sglang"]
    if len(sglang) > 1:
        sglang = [side_by_side(sglang, f"{name}, {len(sglang)} engines")]
    return [*(("sglang", facts) for facts in sglang), *others]


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
