import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerogap.errors import UsageError
from zerogap.rl.config import TaskSection
from zerogap.rl.config_load import parse_config
from zerogap.rl.tasks import ArithmeticTask, JsonlTask, Prompt, make_task
from zerogap.rl.tasks.arithmetic import held_out_pairs, is_held_out, train_pair
from zerogap.rl.tasks.base import encode_prompt
from zerogap.rl.tasks.jsonl import epoch_order, read_prompts
from zerogap.rl.tasks.scoring import exact_match, last_number, near_number, stripped_match


def config(**sections: dict[str, object]):
    return parse_config({"run": {"dir": "x", "steps": 1}, "model": {"path": "p"}, **sections}, "run.toml")


@given(st.integers(0, 2**63 - 1), st.integers(0, 10**6), st.integers(0, 10**4))
def test_training_questions_are_never_held_out(seed: int, step: int, index: int) -> None:
    a, b = train_pair(seed, step, index)
    assert 10 <= a <= 99
    assert 10 <= b <= 99
    assert hashlib.blake2b(f"{a}+{b}".encode()).digest()[0] >= 26


def test_held_out_questions_are_a_tenth_and_all_there_is() -> None:
    pairs = held_out_pairs()
    assert len(set(pairs)) == len(pairs) == 858
    assert all(is_held_out(a, b) for a, b in pairs)


def test_arithmetic_questions_and_answers() -> None:
    task = make_task(config(rollout={"prompts_per_step": 32}, eval={"prompts": 50}))
    prompts = task.train_prompts(3)
    assert len(prompts) == 32
    assert len(task.eval_prompts()) == 50
    for prompt in [*prompts, *task.eval_prompts()]:
        a, b = str(prompt.content).removesuffix("=").split("+")
        assert prompt.answer == str(int(a) + int(b))
    assert task.train_prompts(3) == prompts
    assert task.train_prompts(4) != prompts
    assert make_task(config(run={"dir": "x", "steps": 1, "seed": 1})).train_prompts(3) != prompts
    assert task.reward == "zerogap.rl.tasks.scoring:exact_match"
    assert make_task(config(task={"reward": "mine:f"})).reward == "mine:f"


def test_training_questions_cover_the_training_pairs() -> None:
    task = ArithmeticTask(seed=0, prompts_per_step=4000, eval_count=1)
    seen = {prompt.content for step in range(10) for prompt in task.train_prompts(step)}
    assert len(seen) > 0.98 * (8100 - 858)


def test_the_longest_questions_are_known_beforehand() -> None:
    task = ArithmeticTask(seed=0, prompts_per_step=8, eval_count=1)
    sides = [str(prompt.content).removesuffix("=").split("+") for prompt in task.all_train_prompts()]
    for place in range(2):
        assert sorted(side[place] for side in sides) == [str(operand) for operand in range(10, 100)]


def test_scoring() -> None:
    assert exact_match("", "46", "46") == 1.0
    assert exact_match("", " 46", "46") == 0.0
    assert stripped_match("", " 46\n", 46) == 1.0
    assert last_number("", "so 3 + 1,233 is 1,236.", "1236") == 1.0
    assert last_number("", "no idea", "1236") == 0.0
    assert near_number("", "it is 46, not 47", 46) == 1.0
    assert near_number("", "49 or so", "46") == 0.25
    assert near_number("", "no idea", "46") == 0.0


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(f"{record if isinstance(record, str) else json.dumps(record)}\n" for record in records))
    return path


def test_jsonl_prompts_of_both_forms_with_fields(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u\u2028x"}]
    path = write(
        tmp_path / "d.jsonl", {"prompt": "a", "answer": 1, "level": 2}, "", {"prompt": messages, "answer": "b"}
    )
    first, second = read_prompts(path, TaskSection())
    assert first == Prompt(f"{path}:1", "a", 1, {"level": 2})
    assert second == Prompt(f"{path}:3", tuple(messages), "b", {})
    assert second.text == "system: s\nuser: u\u2028x"
    assert read_prompts(path, TaskSection(chat=True))[0].content == ({"role": "user", "content": "a"},)


def test_jsonl_other_keys(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", {"question": "q", "label": "l"})
    (prompt,) = read_prompts(path, TaskSection(prompt_key="question", answer_key="label"))
    assert (prompt.content, prompt.answer, prompt.fields) == ("q", "l", {})


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "d.jsonl:2: is not JSON"),
        ("[" * 100_000, "d.jsonl:2: is nested too deep"),
        ("[1]", "must be a JSON object"),
        ({"promt": "a", "answer": "b"}, "'prompt' is missing; did you mean 'promt'"),
        ({"prompt": "a"}, "'answer' is missing"),
        ({"prompt": "", "answer": "b"}, "'prompt' is empty"),
        ({"prompt": 3, "answer": "b"}, "a text or a list of chat messages"),
        ({"prompt": [], "answer": "b"}, "a text or a list of chat messages"),
        ({"prompt": [{"role": "user"}], "answer": "b"}, "message 0 must be an object"),
        ({"prompt": [{"role": "usr", "content": "x"}], "answer": "b"}, "message 0 needs a role"),
        ({"prompt": [{"role": "user", "content": None}], "answer": "b"}, "message 0 needs a role"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, words: str) -> None:
    path = write(tmp_path / "d.jsonl", {"prompt": "a", "answer": "b"}, line)
    with pytest.raises(UsageError) as caught:
        read_prompts(path, TaskSection())
    assert words in str(caught.value)
    assert f"{path}:2" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_files(tmp_path: Path) -> None:
    binary = tmp_path / "b.jsonl"
    binary.write_bytes(b"\xff\xfe")
    for path, words in [
        (write(tmp_path / "e.jsonl", "", "  "), "has no prompts"),
        (tmp_path / "none.jsonl", "no such file"),
        (tmp_path, "cannot be read"),
        (binary, "is not UTF-8"),
    ]:
        with pytest.raises(UsageError, match=words):
            read_prompts(path, TaskSection())


@given(st.integers(1, 40), st.integers(1, 17), st.integers(0, 2**63 - 1), st.booleans())
def test_every_epoch_has_every_prompt_once_and_steps_follow_each_other(
    count: int, per_step: int, seed: int, shuffle: bool
) -> None:
    task = JsonlTask([Prompt(str(i), "p", i) for i in range(count)], [], "m:f", seed, per_step, shuffle)
    steps = [task.train_prompts(step) for step in range(3 * count)]
    assert task.train_prompts(count) == steps[count]
    answers = [prompt.answer for prompts in steps for prompt in prompts]
    for epoch in range(3):
        assert sorted(answers[epoch * count : (epoch + 1) * count]) == list(range(count))
    if not shuffle:
        assert answers[:count] == list(range(count))


def test_the_order_of_an_epoch_never_changes() -> None:
    assert epoch_order(8, 0, 0) == (0, 2, 1, 5, 4, 3, 6, 7)
    assert epoch_order(100, 0, 0) != epoch_order(100, 0, 1) != epoch_order(100, 1, 1)


def test_jsonl_task_from_a_configuration(tmp_path: Path) -> None:
    train = write(tmp_path / "t.jsonl", *({"prompt": f"p{i}", "answer": i} for i in range(5)))
    held = write(tmp_path / "h.jsonl", *({"prompt": f"h{i}", "answer": i} for i in range(5)))
    section = {"name": "jsonl", "path": str(train), "eval_path": str(held), "reward": "m:f"}
    task = make_task(config(task=section, eval={"prompts": 3}))
    assert [prompt.content for prompt in task.eval_prompts()] == ["h0", "h1", "h2"]
    assert len(task.train_prompts(0)) == 16
    assert task.reward == "m:f"


class _Letters:
    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return [1, *self.encode(messages[-1]["content"])]


def test_prompts_become_tokens_or_are_refused_with_the_numbers() -> None:
    assert encode_prompt(Prompt("n", "ab", ""), _Letters(), 3) == [97, 98]
    assert encode_prompt(Prompt("n", ({"role": "user", "content": "a"},), ""), _Letters(), 3) == [1, 97]
    with pytest.raises(UsageError, match=r"d\.jsonl:7: the prompt has 3 tokens and the context 3"):
        encode_prompt(Prompt("d.jsonl:7", "abc", ""), _Letters(), 3)
    with pytest.raises(UsageError, match="has no tokens"):
        encode_prompt(Prompt("d.jsonl:7", "", ""), _Letters(), 3)
