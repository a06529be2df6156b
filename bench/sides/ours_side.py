"""Our side: python ours_side.py MODEL_FOLDER [--inexact] [--weights bfloat16]. Public things only."""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from zerogap.threads import prepare_environment

prepare_environment()

import torch  # noqa: E402
from grpo_task import PROMPTS, reward_of  # noqa: E402
from jsonlines import Answer, Watch, prompts, serve, take_stdout, timed  # noqa: E402

from zerogap.engine import Completion, Engine, EngineConfig, Request, SamplingParams  # noqa: E402
from zerogap.models.decoder import Decoder, WeightsFormat  # noqa: E402
from zerogap.models.tokenizer import Tokenizer, load_tokenizer  # noqa: E402
from zerogap.models.weights import load_decoder, weights_digest  # noqa: E402
from zerogap.ops import ambient, backend  # noqa: E402
from zerogap.trainer import (  # noqa: E402
    Optimiser,
    OptimiserSettings,
    StepSettings,
    TrainSequence,
    accumulate,
    group_advantages,
    score,
)

KV_BYTES = 1 << 30


class Ours:
    """Engine and trainer of one model folder, each made when first asked for."""

    def __init__(self, folder: Path, weights: WeightsFormat) -> None:
        self.folder, self.weights = folder, weights
        self._engines: dict[bool, Engine] = {}
        self._trainer: tuple[Decoder, Optimiser] | None = None
        self.step = 0

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.folder)

    def engine(self, prefix_cache: bool = False) -> Engine:
        """Return the engine; rollouts of unrelated prompts run without prefix cache, as the other engines do."""
        if prefix_cache not in self._engines:
            self._engines[prefix_cache] = Engine(
                load_decoder(self.folder, weights=self.weights),
                self.tokenizer,
                EngineConfig(kv_bytes=KV_BYTES, prefix_cache=prefix_cache),
            )
        return self._engines[prefix_cache]

    @property
    def trainer(self) -> tuple[Decoder, Optimiser]:
        if self._trainer is None:
            decoder = load_decoder(self.folder, weights=self.weights)
            self._trainer = decoder, Optimiser(decoder.named_parameters(), OptimiserSettings())
        return self._trainer

    def requests(self, rows: list[list[int]], new_tokens: int) -> list[Request]:
        self.step += 1
        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
        return [Request((self.step, number, 0), tuple(row), params) for number, row in enumerate(rows)]

    def generate(self, sequences: int, prompt_tokens: int, new_tokens: int, seed: int, logprobs: bool = True) -> Answer:
        """Time a rollout; the exact log-prob of every token always comes along."""
        engine = self.engine()
        requests = self.requests(prompts(sequences, prompt_tokens, engine.decoder.config.vocab_size, seed), new_tokens)
        answer: Answer = {}
        with timed(answer):
            done = engine.generate(requests)
        answer["tokens"] = sum(len(one.tokens) for one in done)
        assert answer["tokens"] == sequences * new_tokens == sum(len(one.logprobs) for one in done)
        return answer

    def decode(self, context: int, new_tokens: int, seed: int) -> Answer:
        """Time the decode steps of one sequence behind a prompt of ``context`` tokens, prefill left out."""
        engine = self.engine()
        (request,) = self.requests(prompts(1, context, engine.decoder.config.vocab_size, seed), new_tokens + 1)
        engine.add(request)
        while not engine.step():
            pass
        seconds = []
        while engine.has_work():
            watch = Watch()
            engine.step()
            seconds.append(watch.seconds)
        return {"seconds": sum(seconds), "median_step_s": statistics.median(seconds), "tokens": len(seconds)}

    def train(self, sequences: int, length: int, seed: int, micro_batch_rows: int = 2048) -> Answer:
        """Time forward, log-probs and backward of ``length`` rows a sequence; old log-probs are made outside."""
        decoder, optimiser = self.trainer
        # One token more than rows: the last is scored and needs no row of its own.
        batch = train_batch(prompts(sequences, length + 1, decoder.config.vocab_size, seed))
        with ambient.guard():
            batch = [
                replace(one, logprobs_engine=scored.logprob_T.float())
                for one, scored in zip(batch, score(decoder, batch, micro_batch_rows), strict=True)
            ]
            answer: Answer = {"tokens": sequences * length}
            with timed(answer):
                accumulate(decoder, optimiser, batch, StepSettings(micro_batch_rows=micro_batch_rows))
        optimiser.clear_gradients()
        return answer

    def check(self, seed: int) -> Answer:
        """Return the log-probs of two sequences, to see that different ops compute the same function."""
        decoder, _ = self.trainer
        batch = train_batch(prompts(2, 30, decoder.config.vocab_size, seed))
        with ambient.guard():
            return {"logprobs": [value for scored in score(decoder, batch) for value in scored.logprob_T.tolist()]}

    def peak(self, sequences: int, length: int, seed: int, micro_batch_rows: int) -> Answer:
        """Measure the peak of resident memory over whole training steps: forward, backward and update."""
        decoder, optimiser = self.trainer
        batch = train_batch(prompts(sequences, length + 1, decoder.config.vocab_size, seed))
        settings = StepSettings(micro_batch_rows=micro_batch_rows)
        with ambient.guard():
            for _ in range(2):  # AdamW's moments exist from the first update on
                Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
                answer: Answer = {}
                with timed(answer):
                    accumulate(decoder, optimiser, batch, settings)
                    optimiser.apply()
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return answer | {"peak_bytes": int(status["VmHWM"].split()[0]) * 1024}

    def grpo(self, samples: int, new_tokens: int) -> Answer:
        """Time one step: rollout, rewards, advantages, training forward and backward, update, weights to the engine."""
        engine, (decoder, optimiser) = self.engine(prefix_cache=True), self.trainer
        rows = [self.tokenizer.encode(prompt) for prompt in PROMPTS for _ in range(samples)]
        requests = [
            replace(request, key=(self.step + 1, number // samples, number % samples))
            for number, request in enumerate(self.requests(rows, new_tokens))
        ]
        answer: Answer = {}
        with timed(answer):
            with timed(answer, "generate_s"):
                done = engine.generate(requests)
            rewards = [reward_of(number) for number in range(len(done))]
            groups = [rewards[first : first + samples] for first in range(0, len(rewards), samples)]
            advantages = [value for group in group_advantages(groups).advantages for value in group]
            with timed(answer, "train_s"), ambient.guard():
                batch = [trained(one, advantage) for one, advantage in zip(done, advantages, strict=True)]
                result = accumulate(decoder, optimiser, batch, StepSettings())
                different = sum(
                    not torch.equal(
                        one.trained_logprobs_engine.view(torch.int32), scored.logprob_T.float().view(torch.int32)
                    )
                    for one, scored in zip(batch, result.scores, strict=True)
                )
                optimiser.apply()
            with timed(answer, "sync_s"):
                state = decoder.state_dict()
                engine.load_weights(state, engine.version + 1, weights_digest(state))
        answer |= {"prompt_tokens": sum(map(len, rows)), "new_tokens": sum(len(one.tokens) for one in done)}
        answer |= {"rows": result.rows, "rows_alone": sum(one.input_rows for one in batch)}
        return answer | {"sequences_different": different, "trained_sequences": result.trained_sequences}


def train_batch(rows: list[list[int]]) -> list[TrainSequence]:
    """Return one sequence per row, of which every token but the first is trained on."""
    count = len(rows[0]) - 1
    return [
        TrainSequence(
            key=(0, number, 0),
            tokens=row,
            prompt_length=1,
            logprobs_engine=torch.full((count,), -10.0),
            loss_mask=torch.ones(count, dtype=torch.bool),
            advantage=1.0 if number % 2 else -1.0,
            weights_version=0,
        )
        for number, row in enumerate(rows)
    ]


def trained(completion: Completion, advantage: float) -> TrainSequence:
    """Return a completion as the trainer takes it."""
    return TrainSequence(
        key=completion.key,
        tokens=[*completion.prompt, *completion.tokens],
        prompt_length=len(completion.prompt),
        logprobs_engine=torch.tensor(completion.logprobs, dtype=torch.float32),
        loss_mask=torch.ones(len(completion.tokens), dtype=torch.bool),
        advantage=advantage,
        weights_version=completion.weights_version,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--inexact", action="store_true", help="torch's own ops in place of the exact ones")
    parser.add_argument("--weights", default="float32", choices=["float32", "bfloat16"])
    options = parser.parse_args()
    channel = take_stdout()
    if options.inexact:
        import inexact

        inexact.install()
    from linear_times import linear

    ours = Ours(options.folder, options.weights)
    verbs = {
        "generate": ours.generate,
        "decode": ours.decode,
        "train": ours.train,
        "check": ours.check,
        "peak": ours.peak,
        "grpo": ours.grpo,
        "linear": linear,
    }
    about = {"torch": torch.__version__, "threads": torch.get_num_threads(), "backend": backend.describe()}
    serve(channel, verbs, about)


if __name__ == "__main__":
    main()
