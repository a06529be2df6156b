"""The samples of a step: ``samples/step-000012.jsonl``, one line per completion with the log-probs of both sides.

Column names are those that ``zerogap gap`` reads. The log-probs are float32 values; each is written as the decimal
that gives back the same bits (NaN and infinities as texts), so that a gap can be recomputed from the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerogap.files import write_text_atomic
from zerogap.rl.records import read_records, to_line


@dataclass(frozen=True)
class Sample:
    """One completion.

    Attributes:
        prompt_index, sample_index: which prompt of the step and which completion of it.
        prompt, completion: texts.
        answer: the task's answer; any JSON value.
        reward, reward_kind: value and kind of the outcome (see ``zerogap.rl.rewards``).
        advantage: what the completion's tokens were trained with; None without training.
        finish_reason: ``stop`` or ``length``.
        weights_version: version of the weights that sampled it.
        prompt_ids, response_ids: token ids.
        logprobs_engine: nats, as sampled; [response].
        logprobs_trainer: nats; None for a token that was not compared; [response].
        loss_mask: True = trained on; [response].
        cached_tokens: prompt tokens that the engine took from its prefix cache; one number, or [response] with the
            number of each token's own turn (0 for inserted tokens).
        kept_mass: the trainer's probability of each token's kept set, at the sampling temperature; None for a token
            that was not compared; [response]. None where the sampler cuts nothing.
    """

    prompt_index: int
    sample_index: int
    prompt: str
    completion: str
    answer: Any
    reward: float
    reward_kind: str
    advantage: float | None
    finish_reason: str
    weights_version: int
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    logprobs_engine: Sequence[float]
    logprobs_trainer: Sequence[float | None]
    loss_mask: Sequence[bool]
    cached_tokens: int | Sequence[int]
    kept_mass: Sequence[float | None] | None = None

    def record(self, step: int) -> dict[str, Any]:
        """Return the line's values."""
        columns = [self.response_ids, self.logprobs_engine, self.logprobs_trainer, self.loss_mask]
        columns += [column for column in (self.cached_tokens, self.kept_mass) if isinstance(column, Sequence)]
        lengths = {len(column) for column in columns}
        assert len(lengths) == 1, f"columns of different lengths: {lengths}"
        return {
            "step": step,
            "sample": f"{self.prompt_index}.{self.sample_index}",
            "prompt": self.prompt,
            "completion": self.completion,
            "answer": self.answer,
            "reward": self.reward,
            "reward_kind": self.reward_kind,
            "advantage": self.advantage,
            "finish_reason": self.finish_reason,
            "weights_version": self.weights_version,
            "prompt_ids": list(self.prompt_ids),
            "response_ids": list(self.response_ids),
            "logprobs_engine": list(self.logprobs_engine),
            "logprobs_trainer": list(self.logprobs_trainer),
            "loss_mask": list(self.loss_mask),
            "cached_tokens": self.cached_tokens if isinstance(self.cached_tokens, int) else list(self.cached_tokens),
            # The trainer's log-probs are those of the kept set too.
            **({} if self.kept_mass is None else {"kept_mass": list(self.kept_mass), "kept_replayed": True}),
        }


def samples_path(folder: Path, step: int) -> Path:
    """Return the samples file of one step of the run in ``folder``."""
    return folder / "samples" / f"step-{step:06d}.jsonl"


def write_samples(folder: Path, step: int, samples: Sequence[Sample]) -> Path:
    """Write the samples of one step, whole or not at all, in place of an earlier try; return the file's path."""
    path = samples_path(folder, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(path, "".join(to_line(sample.record(step)) for sample in samples))
    return path


def read_samples(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a samples file, with log-probs as floats again."""
    for record in read_records(path):
        for column in ("logprobs_engine", "logprobs_trainer", "kept_mass"):
            if column not in record:  # nothing was cut, or the file is an older one
                continue
            record[column] = [None if value is None else float(value) for value in record[column]]
        yield record
