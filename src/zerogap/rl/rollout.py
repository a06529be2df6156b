"""Generates a step's samples: one completion each, or whatever a custom rollout function makes of the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Generator as Completions
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch

from zerogap.engine import Completion, Engine, Key, Request, SamplingParams
from zerogap.errors import UsageError, nearest
from zerogap.models.tokenizer import Tokenizer
from zerogap.rl.custom import RolloutFunction, Transcript
from zerogap.rl.lockstep import Call, run_in_lockstep
from zerogap.rl.tasks import Prompt
from zerogap.rl.tasks.base import encode_prompt
from zerogap.trainer import SequenceSampler, TrainSequence, suppressed_below

# What a custom rollout may change per generate call; its sampler is that of the whole sequence.
_CHANGEABLE = {"max_tokens": "max_tokens", "min_tokens": "min_tokens", "stop": "stop_strings"}


@dataclass(frozen=True)
class Rollout:
    """One finished sample."""

    key: Key
    prompt: Prompt
    transcript: Transcript

    @property
    def generated_tokens(self) -> int:
        """Tokens that the engine sampled."""
        return sum(len(completion.tokens) for completion in self.transcript.completions)


@dataclass(frozen=True)
class Generator:
    """Turns prompts into rollouts.

    Attributes:
        engine: samples the tokens.
        tokenizer: the model's.
        max_positions: longest prompt plus completion, tokens.
        function: custom rollout; None generates one completion per sample.
        time_limit_s: of a custom rollout, between two calls of the engine; None is without limit.
    """

    engine: Engine
    tokenizer: Tokenizer
    max_positions: int
    function: RolloutFunction | None = None
    time_limit_s: float | None = None

    def generate(
        self,
        step: int,
        prompts: Sequence[Prompt],
        samples: int,
        params: SamplingParams,
        on_end: Callable[[Rollout], None] = lambda rollout: None,
        on_step: Callable[[], None] = lambda: None,
    ) -> list[Rollout]:
        """Return ``samples`` rollouts of each prompt, prompt by prompt.

        Args:
            step: of the run; the first number of every key.
            prompts: what to generate from.
            samples: rollouts of each.
            params: of every request.
            on_end: told of each rollout as it ends, while others may still run.
            on_step: called after each forward of the engine.

        Raises:
            UsageError: a prompt does not fit, or a custom rollout function fails.
        """
        tasks = [((step, index, sample), prompt) for index, prompt in enumerate(prompts) for sample in range(samples)]
        if self.function is not None:
            return self._generate_custom(tasks, params, on_end, on_step)
        encoded = [tuple(self.encode(prompt)) for prompt in prompts]
        requests = [
            Request(key, encoded[key[1]], self._fitting(prompt, encoded[key[1]], params)) for key, prompt in tasks
        ]
        prompt_of = dict(tasks)
        rollouts: dict[Key, Rollout] = {}
        with closing(self._run(requests, on_step)) as completions:
            for completion in completions:
                transcript = Transcript(list(completion.prompt))
                transcript.add_completion(completion)
                rollouts[completion.key] = Rollout(completion.key, prompt_of[completion.key], transcript)
                on_end(rollouts[completion.key])
        return [rollouts[key] for key, _ in tasks]

    def _run(self, requests: Sequence[Request], on_step: Callable[[], None]) -> Completions[Completion, None, None]:
        """Drive the engine and yield the completions as they end."""
        try:
            for request in requests:
                self.engine.add(request)
            while self.engine.has_work():
                for event in self.engine.step():
                    if event.completion is not None:
                        yield event.completion
                on_step()
        finally:
            for request in requests:
                self.engine.abort(request.key)

    def encode(self, prompt: Prompt) -> list[int]:
        """Return a prompt's token ids."""
        return encode_prompt(prompt, self.tokenizer, self.max_positions)

    def _fitting(self, prompt: Prompt, ids: Sequence[int], params: SamplingParams) -> SamplingParams:
        length = len(ids) + params.max_tokens
        if length > self.max_positions:
            raise UsageError(
                f"{prompt.name}: {len(ids)} prompt tokens and max_tokens = {params.max_tokens} need {length} "
                f"positions, the context has {self.max_positions}; lower rollout.max_tokens or shorten the prompt"
            )
        return params

    def room(self, ids: Sequence[int]) -> int:
        """Return how many tokens the context can still take after ``ids``."""
        return max(0, self.max_positions - len(ids))

    def _cut(self, prompt: Prompt, ids: Sequence[int], params: SamplingParams) -> SamplingParams:
        """Return the parameters with no more tokens than there is room for."""
        room = self.room(ids)
        if not room:
            raise UsageError(
                f"task.rollout on {prompt.name}: generate() after {len(ids)} tokens, the context has "
                f"{self.max_positions}; end the rollout while context.room(transcript.tokens) is above 0"
            )
        return replace(params, max_tokens=min(params.max_tokens, room), min_tokens=min(params.min_tokens, room))

    def _generate_custom(
        self,
        tasks: list[tuple[Key, Prompt]],
        params: SamplingParams,
        on_end: Callable[[Rollout], None],
        on_step: Callable[[], None],
    ) -> list[Rollout]:
        """Run the function for every sample; what they ask of the engine at one time is one batch."""
        function = self.function
        assert function is not None
        made = [0] * len(tasks)  # calls of each sample so far

        def rollout_of(prompt: Prompt) -> Callable[[Callable[..., Completion]], Transcript]:
            return lambda generate: function(_Context(self, prompt, generate), prompt)

        def answer(calls: list[Call]) -> list[Completion]:
            requests = []
            for call in calls:
                key, prompt = tasks[call.index]
                # Another try from the same tokens stands at the same positions: without a seed of its own it would be
                # the same completion, and a function that retries would never end.
                seed = (params.seed + made[call.index]) % 2**63
                made[call.index] += 1
                asked = replace(params, seed=seed, **{_CHANGEABLE[name]: value for name, value in call.params.items()})
                requests.append(Request(key, call.prompt_ids, self._cut(prompt, call.prompt_ids, asked)))
            done = {completion.key: completion for completion in self._run(requests, on_step)}
            return [done[request.key] for request in requests]

        def ended(index: int, transcript: Transcript) -> None:
            key, prompt = tasks[index]
            self._check(prompt, transcript)
            on_end(Rollout(key, prompt, transcript))

        transcripts = run_in_lockstep(
            [rollout_of(prompt) for _, prompt in tasks],
            answer,
            self.time_limit_s,
            lambda index: f"task.rollout on {tasks[index][1].name}",
            ended,
        )
        return [Rollout(key, prompt, transcript) for (key, prompt), transcript in zip(tasks, transcripts, strict=True)]

    def _check(self, prompt: Prompt, transcript: Transcript) -> None:
        vocabulary = self.engine.decoder.config.vocab_size
        if len(transcript.tokens) > self.max_positions:
            raise UsageError(
                f"task.rollout on {prompt.name}: the transcript has {len(transcript.tokens)} tokens, "
                f"the context {self.max_positions}; end the rollout earlier (see context.room)"
            )
        if max(transcript.tokens) >= vocabulary:
            raise UsageError(
                f"task.rollout on {prompt.name}: the transcript has token id {max(transcript.tokens)}; "
                f"the vocabulary is 0..{vocabulary - 1}"
            )


@dataclass(frozen=True)
class _Context:
    """What a custom rollout function gets; see ``zerogap.rl.custom.RolloutContext``."""

    generator: Generator
    prompt: Prompt
    ask: Callable[..., Completion]

    def generate(self, prompt_ids: Sequence[int], **params: Any) -> Completion:
        unknown = sorted(params.keys() - _CHANGEABLE.keys())
        if unknown:
            raise UsageError(f"rollout: generate() has no parameter {unknown[0]!r}{nearest(unknown[0], _CHANGEABLE)}")
        return self.ask(prompt_ids, **params)

    def room(self, tokens: Sequence[int]) -> int:
        return self.generator.room(tokens)

    def encode(self, text: str) -> list[int]:
        return self.generator.tokenizer.encode(text, add_special_tokens=False)

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        return self.generator.encode(prompt)

    def decode(self, ids: Sequence[int]) -> str:
        return self.generator.tokenizer.decode(ids)


def train_sequence(rollout: Rollout, advantage: float, params: SamplingParams) -> TrainSequence:
    """Return what the trainer gets of a rollout."""
    transcript = rollout.transcript
    suppressed: list[tuple[int, tuple[int, ...]]] = []
    for completion in transcript.completions:
        start = len(completion.prompt) - len(transcript.prompt_ids)
        used = completion.params  # type: ignore[attr-defined]
        suppressed += suppressed_below(used.min_tokens, used.stop_ids, len(completion.tokens), start)
    return TrainSequence(
        key=rollout.key,
        tokens=transcript.tokens,
        prompt_length=len(transcript.prompt_ids),
        logprobs_engine=torch.tensor(transcript.logprobs, dtype=torch.float32),
        loss_mask=torch.tensor(transcript.loss_mask, dtype=torch.bool),
        advantage=advantage,
        weights_version=transcript.completions[0].weights_version,
        sampler=SequenceSampler(params.temperature, params.top_k, params.top_p, params.min_p, tuple(suppressed)),
        sampled_mask=torch.tensor(transcript.sampled_mask, dtype=torch.bool),
    )
