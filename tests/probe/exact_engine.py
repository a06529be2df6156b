"""Our own exact engine with its built-in model behind the test server's HTTP: what a probe of an exact engine finds."""

from __future__ import annotations

import secrets
from typing import Any

import torch

from tests.probe.engine_server import BadRequestError, Row, Served, Truth
from zerogap.engine.config import EngineConfig
from zerogap.engine.engine import Engine
from zerogap.engine.params import Request, SamplingParams
from zerogap.models.hub import resolve_model
from zerogap.models.tokenizer import load_tokenizer
from zerogap.models.weights import load_decoder
from zerogap.trainer.sample import TrainSequence
from zerogap.trainer.scoring import score

_UNKNOWN = ("repetition_penalty", "frequency_penalty", "presence_penalty")


class ExactEngine(Served):
    """Drives the engine from a thread of its own and fills the rows that HTTP waits for."""

    def __init__(self, model: str = "builtin:tiny-qwen3") -> None:
        super().__init__(Truth(kind="vllm"), chaos=0)
        self.folder = resolve_model(model)
        self.tokenizer = load_tokenizer(self.folder)
        self.decoder = load_decoder(self.folder)
        self.vocabulary = self.decoder.config.vocab_size
        self.length = self.decoder.config.max_positions
        self.engine = Engine(self.decoder, self.tokenizer, EngineConfig(num_pages=2048, max_sequences=64))
        self.running: dict[tuple[int, int, int], Row] = {}
        self.count = 0
        self.thread.start()

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids)

    def submit(self, rows: list[Row]) -> None:
        for row in rows:
            if any(row.params[name] not in (0.0, 1.0) for name in _UNKNOWN):
                raise BadRequestError("no penalties here")
        super().submit(rows)

    def _loop(self) -> None:
        while True:
            with self.lock:
                if not self._work_or_stop():
                    return
                later = [row for row in self.waiting if not self._add(row)]
                self.waiting = later
            for event in self.engine.step():
                row = self.running[event.key]
                row.tokens.append(event.token)
                row.logprobs.append(event.logprob)
                row.tops.append([(int(t), float(v)) for t, v in event.top_logprobs or ()])
                if event.completion:
                    row.cached = event.completion.cached_tokens
                    row.finish = event.completion.finish_reason
                    del self.running[event.key]
                    row.done.set()

    def _add(self, row: Row) -> bool:
        self.count += 1
        # The random numbers hang on the key: a seed is a key, and no seed one that nobody had before.
        key = (1, self.count, secrets.randbits(30)) if row.seed is None else (0, row.seed, 0)
        if key in self.running:
            return False
        p = row.params
        params = SamplingParams(
            temperature=p["temperature"], top_k=int(p["top_k"]), top_p=p["top_p"], min_p=p["min_p"],
            max_tokens=row.max_tokens, ignore_eos=row.ignore_eos, logprobs=row.top, stop_strings=tuple(row.stop),
        )  # fmt: skip
        self.running[key] = row
        self.engine.add(Request(key, tuple(row.prompt), params))
        return True

    def score(self, ids: list[int], temperature: float) -> list[Any]:
        """Score a text by prefill with the trainer's own forward."""
        count = len(ids) - 1
        sequence = TrainSequence(
            (0, 0, 0), list(ids), 1, torch.zeros(count), torch.ones(count, dtype=torch.bool), 0.0, 0
        )
        with self.lock:
            return [None, *score(self.decoder, [sequence])[0].logprob_T.tolist()]
