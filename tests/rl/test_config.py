import copy
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from zerogap.errors import UsageError
from zerogap.rl.config import Config
from zerogap.rl.config_load import (
    allowed,
    bit_differences,
    config_digest,
    keys,
    load_config,
    parse_config,
    parse_override,
    to_toml,
    toml_text,
)
from zerogap.rl.pages import configuration_page, metrics_page
from zerogap.rl.setup import step_settings

ROOT = Path(__file__).parents[2]
BASE = {"run": {"dir": "runs/x", "steps": 3}, "model": {"path": "builtin:tiny-qwen3"}}


def parse(*overrides: str, **sections: dict[str, object]) -> Config:
    return parse_config({**copy.deepcopy(BASE), **sections}, "run.toml", overrides)


def refusal(*overrides: str, **sections: dict[str, object]) -> str:
    with pytest.raises(UsageError) as caught:
        parse(*overrides, **sections)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("name", ["quickstart.toml", "smollm2-135m.toml"])
def test_shipped_configurations_load(name: str) -> None:
    assert load_config(ROOT / "configs" / name).run.steps >= 2


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.temperture=1", ["rollout.temperture", "'temperature'"]),
        ("rolout.top_p=1", ["'rolout'", "'rollout'"]),
        ("train.top_p=1", ["'rollout.top_p'", "'eval.top_p'"]),
        ("rollout.top_p=1.5", ["rollout.top_p = 1.5", "above 0, at most 1"]),
        ("run.steps=abc", ['"abc"', "an integer, at least 1"]),
        ("run.steps=true", ["run.steps = true", "an integer"]),
        ("run.steps=2.0", ["run.steps = 2.0", "an integer"]),
        ("train.eps=nan", ["train.eps = nan", "a number, above 0"]),
        ("train.max_grad_norm=inf", ["train.max_grad_norm = inf"]),
        ("train.betas=[0.9]", ["train.betas = [0.9]", "a list of 2"]),
        ("train.betas=[0.9, 1.0]", ["train.betas", "below 1"]),
        ("model.dtype=float16", ['"float16"', "'float32' or 'bfloat16'"]),
        ("task.reward=exact", ["task.reward", "module:function"]),
        ("task.reward=a b:c", ["task.reward", "module:function"]),
        ('rollout.stop=["a", ""]', ["rollout.stop", "not empty"]),
        ("gap.gate=nope", ["'stop' or 'warn'"]),
        ("engine.kv_bytes=0", ["engine.kv_bytes = 0", "at least 1"]),
        ("engine.num_pages=0", ["engine.num_pages = 0", "at least 1"]),
        ("rollout.temperature=0", ["rollout.temperature", "greedy"]),
        ("rollout.temperature=-1", ["rollout.temperature = -1", "at least 0"]),
        ("rollout.min_tokens=99", ["rollout.min_tokens", "rollout.max_tokens = 16"]),
        ("train.updates_per_rollout=129", ["train.updates_per_rollout", "rollout.samples_per_prompt = 128"]),
        ("train.norm_length=99", ["train.norm_length", "no meaning", "'token-mean'"]),
        ("task.name=jsonl", ["task.path", "missing"]),
        ("task.path=x.jsonl", ["task.path", "jsonl"]),
        ("run.steps", ["section.key=value"]),
        ("steps=3", ["section.key=value"]),
    ],
)
def test_a_bad_override_is_one_line_that_says_what_is_allowed(override: str, words: list[str]) -> None:
    text = refusal(override)
    for word in words:
        assert word in text


def test_an_error_names_the_file_or_the_override_it_came_from() -> None:
    assert refusal(rollout={"top_p": 2.0}).startswith("run.toml: rollout.top_p = 2.0")
    assert refusal("rollout.top_p=2.0").startswith("override 'rollout.top_p=2.0': rollout.top_p = 2.0")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({}, "section [run] is missing; it needs dir and steps"),
        ({"run": 3}, "run must be a table"),
        ({"mdel": {}}, "no section [mdel]; did you mean 'model'?"),
        ({"run": {"dir": "x", "step": 4}, "model": {"path": "p"}}, "no key run.step; did you mean 'steps'?"),
        ({"run": {"dir": "x"}, "model": {"path": "p"}}, "run.steps is missing"),
        ({"run": {"dir": "x", "steps": [1, 2]}, "model": {"path": "p"}}, "run.steps = [1, 2]: must be an integer"),
    ],
)
def test_a_bad_document_is_one_line(raw: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_config(raw, "run.toml")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unreadable_files(tmp_path: Path) -> None:
    broken, binary = tmp_path / "broken.toml", tmp_path / "binary.toml"
    broken.write_text("[run\nsteps = 3")
    binary.write_bytes(b"\xff\xfe\x00")
    for path, words in [
        (tmp_path / "none.toml", "no such file"),
        (tmp_path, "is a folder"),
        (broken, "not valid TOML"),
        (binary, "not UTF-8"),
    ]:
        with pytest.raises(UsageError, match=words) as caught:
            load_config(path)
        assert str(caught.value).startswith(str(path))
        assert "\n" not in str(caught.value)


def test_an_override_is_a_toml_value_or_a_bare_text() -> None:
    config = parse('rollout.stop=["\\n", "b"]', "run.dir=runs/a=b", "eval.temperature=0", 'gap.gate="warn"')
    assert config.rollout.stop == ("\n", "b")
    assert config.run.dir == "runs/a=b"
    assert config.eval.temperature == 0
    assert config.gap.gate == "warn"
    assert parse_override("run.dir=a\nb = 1") == ("run", "dir", "a\nb = 1")


def test_an_update_may_have_less_than_a_prompt() -> None:
    """Completions are dealt to the updates, not prompts."""
    assert parse("train.updates_per_rollout=128").train.updates_per_rollout == 128


def test_norm_length_is_the_longest_completion_unless_set() -> None:
    aggregation = "train.aggregation=sequence-mean-token-sum-norm"
    assert step_settings(parse(aggregation, "rollout.max_tokens=7")).loss.norm_length == 7
    assert step_settings(parse(aggregation, "train.norm_length=99")).loss.norm_length == 99


def test_the_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        parse().run.steps = 4  # type: ignore[misc]


@given(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1),
    st.floats(0, 10, exclude_min=True),
    st.lists(st.text(st.characters(exclude_characters="\0\ufffd", exclude_categories=["Cs"]), min_size=1), max_size=4),
    st.integers(0, 2**63 - 1),
    st.none() | st.integers(1, 9),
)
def test_the_resolved_configuration_loads_again_to_the_same(
    directory: str, rate: float, stop: list[str], seed: int, pages: int | None
) -> None:
    sections = {
        "run": {"dir": directory, "steps": 3, "seed": seed},
        "train": {"learning_rate": rate},
        "rollout": {"stop": stop},
        "engine": {} if pages is None else {"num_pages": pages},
    }
    config = parse(**sections)
    again = parse_config(tomllib.loads(to_toml(config)), "config.toml")
    assert again == config
    assert config_digest(again) == config_digest(config)


@given(st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text())
def test_toml_text_round_trips(value: object) -> None:
    back = tomllib.loads(f"v = {toml_text(value)}")["v"]
    assert back == value
    assert type(back) is type(value)


def test_the_digest_changes_with_the_keys_that_change_bits_and_only_with_those() -> None:
    base = parse()
    same = parse(
        "run.dir=elsewhere", "run.steps=9", "engine.page_size=1", "gap.gate=warn", "reward.workers=7", "eval.every=1"
    )
    assert config_digest(same) == config_digest(base)
    assert bit_differences(base, same) == []
    for override in [
        "run.seed=1",
        "train.learning_rate=0.5",
        "rollout.top_k=3",
        "reward.on_error=-1",
        "train.clip_high=0.3",
    ]:
        assert config_digest(parse(override)) != config_digest(base)
    assert bit_differences(base, parse("run.seed=1")) == ["run.seed: 0, now 1"]


def test_the_number_of_steps_matters_only_to_a_schedule_that_ends_there() -> None:
    assert bit_differences(parse(), parse("run.steps=4")) == []
    assert bit_differences(parse("train.schedule=cosine"), parse("train.schedule=cosine", "run.steps=4")) == [
        "run.steps: 3, now 4"
    ]


def test_every_key_says_what_it_accepts_and_means() -> None:
    for section, key, field in keys():
        assert allowed(field), (section, key)
        assert field.description, (section, key)


def test_reference_pages_are_up_to_date() -> None:
    for name, page in [("configuration.md", configuration_page()), ("metrics.md", metrics_page())]:
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == page, "run scripts/make_reference_pages.py"
