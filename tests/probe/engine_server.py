"""A real engine over HTTP for the tests: it batches, caches prefixes, samples and scores; and it can lie.

It speaks the dialect of vLLM, SGLang, llama.cpp, TGI or a plain OpenAI-style server. Every lie is a change of the
engine's behaviour at the place where real engines have it, not a canned answer.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sized
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.probe.tiny_model import EOS, VOCAB, TinyModel, decode, encode, log_softmax

MAX_LEN = 4096


@dataclass
class Truth:
    """How the engine behaves; the defaults are honest.

    Attributes:
        meaning: "raw", "temperature", "processed" (temperature, penalties, truncation, renormalised) or "masked".
        ignore_seed: "" (honoured), "random" (no effect) or "constant" (one seed for all).
        default: sampling values that rule when a request leaves them out.
        noise: a function of the step's situation that changes logits: "run", "batch", "cache", "order", "chunk".
        logprob: what happens to log-probs on their way out.
    """

    kind: str = "vllm"
    meaning: str = "raw"
    ignore_seed: str = ""
    seed_endpoints: tuple[str, ...] = ("/generate", "/v1/completions", "/v1/chat/completions", "/completion")
    default: dict[str, float] = field(default_factory=dict)
    noise: str = ""
    noise_size: float = 1e-4
    logprob: str = ""
    retokenise: bool = False
    health_only: bool = False
    die_at_first: bool = False
    hang: bool = False
    decode_noise: bool = False
    stream_differs: bool = False
    greedy_second: bool = False
    seed_with_batch: bool = False
    stop_kept: bool = False
    errors_as_500: bool = False
    score_follows_temperature: bool = False
    temperature_floor: float = 0.0
    slow_s: float = 0.0
    rate_limit: float = 0.0
    broken_share: float = 0.0
    serial: bool = False
    step_s: float = 0.0015
    key: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


OFF = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0,
        "presence_penalty": 0.0}  # fmt: skip


@dataclass
class Row:
    """One sequence under way."""

    prompt: list[int]
    params: dict[str, float]
    seed: int | None
    max_tokens: int
    top: int
    ignore_eos: bool
    stop: list[str]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[tuple[int, float]]] = field(default_factory=list)
    cached: int = 0
    finish: str = ""
    state: Any = None
    done: threading.Event = field(default_factory=threading.Event)
    source: Any = None
    order: int = 0
    neighbours_prompt: int = 0


class Served:
    """What HTTP needs of an engine: rows go in, and a thread of the engine's own advances them."""

    running: Sized

    def __init__(self, truth: Truth, chaos: int) -> None:
        self.truth = truth
        self.chaos = np.random.default_rng(chaos)
        self.waiting: list[Row] = []
        self.lock = threading.Condition()
        self.dead = False
        self.stopping = False
        self.thread = threading.Thread(target=self._loop, daemon=True)

    def submit(self, rows: list[Row]) -> None:
        with self.lock:
            if self.dead:
                raise RuntimeError("engine dead")
            self.waiting += rows
            self.lock.notify()

    def stop(self) -> None:
        with self.lock:
            self.stopping = True
            self.lock.notify()
        self.thread.join(10)

    def _work_or_stop(self) -> bool:
        """Wait, with the lock held, until there is work; False when told to stop."""
        while not self.waiting and not self.running and not self.stopping:
            self.lock.wait()
        return not self.stopping

    def _loop(self) -> None:
        raise NotImplementedError


class Engine(Served):
    """A scheduler thread that advances every running sequence by one token per step."""

    vocabulary = VOCAB
    length = MAX_LEN
    encode = staticmethod(encode)
    decode = staticmethod(decode)

    def __init__(self, truth: Truth) -> None:
        super().__init__(truth, chaos=1)
        self.model = TinyModel()
        self.running: list[Row] = []
        self.seen: set[tuple[int, ...]] = set()
        self.thread.start()

    def _loop(self) -> None:
        while True:
            with self.lock:
                if not self._work_or_stop():
                    for row in self.waiting + self.running:
                        row.done.set()
                    return
                limit = 1 if self.truth.serial else 64
                while self.waiting and len(self.running) < limit:
                    row = self.waiting.pop(0)
                    self.running.append(row)
                    self._prefill(row, len(self.running))
            for row in list(self.running):
                row.neighbours_prompt = max((len(r.prompt) for r in self.running if r is not row), default=0)
                self._step(row, len(self.running))
                if row.finish:
                    self.running.remove(row)
                    row.done.set()
            time.sleep(self.truth.step_s)  # a step costs the same for one row and for many

    def _prefill(self, row: Row, place: int) -> None:
        row.order = place
        key = tuple(row.prompt)
        row.cached = len(row.prompt) // 16 * 16 if key in self.seen and not row.params.get("_salt") else 0
        if not row.params.get("_salt"):
            self.seen.add(key)
        state = self.model.start()
        for token in row.prompt:
            state = self.model.advance(state, token)
        row.state = state
        seed = row.seed
        row.source = np.random.default_rng(self.chaos.integers(1 << 62) if seed is None else seed)

    def _noise(self, row: Row, batch: int) -> float:
        """Return how far the logits are off in this situation; 0 for an honest engine."""
        kind = self.truth.noise
        off = (
            (kind == "run" and self.chaos.random() < 0.5)
            or (kind == "batch" and batch > 6)
            or (kind == "cache" and row.cached > 0)
            or (kind == "order" and row.order % 2 == 0)
            or (kind == "neighbour" and row.neighbours_prompt > 150)
            or (kind == "chunk" and row.neighbours_prompt > 500 and len(row.prompt) > 1000)
            or (self.truth.decode_noise and len(row.tokens) > 0)
        )
        return self.truth.noise_size if off else 0.0

    def _step(self, row: Row, batch: int) -> None:
        logits = self.model.logits(row.state)
        noise = self._noise(row, batch)
        if self.truth.seed_with_batch and batch > 1 and row.seed is not None:
            row.source.random()
        if noise:
            logits = logits + noise * np.sin(np.arange(VOCAB))
        if row.ignore_eos:
            logits[EOS] = -1e9
        token, value, top = self.sample(row, logits)
        row.tokens.append(token)
        row.logprobs.append(value)
        row.tops.append(top)
        row.state = self.model.advance(row.state, token)
        if token == EOS or any(stop in decode(row.tokens) for stop in row.stop):
            row.finish = "stop"
        elif len(row.tokens) >= row.max_tokens:
            row.finish = "length"

    def sample(self, row: Row, raw: np.ndarray) -> tuple[int, float, list[tuple[int, float]]]:
        p = row.params
        logits = penalised(raw, row, p)
        temperature = p["temperature"]
        if 0 < temperature < self.truth.temperature_floor:
            temperature = self.truth.temperature_floor
        scaled = logits / temperature if temperature > 0 else logits
        keep = kept_set(log_softmax(scaled), p) if temperature > 0 else np.ones(VOCAB, dtype=bool)
        cut = np.where(keep, scaled, -np.inf)
        if temperature == 0:
            token = int(np.argsort(logits)[-2 if self.truth.greedy_second and len(row.tokens) == 3 else -1])
        else:
            token = int(row.source.choice(VOCAB, p=np.exp(log_softmax(cut))))
        shown = {
            "raw": lambda: log_softmax(raw),
            "temperature": lambda: log_softmax(scaled),
            "processed": lambda: log_softmax(cut),
            "masked": lambda: np.where(keep, log_softmax(scaled), -np.inf),
            "tripled": lambda: log_softmax(logits / (3 * temperature) if temperature not in (0, 1) else logits),
        }[self.truth.meaning]()
        shown = shown.astype(np.float32).astype(np.float64)
        best = [int(t) for t in np.lexsort((np.arange(VOCAB), -shown))[: row.top] if np.isfinite(shown[t])]
        if token not in best:
            best.append(token)
        return token, float(shown[token]), [(t, float(shown[t])) for t in best]

    def score(self, ids: list[int], temperature: float) -> list[float | None]:
        state, found = self.model.start(), [None]
        scale = temperature if self.truth.score_follows_temperature and temperature > 0 else 1.0
        for token, following in itertools.pairwise(ids):
            state = self.model.advance(state, token)
            logits = self.model.logits(state)
            logits[EOS] = -1e9
            found.append(float(np.float32(log_softmax(logits / scale)[following])))
        return found


def penalised(raw: np.ndarray, row: Row, p: dict[str, float]) -> np.ndarray:
    """Return the logits after penalties: repetition over prompt and output, the others over output."""
    logits = raw.copy()
    if p["repetition_penalty"] != 1.0:
        seen = np.unique(np.array(row.prompt + row.tokens, dtype=np.int64))
        logits[seen] = np.where(
            logits[seen] > 0, logits[seen] / p["repetition_penalty"], logits[seen] * p["repetition_penalty"]
        )
    counts = np.bincount(np.array(row.tokens, dtype=np.int64), minlength=VOCAB)
    return logits - p["frequency_penalty"] * counts - p["presence_penalty"] * (counts > 0)


def kept_set(logprob: np.ndarray, p: dict[str, float]) -> np.ndarray:
    """Return bool [VOCAB]: what top-k, top-p and min-p leave."""
    order = np.lexsort((np.arange(VOCAB), -logprob))
    probs = np.exp(logprob[order])
    keep = np.ones(VOCAB, dtype=bool)
    if p["top_k"] > 0:
        keep &= np.arange(VOCAB) < p["top_k"]
    if p["top_p"] < 1:
        keep &= np.cumsum(probs) - probs < p["top_p"]
    if p["min_p"] > 0:
        keep &= probs >= p["min_p"] * probs[0]
    kept = np.zeros(VOCAB, dtype=bool)
    kept[order] = keep
    return kept


class BadRequestError(Exception):
    pass
