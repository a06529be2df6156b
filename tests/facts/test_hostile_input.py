"""Hostile launches, logs and configurations: exit 2 or unknown, nothing runs, nothing hangs, no traceback."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zerogap.errors import UsageError
from zerogap.facts import runlog
from zerogap.facts.launch import read_command, read_launch, read_text
from zerogap.facts.pairs import call_pairs, flatten, parse_yaml, split_top, yaml_settings
from zerogap.facts.shell import read_script

_TRAIN = "python train.py --train-backend fsdp "
SECONDS = 2.0

HOSTILE: dict[str, str | bytes] = {
    "a line of 10 MB": _TRAIN + "a" * 10_000_000,
    "words of 10 MB": _TRAIN + "a " * 5_000_000,
    "long line under the limit": _TRAIN + "--x " + "a" * 900_000,
    "an open single quote": _TRAIN + "'x",
    "an open double quote": _TRAIN + '"x',
    "an open substitution": _TRAIN + "$(x",
    "an open brace": _TRAIN + "${x",
    "an open array": "A=( a b c",
    "an open back quote": _TRAIN + "`x",
    "NUL bytes": _TRAIN.encode() + b"\0--x",
    "not UTF-8": bytes(range(1, 256)) * 1000,
    "self-referring variables": "A=$A$A\nB=${B:-${B}}\n" + _TRAIN + "$A $B",
    "doubling variables": "A0=aaaaaaaaaa\n"
    + "\n".join(f"A{i}={f'$A{i - 1}' * 10}" for i in range(1, 40))
    + f"\n{_TRAIN} $A39",
    "doubling arrays": "A0=(a a a a)\n"
    + "\n".join(f"A{i}=({f'${{A{i - 1}[@]}} ' * 10})" for i in range(1, 40))
    + f"\n{_TRAIN}",
    "nested defaults": "X=" + "${X:-" * 20000 + "}" * 20000 + f"\n{_TRAIN} $X",
    "nested substitutions": "X=$(" * 20000 + ")" * 20000 + f"\n{_TRAIN} $X",
    "brackets": "(" * 500_000 + f"\n{_TRAIN}",
    "ifs": "if " * 100_000 + f"\n{_TRAIN}",
    "here-documents": "cat <<EOF\n" * 20_000 + _TRAIN,
    "quotes in substitutions": _TRAIN + '"$(x "' * 20_000,
    "many arrays": "\n".join(f"A{i}=(--x {i})" for i in range(100_000)),
    "nested JSON": "vllm serve x --compilation-config '" + '{"a":' * 20_000 + "1" + "}" * 20_000 + "'",
    "nested dict repr": "vllm serve x --compilation-config '" + "{'a':" * 20_000 + "1" + "}" * 20_000 + "'",
    "JSON that is none": '{"a":' * 100_000,
    "nothing": "",
    "only spaces": " \n\t\n",
    "carriage returns": _TRAIN.replace(" ", "\r\n"),
    "escapes at the end": _TRAIN + "\\",
    "server arguments that never close": "server_args=ServerArgs(model_path='x', " + "a=[(" * 50_000,
    "server arguments with an open string": "server_args=ServerArgs(model_path='x, a=1",
    "an EXEC line with an open quote": "x.py:1 - EXEC: " + _TRAIN + "'x",
    "vLLM arguments that never close": "non-default args: {'model': {" + "'a': {" * 20_000,
    "many EXEC lines": f"EXEC: {_TRAIN}\n" * 2_000,
}


@pytest.mark.parametrize("title", HOSTILE)
def test_hostile_launch_gives_an_error_or_unknown_in_time(title: str, tmp_path: Path) -> None:
    content = HOSTILE[title]
    file = tmp_path / "run.sh"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    begin = time.process_time()
    try:
        facts = read_launch(file)
        assert facts["launch.given"].value is True
    except UsageError as error:
        _is_one_line(error)
    assert time.process_time() - begin < SECONDS


def _is_one_line(error: UsageError) -> None:
    assert "\n" not in str(error)
    assert len(str(error)) < 1000


def test_nothing_of_a_script_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("system", "popen", "execv", "execve", "fork", "posix_spawn"):
        if hasattr(os, name):
            monkeypatch.setattr(os, name, _forbidden(name))
    monkeypatch.setattr("subprocess.Popen", _forbidden("Popen"))
    script = tmp_path / "run.sh"
    script.write_text(
        "touch a; X=$(touch b); Y=`touch c`; eval 'touch d'; source <(touch e); trap 'touch f' EXIT\n"
        "python train.py --train-backend fsdp --x $(touch g) ${Y:=$(touch h)} <(touch i) > j 2>&1 | tee k\n"
    )
    facts = read_launch(script)
    assert facts["launch.framework"].value == "miles"
    assert "trainer.backend" in facts.unknown
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.sh"]


def _forbidden(name: str) -> Callable[..., None]:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError(f"{name} was called")

    return refuse


def test_scripts_that_name_themselves_end(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("source ./run.sh\nsource ./run.sh\nbash run.sh\nbash run.sh\n" + _TRAIN)
    begin = time.process_time()
    read_launch(script)
    assert time.process_time() - begin < SECONDS


YAML = {
    "deep lists": "use_vllm: true\na: " + "[" * 5000 + "]" * 5000,
    "a tag that runs code": "use_vllm: !!python/object/apply:os.system ['touch ran']",
    "not YAML": "use_vllm: [",
    "a list": "- a\n- b",
    "a text": "hello",
    "nothing": "",
    "NUL": "a: \0",
    "numbers as keys": "1: 2\n3: {4: 5}",
}


@pytest.mark.parametrize("title", YAML)
def test_hostile_yaml(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "x.yaml"
    file.write_text(YAML[title])
    with pytest.raises(UsageError):
        read_launch(file)
    assert not (tmp_path / "ran").exists()


def test_yaml_that_doubles_is_not_expanded() -> None:
    names = "abcdefghij"
    lines = ["use_vllm: true", "a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in itertools.pairwise(names)]
    begin = time.process_time()
    settings_ = yaml_settings(parse_yaml("\n".join(lines), "x"))
    assert settings_ == {"use_vllm": "True"}
    assert time.process_time() - begin < SECONDS


_SHELL = st.text(alphabet=st.sampled_from(list("ab =$(){}[]\"'`\\\n;&|<>#@:-*!,.0")), max_size=200)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_SHELL)
def test_any_text_gives_words_or_an_error(text: str) -> None:
    try:
        script = read_script(text, "x")
    except UsageError:
        return
    for command in script.commands:
        for word in command.words:
            assert word.line >= 0


@settings(max_examples=300, deadline=None)
@given(_SHELL)
def test_any_launch_text_gives_facts_or_an_error(text: str) -> None:
    for whole in (f"{_TRAIN}{text}", f"A=1 {text}\n{_TRAIN}", f"x.py:1 - EXEC: {_TRAIN}{text}", f"vllm serve {text}"):
        try:
            facts = read_text(whole, "x")
        except UsageError:
            continue
        assert not set(facts) & set(facts.unknown)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(min_size=1, max_size=30).filter(lambda word: "\0" not in word), max_size=8))
def test_any_command_gives_facts_or_an_error(words: list[str]) -> None:
    for program in (
        ["python", "train.py", "--train-backend", "fsdp"],
        ["vllm", "serve", "m"],
        ["trl", "grpo"],
        ["python", "-m", "verl.trainer.main_ppo"],
    ):
        try:
            read_command([*program, *words])
        except UsageError:
            continue


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet=st.sampled_from(list("ab=,:'\"{}[]()\\ 1")), max_size=120))
def test_any_printed_settings_are_read_without_an_exception(text: str) -> None:
    assert all(isinstance(value, str) for value in call_pairs(text).values())
    assert all(isinstance(value, str) for value in flatten("{" + text).values())
    parts, end = split_top(text)
    assert 0 <= end <= len(text)
    assert parts
    runlog.read(f"server_args=ServerArgs({text}\nnon-default args: {{{text}\n", "x")


@given(st.text(alphabet=st.sampled_from(list("ab c'$\"\\")), max_size=40))
def test_quoted_words_come_out_as_they_went_in(text: str) -> None:
    """A law: what is quoted as a shell would is read back letter by letter."""
    import shlex

    script = read_script(f"cmd {shlex.quote(text)}", "x")
    words = script.commands[0].words
    assert [word.text for word in words] == ["cmd", text]
    assert not any(word.hidden for word in words)
