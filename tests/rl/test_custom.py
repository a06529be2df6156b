import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from zerogap.errors import UsageError
from zerogap.rl.custom import Transcript, load_rollout
from zerogap.rl.lockstep import Call, run_in_lockstep
from zerogap.rl.tasks import Prompt


@dataclass
class Sampled:
    prompt: tuple[int, ...]
    tokens: list[int]
    logprobs: list[float]
    text: str = "t"
    finish_reason: str = "stop"
    weights_version: int = 1
    cached_tokens: int = 0


def test_a_transcript_keeps_turns_apart() -> None:
    transcript = Transcript([1, 2])
    transcript.add_completion(Sampled((1, 2), [3, 4], [-0.5, -1.0], "a"))
    transcript.add_tokens([9, 9, 9])
    transcript.add_completion(Sampled((1, 2, 3, 4, 9, 9, 9), [5], [-2.0], "b", "length"), train=True)
    assert transcript.tokens == [1, 2, 3, 4, 9, 9, 9, 5]
    assert transcript.loss_mask == [True, True, False, False, False, True]
    assert transcript.logprobs == [-0.5, -1.0, 0.0, 0.0, 0.0, -2.0]
    assert transcript.text == "a\nb"
    assert transcript.truncated
    transcript.add_completion(Sampled(tuple(transcript.tokens), [6], [-3.0]), train=False)
    assert transcript.loss_mask == [True, True, False, False, False, True, False]
    assert transcript.sampled_mask == [True, True, False, False, False, True, True]


def test_cached_tokens_belong_to_the_turn_that_had_them() -> None:
    transcript = Transcript([1, 2])
    transcript.add_completion(Sampled((1, 2), [3, 4], [-0.5, -1.0], cached_tokens=1))
    assert transcript.cached_tokens == 1
    transcript.add_tokens([9])
    transcript.add_completion(Sampled((1, 2, 3, 4, 9), [5], [-2.0], cached_tokens=4))
    assert transcript.cached_tokens == [1, 1, 0, 4]


def test_a_completion_of_other_tokens_or_weights_is_refused() -> None:
    transcript = Transcript([1, 2])
    with pytest.raises(UsageError, match=r"transcript\.tokens"):
        transcript.add_completion(Sampled((1, 3), [3], [-0.5]))
    transcript.add_completion(Sampled((1, 2), [3], [-0.5]))
    with pytest.raises(UsageError, match="different weights versions"):
        transcript.add_completion(Sampled((1, 2, 3), [3], [-0.5], weights_version=2))
    assert transcript.tokens == [1, 2, 3]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise ValueError('x')", "raised ValueError: x"),
        ("return 3", "returned int"),
        ("return Transcript([1])", "no completion"),
        (
            "t = Transcript([1]); t.completions = [S()]; t.add_tokens([5]); t.loss_mask = [True]; return t",
            "loss_mask.0.",
        ),
        ("t = Transcript([1]); t.completions = [1]; t.loss_mask = [True]; return t", "differ in length"),
    ],
)
def test_a_bad_rollout_function_is_one_line(
    body: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"rollouts_{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(
        "from zerogap.rl.custom import Transcript\nclass S: prompt, tokens = (1,), []\n"
        f"def rollout(context, prompt):\n    {body}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    function = load_rollout(f"{name}:rollout")
    with pytest.raises(UsageError, match=words) as caught:
        function(None, Prompt("data.jsonl:3", "p", "a"))  # type: ignore[arg-type]
    assert "data.jsonl:3" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_rollout_function_is_one_line() -> None:
    with pytest.raises(UsageError, match=r"task\.rollout = 'no_such:f': no module 'no_such'"):
        load_rollout("no_such:f")


def echo(calls: list[Call]) -> list[tuple[int, ...]]:
    return [(*call.prompt_ids, call.params.get("add", 0)) for call in calls]


def test_functions_with_different_numbers_of_turns_share_batches() -> None:
    sizes: list[int] = []

    def batch(calls: list[Call]) -> list[tuple[int, ...]]:
        assert [call.index for call in calls] == sorted(call.index for call in calls)
        sizes.append(len(calls))
        return echo(calls)

    def turns(count: int) -> Callable[[Callable[..., Sequence[int]]], list[int]]:
        def function(generate: Callable[..., Sequence[int]]) -> list[int]:
            tokens = [count]
            for turn in range(count):
                tokens = list(generate(tokens, add=turn))
            return tokens

        return function

    told: list[tuple[int, list[int], int]] = []

    def ended(index: int, result: list[int]) -> None:
        told.append((index, result, len(sizes)))

    results = run_in_lockstep([turns(count) for count in (3, 0, 1, 2)], batch, ended=ended)
    assert results == [[3, 0, 1, 2], [0], [1, 0], [2, 0, 1]]
    assert sizes == [3, 2, 1]
    assert told == [(1, [0], 0), (2, [1, 0], 1), (3, [2, 0, 1], 2), (0, [3, 0, 1, 2], 3)], "before the next batch"
    assert run_in_lockstep([], batch) == []


@pytest.mark.timeout(20)
def test_an_error_of_a_function_or_of_the_engine_ends_all() -> None:
    ended: list[str] = []

    def waits(generate: Callable[..., Any]) -> None:
        try:
            generate([1])
            generate([1])
        finally:
            ended.append("waits")

    def fails(generate: Callable[..., Any]) -> None:
        generate([1])
        raise UsageError("mine")

    def engine_fails(calls: list[Call]) -> list[Any]:
        raise KeyboardInterrupt

    with pytest.raises(UsageError, match="mine"):
        run_in_lockstep([waits, fails], echo)
    with pytest.raises(KeyboardInterrupt):
        run_in_lockstep([waits, waits], engine_fails)
    deadline = time.monotonic() + 10
    while len(ended) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ended == ["waits"] * 3
