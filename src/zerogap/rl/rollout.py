"""Generates a step's samples: one completion each, or whatever a custom rollout function makes of the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

    def generate(self, step: int, prompts: Sequence[Prompt], samples: int, params: SamplingParams) -> list[Rollout]:
        """Return ``samples`` rollouts of each prompt, prompt by prompt.

        Raises:
            UsageError: a prompt does not fit, or a custom rollout function fails.
        """
        tasks = [((step, index, sample), prompt) for index, prompt in enumerate(prompts) for sample in range(samples)]
        if self.function is not None:
            return self._generate_custom(tasks, params)
        encoded = [tuple(self.encode(prompt)) for prompt in prompts]
        requests = [
            Request(key, encoded[key[1]], self._fitting(prompt, encoded[key[1]], params)) for key, prompt in tasks
        ]
        rollouts = []
        for (key, prompt), completion in zip(tasks, self.engine.generate(requests), strict=True):
            transcript = Transcript(list(completion.prompt))
            transcript.add_completion(completion)
            rollouts.append(Rollout(key, prompt, transcript))
        return rollouts

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

    def _generate_custom(self, tasks: list[tuple[Key, Prompt]], params: SamplingParams) -> list[Rollout]:
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
            return self.engine.generate(requests)

        transcripts = run_in_lockstep(
            [rollout_of(prompt) for _, prompt in tasks],
            answer,
            self.time_limit_s,
            lambda index: f"task.rollout on {tasks[index][1].name}",
        )
        vocabulary = self.engine.decoder.config.vocab_size
        for (_, prompt), transcript in zip(tasks, transcripts, strict=True):
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
        return [Rollout(key, prompt, ended) for (key, prompt), ended in zip(tasks, transcripts, strict=True)]


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
