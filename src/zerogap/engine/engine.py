"""The rollout engine: continuous batching over one decoder, exact to the bit whatever runs together."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from zerogap import ops
from zerogap.engine.capture import Capture
from zerogap.engine.config import EngineConfig, page_count
from zerogap.engine.forward import Forward, default_capture
from zerogap.engine.held import change_counts, check_state_dict
from zerogap.engine.pages import PagePool
from zerogap.engine.params import Key, Request
from zerogap.engine.scheduler import Chunk, Scheduler
from zerogap.engine.sequence import Completion, FinishReason, Sequence, TokenEvent, TopLogprobs
from zerogap.engine.stops import Detokenizer, TextTail
from zerogap.engine.trace import ScheduleTrace
from zerogap.errors import NotHeldError, UsageError, ZerogapError
from zerogap.models.decoder import Decoder, Hook
from zerogap.models.rows import PagedCache
from zerogap.models.weights import weights_digest
from zerogap.ops import ambient


@dataclass
class EngineStatistics:
    """Counts since the engine began.

    Attributes:
        generated_tokens: tokens drawn.
        prefill_tokens: rows computed beside those of decoding sequences, recomputed ones included.
        cached_tokens: rows taken from the prefix cache instead.
        preemptions: sequences sent back when pages ran out.
        steps: forwards.
        replayed_steps: those of them that were captured before (``zerogap.engine.decode``).
        forward_seconds: time in the forwards and the sampler.
    """

    generated_tokens: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    replayed_steps: int = 0
    forward_seconds: float = 0.0


class Engine:
    """Generates tokens for many requests at once. Not thread-safe: one caller drives it.

    Args:
        decoder: becomes the engine's own; nobody else may change its weights (``load_weights`` copies into them),
            unless they are shared.
        tokenizer: decodes text and names the tokens that end it.
        config: memory and step sizes.
        shared: the decoder's weights are another's, a trainer's, who changes them between rollouts and says so by
            ``weights_changed``; the engine takes no copy, and refuses to step over changes that nobody told it of.
        capture: how decode steps are captured; None: as CUDA graphs on a GPU, and not at all elsewhere.

    Attributes:
        version: of the weights, 0 at the start.
        digest: of the weights' names, shapes and bytes.
        trace: the schedule of every forward under the current weights.
        statistics: counts since the engine began.
        hooks: passed to the decoder at every forward.

    Raises:
        UsageError: if the KV memory is too little.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Detokenizer,
        config: EngineConfig,
        *,
        shared: bool = False,
        capture: Capture | None = None,
    ) -> None:
        self.decoder = decoder.eval()
        self.shared = shared
        if not shared:
            decoder.requires_grad_(False)
        self._weights = dict(decoder.named_parameters())
        self._counts = change_counts(self._weights)
        self.tokenizer = tokenizer
        self.config = config
        bytes_per_page = PagedCache.page_bytes(decoder.config, config.page_size, decoder.dtype, decoder.device)
        self.num_pages = page_count(config, bytes_per_page, decoder.config.max_positions)
        self.hooks: tuple[Hook, ...] = ()
        self.version = 0
        self.digest = weights_digest(decoder.state_dict())
        self.trace = ScheduleTrace(0)
        self.statistics = EngineStatistics()
        capture = capture or default_capture(decoder, config.cuda_graphs)
        self._forward = Forward(decoder, self.num_pages, config.page_size, config.max_sequences, capture)
        pool = PagePool(self.num_pages, config.page_size, config.prefix_cache)
        self._scheduler = Scheduler(pool, config.max_rows_per_step, config.max_sequences)
        self._sequences: dict[Key, Sequence] = {}

    def new_cache(self) -> PagedCache:
        """Return an empty KV cache of the engine's size."""
        decoder = self.decoder
        return PagedCache(decoder.config, self.num_pages, self.config.page_size, decoder.dtype, decoder.device)

    def add(self, request: Request, want_text: bool = False) -> None:
        """Queue a request.

        Args:
            request: what to generate.
            want_text: decode at every token, so that ``TokenEvent.text`` is filled.

        Raises:
            UsageError: if it can never run: too long for the model or the KV memory, unknown token ids, key in use.
        """
        self._check(request)
        params = request.params.with_eos(self._eos_ids())
        tokens = list(request.prompt)
        self._sequences[request.key] = sequence = Sequence(
            key=request.key,
            tokens=tokens,
            prompt_len=len(tokens),
            params=params,
            number=self.trace.register(request.key, tokens),
            tail=TextTail(self.tokenizer, params.stop_strings) if want_text or params.stop_strings else None,
            stops=frozenset(params.stop_ids),
        )
        self._scheduler.waiting.append(sequence)

    def abort(self, key: Key) -> Completion | None:
        """End a request at once and return what it has; None if it is not in the engine (any more)."""
        sequence = self._sequences.get(key)
        return None if sequence is None else self._finish(sequence, "abort")

    def has_work(self) -> bool:
        """Return whether requests wait or run."""
        return bool(self._sequences)

    def step(self) -> list[TokenEvent]:
        """Run one forward over the next rows of many sequences; return the tokens drawn, none if it only prefilled.

        Raises:
            ZerogapError: shared weights have changed since the engine was last told of it.
        """
        if self.shared:
            self._require_unchanged()
        chunks = self._scheduler.schedule()
        if not chunks:
            return []
        cleared = self._scheduler.pool.pop_dirty()
        self.trace.record(chunks, cleared)
        drawing = [chunk.sequence for chunk in chunks if chunk.samples]
        began = time.perf_counter()
        with ambient.guard(), torch.inference_mode():
            draws = self._forward.run(chunks, cleared, self.hooks)
        self.statistics.forward_seconds += time.perf_counter() - began
        self._scheduler.computed(chunks)
        self._count(chunks, len(drawing))
        return [] if draws is None else [self._append(*drawn) for drawn in zip(drawing, *draws, strict=True)]

    def generate(self, requests: Iterable[Request]) -> list[Completion]:
        """Run requests to their ends and return the completions in request order."""
        requests = list(requests)
        completions = {
            event.key: event.completion for event in self._drive(requests, want_text=False) if event.completion
        }
        return [completions[request.key] for request in requests]

    def stream(self, requests: Iterable[Request]) -> Iterator[TokenEvent]:
        """Yield the tokens of requests, with their text, as they are drawn; closing the iterator aborts the rest."""
        return self._drive(list(requests), want_text=True)

    def load_weights(self, state_dict: Mapping[str, Tensor], version: int, digest: str | None = None) -> None:
        """Copy new weights in, under a new version: pages of other versions become unusable, the trace restarts.

        Args:
            state_dict: every weight under its Hugging Face name.
            version: of these weights.
            digest: what ``weights_digest`` must give for them, if known.

        Raises:
            UsageError: if requests wait or run, if names, shapes or types do not fit (nothing is changed then), or if
                the digest differs, or if the weights are shared.
        """
        if self.shared:
            raise UsageError("load_weights: the weights are shared, their owner changes them; call weights_changed")
        self._require_idle("load_weights")
        own = self.decoder.state_dict()
        check_state_dict(own, state_dict)
        with torch.no_grad():
            for name, weight in own.items():
                weight.copy_(state_dict[name])
        self._start_version(version)
        if digest is not None and digest != self.digest:
            raise UsageError(f"load_weights: weights of version {version} have digest {self.digest}, expected {digest}")

    def weights_changed(self, version: int) -> None:
        """Take note that the owner of shared weights has changed them: the same follows as from ``load_weights``.

        Args:
            version: of the weights as they are now.

        Raises:
            UsageError: if requests wait or run, or if the weights are not shared.
            NotHeldError: a copy of a weight that the backend computes with has other values than the weight.
        """
        if not self.shared:
            raise UsageError("weights_changed: the engine's weights are its own; call load_weights")
        self._require_idle("weights_changed")
        stale = ops.stale_copies(self._weights)
        if stale:
            raise NotHeldError(
                f"weights of version {version}: the packed copy of {stale[0]} (and {len(stale) - 1} more) does not hold"
                " the weight; it was written to without torch's knowledge, or memory is broken: go on from a checkpoint"
            )
        self._counts = change_counts(self._weights)
        self._start_version(version)

    def _start_version(self, version: int) -> None:
        self._scheduler.start_version(version)
        self.version = version
        self.digest = weights_digest(self.decoder.state_dict())
        self.trace = ScheduleTrace(version)
        if self._forward.decode is not None:
            self._forward.decode.weights_changed()

    def _require_idle(self, what: str) -> None:
        if self._sequences:
            raise UsageError(
                f"{what}: {len(self._sequences)} requests still wait or run, and a sequence belongs to one"
                " weights version; finish or abort them first"
            )

    def _require_unchanged(self) -> None:
        for (name, now), known in zip(change_counts(self._weights).items(), self._counts.values(), strict=True):
            if now != known:
                raise ZerogapError(
                    f"engine: {name} has changed since the engine took version {self.version} of the shared weights; "
                    "call weights_changed after every update"
                )

    def _drive(self, requests: list[Request], want_text: bool) -> Iterator[TokenEvent]:
        if self._sequences:
            raise UsageError("generate and stream drive the engine alone; use add and step beside other requests")
        try:
            for request in requests:
                self.add(request, want_text)
            while self.has_work():
                yield from self.step()
        finally:
            for request in requests:
                self.abort(request.key)

    def _append(self, sequence: Sequence, token: int, logprob: float, top: TopLogprobs | None) -> TokenEvent:
        params, tail = sequence.params, sequence.tail
        sequence.tokens.append(token)
        sequence.logprobs.append(logprob)
        if top is not None:
            sequence.top_logprobs.append(top)
        generated = sequence.generated
        reason: FinishReason | None = None
        armed = generated >= params.min_tokens
        if token in sequence.stops and armed:
            reason = "stop"
        elif tail is not None and tail.push(token, armed):
            return self._event(sequence, token, logprob, top, self._finish(sequence, "stop", flush=False))
        elif generated >= params.max_tokens:
            reason = "length"
        return self._event(sequence, token, logprob, top, self._finish(sequence, reason) if reason else None)

    def _event(
        self, sequence: Sequence, token: int, logprob: float, top: TopLogprobs | None, completion: Completion | None
    ) -> TokenEvent:
        text = sequence.tail.show(ended=completion is not None) if sequence.tail is not None else ""
        return TokenEvent(sequence.key, token, logprob, text, top, completion)

    def _finish(self, sequence: Sequence, reason: FinishReason, flush: bool = True) -> Completion:
        self._scheduler.remove(sequence)
        del self._sequences[sequence.key]
        tokens = sequence.tokens[sequence.prompt_len :]
        if sequence.tail is not None:
            if flush:
                sequence.tail.flush()
            text = sequence.tail.text
        else:
            ended_by_id = reason == "stop"
            text = self.tokenizer.decode(tokens[:-1] if ended_by_id else tokens)
        return Completion(
            key=sequence.key,
            prompt=tuple(sequence.tokens[: sequence.prompt_len]),
            tokens=tokens,
            logprobs=sequence.logprobs,
            finish_reason=reason,
            text=text,
            top_logprobs=sequence.top_logprobs if sequence.params.logprobs else None,
            cached_tokens=sequence.cached_tokens or 0,
            weights_version=self.version,
            params=sequence.params,
        )

    def _eos_ids(self) -> tuple[int, ...]:
        return tuple(token for token in self.tokenizer.stop_ids if token < self.decoder.config.vocab_size)

    def _check(self, request: Request) -> None:
        key, params, model = request.key, request.params, self.decoder.config
        if key in self._sequences:
            raise UsageError(f"request {key}: a request with this key waits or runs; keys must be unique")
        length = len(request.prompt) + params.max_tokens
        said = f"request {key}: prompt of {len(request.prompt)} tokens and max_tokens={params.max_tokens}"
        if length > model.max_positions:
            raise UsageError(f"{said} need {length} positions; the model has {model.max_positions}")
        # The last token that is drawn is never computed.
        need = self._scheduler.pool.pages_for(length - 1)
        if need > self.num_pages:
            raise UsageError(f"{said} need {need} pages of {self.config.page_size}; the KV memory has {self.num_pages}")
        for what, tokens in (("prompt", request.prompt), ("stop_ids", params.stop_ids)):
            if not all(0 <= token < model.vocab_size for token in tokens):
                wrong = next(token for token in tokens if not 0 <= token < model.vocab_size)
                raise UsageError(
                    f"request {key}: {what} has token id {wrong}; the vocabulary is 0..{model.vocab_size - 1}"
                )
        if params.min_tokens and len(set(params.with_eos(self._eos_ids()).stop_ids)) >= model.vocab_size:
            raise UsageError(
                f"request {key}: min_tokens={params.min_tokens} with every token a stop id leaves none to draw"
            )

    def _count(self, chunks: list[Chunk], drawn: int) -> None:
        statistics = self.statistics
        statistics.steps += 1
        statistics.generated_tokens += drawn
        statistics.replayed_steps = self._forward.replayed
        statistics.prefill_tokens += sum(chunk.count for chunk in chunks if not chunk.decodes)
        statistics.cached_tokens += self.config.page_size * sum(chunk.hits for chunk in chunks)
        statistics.preemptions = self._scheduler.preemptions
