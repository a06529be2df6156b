"""Files that a launch names: ``--config`` of a trainer or engine, and ``--sglang-config`` with its server groups."""

from __future__ import annotations

from pathlib import Path

from zerogap.facts import flags as flag_reader
from zerogap.facts.fact import EachOf, Fact, Facts, Value
from zerogap.facts.pairs import read_yaml, yaml_settings
from zerogap.facts.shellwords import HIDDEN


def side_files(arguments: flag_reader.Arguments, program: str, facts: Facts, folder: Path | None) -> Facts:
    """Return a command's facts with those of the files that it names; one that cannot be read leaves unknowns.

    Args:
        arguments: the command's flags.
        program: whose they are.
        facts: what the flags tell.
        folder: where relative files lie, or None.
    """
    if program in ("miles", "slime") and (named := arguments.last(["sglang-config"])):
        flag = named[-1]
        body, why = _named_yaml(flag, folder)
        return (Facts({}, _engine_unknown(why)) if body is None else server_groups(body, flag.where)).over(facts)
    if program in ("trl", "sglang", "vllm") and (named := arguments.last(["config"])):
        flag = named[-1]
        body, why = _named_yaml(flag, folder)
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


def _named_yaml(flag: flag_reader.Flag, folder: Path | None) -> tuple[object | None, str]:
    value = flag.value or ""
    why = f"{flag.where}: --{flag.name} {value.replace(HIDDEN, '…')} may set it, and that file was not read"
    if not value or HIDDEN in value or folder is None or not (folder / value).is_file():
        return None, why
    return read_yaml(folder / value), ""


def _engine_unknown(why: str) -> dict[str, str]:
    return {row["fact"]: why for row in flag_reader.rows("sglang")}


def server_groups(body: object, where: str) -> Facts:
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
    return side_by_side(groups, f"{where}, {len(groups)} server groups")


def side_by_side(groups: list[Facts], where: str) -> Facts:
    """Put the settings of several engines together: what differs stands side by side, and must hold for each."""
    known: dict[str, Fact] = {}
    unknown: dict[str, str] = {}
    for name in dict.fromkeys(name for group in groups for name in group):
        values = tuple(dict.fromkeys(group[name].value for group in groups if name in group))
        settled: tuple[Value, ...] = tuple(value for value in values if not isinstance(value, EachOf))
        if not all(name in group for group in groups):
            unknown[name] = f"{where}: only some of them set it"
        elif len(values) == 1:
            known[name] = next(group[name] for group in groups)
        else:
            known[name] = Fact(EachOf(settled), where)
    return Facts(known, unknown)
