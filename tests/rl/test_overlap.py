"""Rewards are asked for while the engine still generates; nothing depends on which completion ends first."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tests.engine.build import make_engine

from zerogap.engine import SamplingParams
from zerogap.errors import UsageError
from zerogap.rl.records import read_records
from zerogap.rl.reward_journal import RewardJournal, StepRewards
from zerogap.rl.rewards import RewardJob, RewardPool, Scoring
from zerogap.rl.rollout import Generator, Rollout
from zerogap.rl.tasks import Prompt

pytestmark = pytest.mark.usefixtures("here")


def job(completion: str, index: int, answer: object = "") -> RewardJob:
    return RewardJob("train", 4, index, 1, "12+34=", completion, answer)


def pool(function: str, workers: int = 2, limit: float = 20.0) -> RewardPool:
    return RewardPool(function, workers, limit, -0.25)


def poll_until(scoring: Scoring | StepRewards, done: Path, limit: float = 30.0) -> None:
    """Poll, as between two forwards of the engine, until a reward has written its mark."""
    end = time.monotonic() + limit
    while not done.exists():
        assert time.monotonic() < end, "the reward was not called while others were still to come"
        scoring.poll()
        time.sleep(0.01)


def test_a_reward_is_called_before_the_next_is_known(tmp_path: Path) -> None:
    with pool("sample_rewards:mark") as rewards, Scoring(rewards) as scoring:
        for index in range(3):
            scoring.submit(job("x" * index, index, str(tmp_path / str(index))))
            poll_until(scoring, tmp_path / str(index))
        assert [outcome.value for outcome in scoring.finish()] == [0.0, 1.0, 2.0]


def test_outcomes_are_in_the_order_of_submission_and_the_journal_in_that_of_the_keys(tmp_path: Path) -> None:
    journal = RewardJournal(tmp_path / "rewards.jsonl")
    with pool("sample_rewards:slow_first", workers=3) as rewards:
        with StepRewards(rewards, journal) as step:
            for index in (2, 0, 1):
                step.submit(job("slow" if index == 2 else "x", index))
                step.poll()
            first = step.finish()
        with StepRewards(rewards, journal) as step:
            for index in (0, 1, 2):
                step.submit(job("slow" if index == 2 else "x", index))
            again = step.finish()
    assert [outcome.value for outcome in first] == [4.0, 1.0, 1.0]
    assert [outcome.value for outcome in again] == [1.0, 1.0, 4.0]
    assert [outcome.replayed for outcome in first + again] == [False] * 3 + [True] * 3
    assert [record["prompt"] for record in read_records(tmp_path / "rewards.jsonl")] == [0, 1, 2]


def test_what_is_left_in_the_middle_gives_no_answer_to_the_next(tmp_path: Path) -> None:
    journal = RewardJournal(tmp_path / "rewards.jsonl")
    with pool("sample_rewards:mark") as rewards:
        with StepRewards(rewards, journal) as step:  # as if the engine failed
            step.submit(job("slow mark", 0, str(tmp_path / "begun")))
            poll_until(step, tmp_path / "begun")
        assert [outcome.value for outcome in rewards.score([job("x", 0, str(tmp_path / "a"))])] == [1.0]
    assert not list(read_records(tmp_path / "rewards.jsonl")), "half a step is not recorded"


def test_a_reward_over_its_limit_is_late_even_if_nobody_looked_in_time(tmp_path: Path) -> None:
    with pool("sample_rewards:slow_first", limit=0.2) as rewards, Scoring(rewards) as scoring:
        rewards.check()
        scoring.submit(job("slow", 0))
        scoring.poll()
        time.sleep(1.5)  # a forward of the engine that takes longer than the reward
        (outcome,) = scoring.finish()
    assert (outcome.kind, outcome.value) == ("timed_out", -0.25)


def test_a_function_that_cannot_be_imported_is_said_while_generating() -> None:
    with pool("sample_rewards:no_such") as rewards, Scoring(rewards) as scoring:
        scoring.submit(job("x", 0))
        with pytest.raises(UsageError, match="no_such"):
            poll_until(scoring, Path("never there"))


class Plain:
    """Prompts are byte strings of the small engine's alphabet."""

    has_chat_template = False
    stop_ids = (0,)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1 + ord(letter) % 40 for letter in text]

    def decode(self, ids: Any) -> str:
        return " ".join(map(str, ids))


def test_rollouts_are_told_as_they_end_and_are_those_of_a_plain_call() -> None:
    prompts = [Prompt(name=f"p{n}", content=text, answer="", fields={}) for n, text in enumerate(["abc", "de"])]
    params = SamplingParams(max_tokens=60, seed=3, temperature=1.0)
    told: list[tuple[Rollout, bool]] = []
    steps = 0
    engine = make_engine()

    def step() -> None:
        nonlocal steps
        steps += 1

    made = Generator(engine, Plain(), 512).generate(  # type: ignore[arg-type]
        0, prompts, 4, params, lambda rollout: told.append((rollout, engine.has_work())), step
    )
    plain = Generator(make_engine(), Plain(), 512).generate(0, prompts, 4, params)  # type: ignore[arg-type]
    assert [rollout.key for rollout in made] == [(0, prompt, sample) for prompt in range(2) for sample in range(4)]
    assert [rollout.transcript for rollout in made] == [rollout.transcript for rollout in plain]
    assert sorted(rollout.key for rollout, _ in told) == [rollout.key for rollout in made]
    assert sum(working for _, working in told) > 0, "one ended while others ran"
    assert steps == engine.statistics.steps
