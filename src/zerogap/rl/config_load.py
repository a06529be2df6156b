"""Reads, overrides, writes and compares run configurations; every mistake is one line that says what is allowed."""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from zerogap.errors import UsageError, nearest
from zerogap.rl.config import Config

_NOUNS = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read the TOML file ``path`` and apply ``section.key=value`` overrides.

    Raises:
        UsageError: one line that names the file or override, the key, what is allowed, and the nearest known name.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file; give a run configuration such as configs/quickstart.toml") from None
    except IsADirectoryError:
        raise UsageError(f"{path}: is a folder; give a run configuration (TOML file)") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: is not UTF-8 text; give a run configuration (TOML file)") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: is not valid TOML: {_one_line(str(error))}") from None
    return parse_config(raw, str(path), overrides)


def parse_config(raw: dict[str, Any], source: str, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration of the TOML document ``raw`` with ``overrides``; ``source`` names it in errors."""
    origins: dict[tuple[str, str], str] = {}
    for override in overrides:
        section, key, value = parse_override(override)
        table = raw.setdefault(section, {})
        if not isinstance(table, dict):
            raise UsageError(f"{source}: {section} must be a table ([{section}])")
        table[key] = value
        origins[section, key] = f"override '{override}'"
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise UsageError(_explain(error, raw, source, origins)) from None


def parse_override(text: str) -> tuple[str, str, Any]:
    """Split ``section.key=value``; the value is a TOML value, or a bare text when it is none.

    Raises:
        UsageError: not of that form, or no such section or key.
    """
    name, equals, value = text.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and key):
        raise UsageError(f"override '{text}': must be section.key=value, such as run.steps=20")
    if section not in Config.model_fields:
        raise UsageError(f"override '{text}': no section {section!r}{nearest(section, Config.model_fields)}")
    if key not in section_model(section).model_fields:
        raise UsageError(f"override '{text}': no key {section}.{key}{_nearest_key(section, key)}")
    return section, key, _toml_value(value.strip())


def section_model(section: str) -> type[BaseModel]:
    """Return the pydantic model of one section."""
    model = Config.model_fields[section].annotation
    assert isinstance(model, type)
    assert issubclass(model, BaseModel)
    return model


def keys() -> Iterator[tuple[str, str, FieldInfo]]:
    """Yield (section, key, field) of every key, in the order of the models."""
    for section in Config.model_fields:
        for key, field in section_model(section).model_fields.items():
            yield section, key, field


def allowed(field: FieldInfo) -> str:
    """Return in words what a key accepts, such as ``an integer, at least 1`` or ``'stop' or 'warn'``."""
    return _allowed(field.annotation, field.metadata)


def to_toml(config: Config) -> str:
    """Return every key as TOML that loads again to an equal configuration; an unset key becomes a comment."""
    lines = []
    for section in Config.model_fields:
        lines.append(f"[{section}]")
        table = getattr(config, section)
        for key in section_model(section).model_fields:
            value = getattr(table, key)
            lines.append(f"# {key} is unset" if value is None else f"{key} = {toml_text(value)}")
        lines.append("")
    return "\n".join(lines)


def toml_text(value: Any) -> str:
    """Return one value as TOML: bool, int, finite float, text, or a list of those."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        assert math.isfinite(value)
        text = repr(value)
        return text if any(mark in text for mark in ".e") else f"{text}.0"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return "[" + ", ".join(toml_text(item) for item in value) + "]"


def config_digest(config: Config) -> str:
    """Return a hex digest over the keys that can change the bits of the trained weights: equal digest, equal run."""
    return hashlib.blake2b(json.dumps(_bit_values(config), sort_keys=True).encode(), digest_size=16).hexdigest()


def bit_differences(old: Config, new: Config) -> list[str]:
    """Return ``section.key: old, now new`` for each key that may not differ between a run and its resumption."""
    before, after = _bit_values(old), _bit_values(new)
    return [
        f"{name}: {_show(before.get(name))}, now {_show(after.get(name))}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]


def _bit_values(config: Config) -> dict[str, Any]:
    values = {}
    for section, key, field in keys():
        extra = field.json_schema_extra
        decays_by_steps = (section, key) == ("run", "steps") and config.train.schedule != "constant"
        if decays_by_steps or not (isinstance(extra, dict) and extra.get("bits") is False):
            values[f"{section}.{key}"] = getattr(getattr(config, section), key)
    return values


def _toml_value(text: str) -> Any:
    try:
        document = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return document["value"] if list(document) == ["value"] else text


def _nearest_key(section: str, key: str) -> str:
    """Name the nearest keys: of this section, else the same or a similar key of another section."""
    here = nearest(key, section_model(section).model_fields)
    if here:
        return here
    full = [f"{other}.{name}" for other, name, _ in keys()]
    elsewhere = [name for name in full if name.split(".")[1] == key]
    if elsewhere:
        return f"; did you mean {', '.join(repr(name) for name in elsewhere)}?"
    return nearest(f"{section}.{key}", full) or f"; known: {', '.join(section_model(section).model_fields)}"


def _explain(error: ValidationError, raw: dict[str, Any], source: str, origins: dict[tuple[str, str], str]) -> str:
    problems = error.errors(include_url=False)
    # An unknown key is the likely cause of a missing one, so it comes first.
    problems.sort(key=lambda problem: problem["type"] != "extra_forbidden")
    first = problems[0]
    path = tuple(str(part) for part in first["loc"])
    origin = origins.get((path[0], path[1]), source) if len(path) > 1 else source
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{origin}: {_one_line(_problem(first['type'], path, first, raw))}{more}"


def _problem(kind: str, path: tuple[str, ...], detail: Any, raw: dict[str, Any]) -> str:
    if kind == "between":
        return str(detail["msg"])
    section, key = path[0], path[1] if len(path) > 1 else None
    if key is None:
        if kind == "extra_forbidden":
            return f"no section [{section}]{nearest(section, Config.model_fields) or _known_sections()}"
        if kind == "missing":
            needed = [name for name, field in section_model(section).model_fields.items() if field.is_required()]
            return f"section [{section}] is missing; it needs {' and '.join(needed)}"
        return f"{section} must be a table ([{section}]), not {_show(raw.get(section))}"
    name = f"{section}.{key}"
    if kind == "extra_forbidden":
        return f"no key {name}{_nearest_key(section, key)}"
    field = section_model(section).model_fields[key]
    if kind == "missing" and len(path) == 2:
        return f"{name} is missing; it must be {allowed(field)}: {field.description}"
    if kind == "text":
        return f"{name} = {_show(raw[section][key])}: {detail['msg']}"
    return f"{name} = {_show(raw[section][key])}: must be {allowed(field)} ({field.description})"


def _known_sections() -> str:
    return f"; known: {', '.join(Config.model_fields)}"


def _allowed(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _allowed(arguments[0], [*arguments[1:], *metadata])
    if origin is Literal:
        return " or ".join(repr(item) for item in arguments)
    if origin in (Union, types.UnionType):
        return _allowed(next(item for item in arguments if item is not type(None)), metadata)
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return f"a list, each {_allowed(arguments[0])}"
        return f"a list of {len(arguments)}, each {_allowed(arguments[0])}"
    flat = [part for item in metadata for part in getattr(item, "metadata", [item])]
    if any(getattr(part, "func", None) is not None for part in flat):
        return "a text 'module:function'"
    return ", ".join([_NOUNS[annotation], *(_bound(part) for part in flat if _bound(part))])


def _bound(part: Any) -> str:
    match part:
        case annotated_types.Ge(ge=limit):
            return f"at least {limit}"
        case annotated_types.Gt(gt=limit):
            return f"above {limit}"
        case annotated_types.Le(le=limit):
            return f"at most {limit}"
        case annotated_types.Lt(lt=limit):
            return f"below {'2^63' if limit == 2**63 else limit}"
        case annotated_types.MinLen():
            return "not empty"
    return ""


def _show(value: Any) -> str:
    if value is None:
        return "unset"
    text = toml_text(value) if isinstance(value, bool | int | str) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _one_line(text: str) -> str:
    return " ".join(text.split())
