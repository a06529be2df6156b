"""What the trainer is given: one sequence with the log-probs that the engine recorded when it sampled."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zerogap.errors import UsageError

Key = tuple[int, int, int]


@dataclass(frozen=True)
class SequenceSampler:
    """Sampler settings that held for every sampled token of a sequence.

    Attributes:
        temperature: above 0; greedy sampling is no policy that a gradient could follow.
        top_k: 0 is off.
        top_p: in (0, 1]; 1 is off.
        min_p: in [0, 1); 0 is off.
        suppressed: (response index, token ids that could not be sampled there) pairs, indices ascending: the stop ids
            of a request below its ``min_tokens``.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    suppressed: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @property
    def cuts(self) -> bool:
        """Whether some tokens may be left out of a kept set."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def suppressed_below(
    min_tokens: int, stop_ids: Iterable[int], length: int, start: int = 0
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Return the ``suppressed`` pairs of one request whose tokens are ``[start, start + length)`` of the response.

    Args:
        min_tokens: the request's minimum; its first ``min_tokens`` tokens could not be a stop id.
        stop_ids: the stop ids of the request.
        length: tokens that the request generated.
        start: response index of its first token (above 0 in later turns).
    """
    ids = tuple(sorted(set(stop_ids)))
    return tuple((start + index, ids) for index in range(min(min_tokens, length))) if ids else ()


@dataclass
class TrainSequence:
    """A prompt and its response, ready to be trained on.

    Attributes:
        key: (step, prompt, sample), unique in the run.
        tokens: prompt and response token ids.
        prompt_length: how many of ``tokens`` are the prompt; at least 1.
        logprobs_engine: float32 [response], in nats, as recorded by the decode step that sampled each token; the
            values at masked-out places are never read.
        loss_mask: bool [response]; the tokens that are trained on. False where the engine did not sample the token (a
            tool's answer in a multi-turn rollout), which is never compared either, and in turns that are context only.
        advantage: finite; one number for all tokens of the sequence.
        weights_version: version of the weights that sampled the response.
        sampler: settings of its sampled tokens.
        sampled_mask: bool [response]; True where the engine sampled the token, trained on or not; None is the loss
            mask. See `untrained`.

    Raises:
        UsageError: lengths or types that do not fit, with the sequence's key.
    """

    key: Key
    tokens: list[int]
    prompt_length: int
    logprobs_engine: Tensor
    loss_mask: Tensor
    advantage: float
    weights_version: int
    sampler: SequenceSampler = SequenceSampler()
    sampled_mask: Tensor | None = None

    def __post_init__(self) -> None:
        response, logprobs, mask = self.response_length, self.logprobs_engine.numel(), self.loss_mask.numel()
        if self.prompt_length < 1 or response < 0:
            self._refuse(f"prompt_length is {self.prompt_length} of {len(self.tokens)} tokens; a prompt has at least 1")
        if self.logprobs_engine.dim() != 1 or self.loss_mask.dim() != 1 or not response == logprobs == mask:
            self._refuse(
                f"the response has {response} tokens, {logprobs} engine log-probs and {mask} loss-mask entries; "
                "the three must be equal"
            )
        if self.logprobs_engine.dtype != torch.float32 or self.loss_mask.dtype != torch.bool:
            self._refuse(
                f"engine log-probs must be float32 and the loss mask bool, not {self.logprobs_engine.dtype} and "
                f"{self.loss_mask.dtype}"
            )
        sampled = self._sampled
        if (
            sampled.shape != self.loss_mask.shape
            or sampled.dtype != torch.bool
            or bool((self.loss_mask & ~sampled).any())
        ):
            self._refuse("the sampled mask must be bool, as long as the loss mask, and True wherever that is")
        if not math.isfinite(self.advantage):
            self._refuse(f"advantage is {self.advantage}; rewards must be made finite before advantages are taken")
        sampler = self.sampler
        if not (sampler.temperature > 0 and sampler.top_k >= 0 and 0 < sampler.top_p <= 1 and 0 <= sampler.min_p < 1):
            self._refuse(f"its sampler settings cannot be trained on: {sampler}; temperature must be above 0")
        places = [place for place, _ in sampler.suppressed]
        if places != sorted(set(places)) or (places and not 0 <= places[0] <= places[-1] < response):
            self._refuse(f"suppressed places must ascend and lie in its response of {response} tokens")

    def _refuse(self, what: str) -> None:
        step, prompt, sample = self.key
        raise UsageError(f"sequence (step {step}, prompt {prompt}, sample {sample}): {what}")

    @property
    def _sampled(self) -> Tensor:
        return self.loss_mask if self.sampled_mask is None else self.sampled_mask

    def untrained(self) -> TrainSequence:
        """Return the same sequence for scoring the sampled tokens that are not trained on, in place of those that are.

        They need a forward of their own: more rows in the training forward would change the update's bits.
        """
        return replace(self, loss_mask=self._sampled & ~self.loss_mask)

    @property
    def response_length(self) -> int:
        """Number of tokens after the prompt."""
        return len(self.tokens) - self.prompt_length

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        """The prompt's token ids."""
        return tuple(self.tokens[: self.prompt_length])

    @property
    def trained_places(self) -> Tensor:
        """Response indices of the T trained tokens, ascending: int64 [T]."""
        return self.loss_mask.nonzero().squeeze(1)

    @property
    def trained_count(self) -> int:
        """Number of trained tokens T."""
        return int(self.loss_mask.sum())

    @property
    def trained_logprobs_engine(self) -> Tensor:
        """The engine's log-probs of the trained tokens: float32 [T]."""
        return self.logprobs_engine[self.loss_mask]

    @property
    def input_rows(self) -> int:
        """Rows that a forward needs: every token before the last trained one; 0 if none is trained."""
        places = self.trained_places
        return self.prompt_length + int(places[-1]) if len(places) else 0


def one_version(sequences: Sequence[TrainSequence]) -> int:
    """Return the weights version that sampled all the sequences.

    Raises:
        UsageError: the sequences come from different versions, so that no forward could equal all of them.
    """
    versions = sorted({sequence.weights_version for sequence in sequences})
    if len(versions) != 1:
        raise UsageError(f"a batch must come from one weights version, not from {versions}")
    return versions[0]
