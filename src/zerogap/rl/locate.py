"""Finds the first decoder layer and op whose row differs between engine and trainer, by exact replay.

The engine's recorded forwards are repeated in their composition, since a fault that depends on the batch vanishes when
its sequence runs alone; the trainer's micro-batch is repeated likewise. Both leave a digest per op and row. A third
pass runs the sequence alone and says which side left the row law.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerogap import ops
from zerogap.engine import Engine, ScheduleTrace, replay
from zerogap.models.decoder import Decoder
from zerogap.models.rows import PackedCache
from zerogap.models.weights import tensor_digests
from zerogap.ops import ambient
from zerogap.rl.gate import Difference
from zerogap.trainer import TrainSequence, micro_batch, pack

Site = tuple[int, str]  # (layer, op); layer -1 is the embedding
Digests = dict[Site, dict[int, set[int]]]  # position -> digests of every time the row was computed


@dataclass(frozen=True)
class Fault:
    """Where engine and trainer part.

    Attributes:
        op: the first op whose row differs; ``lm_head`` or ``token_logprob`` after the decoder; None if the repetition
            shows no difference, or if both sides have the same value that is not finite.
        layer: its decoder layer; None outside the layers.
        position: absolute position of the first row of the sequence that differs there.
        side: ``engine`` or ``trainer``: whose row is not that of the sequence run alone; ``both``; None if unknown.
        tensors: weights that differ between the two sides, by name.
        engine_rows: row count of the engine forward that sampled the token.
        explanation: one sentence.
    """

    op: str | None
    layer: int | None
    position: int | None
    side: str | None
    tensors: tuple[str, ...]
    engine_rows: int | None
    explanation: str


def locate(
    engine: Engine,
    decoder: Decoder,
    sequences: Sequence[TrainSequence],
    difference: Difference,
    micro_batch_rows: int,
    members: Sequence[int],
) -> Fault:
    """Find the fault behind one different token.

    Args:
        engine: still holding the weights and the trace of the step.
        decoder: the trainer's, before the update.
        sequences: of the step, as the trainer packed them.
        difference: the token.
        micro_batch_rows: the trainer's budget.
        members: the sequences that the compared pass packed into micro-batches, ascending; the token's is one of them.
    """
    sequence = sequences[difference.index]
    last = sequence.prompt_length + difference.place - 1  # position whose output predicts the token
    tensors = _different_tensors(engine, decoder)
    with ambient.guard(), torch.no_grad():
        engine_side, logprob_engine, rows = _engine_digests(engine, sequence, last)
        packed = _micro_batch_of(sequences, difference.index, micro_batch_rows, set(members))
        trainer_side, logits_trainer = _trainer_digests(decoder, sequences, packed, difference.index, last)
        alone, logits_alone = _trainer_digests(decoder, [sequence], (0,), 0, last)
    for site, by_position in trainer_side.items():
        for position in sorted(by_position):
            found = engine_side.get(site, {}).get(position, by_position[position])
            if found != by_position[position]:
                side = _side(found, by_position[position], alone[site][position])
                return _fault(site, position, side, tensors, rows, decoder.config.num_layers)
    if logprob_engine is None:
        return Fault(None, None, None, None, tensors, rows, "the recorded schedule does not hold this token's row")
    if not (math.isfinite(difference.logprob_engine) or math.isfinite(difference.logprob_trainer)):
        said = "engine and trainer agree on a value that is not finite: the weights, not the arithmetic, are at fault"
        return Fault(None, None, last, None, tensors, rows, said)
    if not torch.equal(_words(logits_trainer), _words(logits_alone)):
        return Fault("lm_head", None, last, "trainer", tensors, rows, "the trainer's logits differ from those alone")
    if logprob_engine != difference.logprob_engine:
        said = "the engine's forward, repeated as recorded, gives another log-prob than it recorded: a transient fault"
        return Fault(None, None, last, "engine", tensors, rows, said + " (memory, race or a changed weight)")
    said = "all decoder rows agree; the LM head or the log-prob of the token differs"
    return Fault("token_logprob", None, last, None, tensors, rows, said)


def _side(engine: set[int], trainer: set[int], alone: set[int]) -> str:
    if trainer == alone:
        return "engine"
    return "trainer" if engine == alone else "both"


def _fault(site: Site, position: int, side: str, tensors: tuple[str, ...], rows: int | None, num_layers: int) -> Fault:
    layer, op = site
    where = f"layer {layer}" if 0 <= layer < num_layers else "outside the layers"
    said = f"{op} ({where}) gives the row at position {position} other bits in engine and trainer"
    if tensors:
        said += f"; the two sides hold different weights, first {tensors[0]}"
    elif side in ("engine", "trainer"):
        said += f"; the {side}'s row is not that of the sequence run alone"
    return Fault(op, layer if 0 <= layer < num_layers else None, position, side, tensors, rows, said)


def _different_tensors(engine: Engine, decoder: Decoder) -> tuple[str, ...]:
    """Return the weights that differ between the two sides, or whose copy in a backend differs from them."""
    weights = dict(decoder.named_parameters())
    stale = {*ops.stale_copies(weights)}
    if engine.decoder.weights != decoder.weights:  # one side rounds them
        stale |= {name for name, weight in weights.items() if weight.dim() == 2}
    if not engine.shared:
        stale |= {*ops.stale_copies(dict(engine.decoder.named_parameters()))}
        ours, theirs = tensor_digests(weights), tensor_digests(dict(engine.decoder.named_parameters()))
        stale |= {name for name, digest in ours.items() if theirs.get(name) != digest}
    return tuple(name for name in weights if name in stale)


def _engine_digests(engine: Engine, sequence: TrainSequence, last: int) -> tuple[Digests, float | None, int | None]:
    """Return the digests of the sequence's rows, the log-prob of its next token, and the rows of that forward.

    Rows that came from the prefix cache were computed for another sequence with the same beginning; they count.
    """
    trace = engine.trace
    wanted = sequence.tokens[: last + 1]
    shared = [_shared_prefix(tokens, wanted) for tokens in trace.tokens]
    selections = [_selection(trace, index, shared, last) for index in range(len(trace.steps))]
    recorder = _Recorder(lambda step: selections[step])
    sampled = _sampling_row(trace, sequence, last)
    logprob, rows = None, None
    for step in replay(trace, engine.decoder, engine.new_cache, (*engine.hooks, recorder)):
        if sampled is not None and step.index == sampled[0]:
            row = sampled[1]
            logprob = _logprob(engine.decoder, step.hidden_RK[row : row + 1], sequence, last)
            rows = len(step.hidden_RK)
    return recorder.digests, logprob, rows


def _sampling_row(trace: ScheduleTrace, sequence: TrainSequence, last: int) -> tuple[int, int] | None:
    """Return the forward, and the row in it, that first computed the row at ``last`` for this sequence.

    Later turns of the sequence are requests of their own under the same key; they may compute the row again.
    """
    tokens = sequence.tokens[: last + 2]
    for index, step in enumerate(trace.steps):
        first = 0
        for span in step.spans:
            own = trace.keys[span.number] == sequence.key and trace.tokens[span.number][: last + 2] == tokens
            if own and span.start <= last < span.start + span.rows:
                return index, first + last - span.start
            first += span.rows
    return None


def _shared_prefix(tokens: list[int], wanted: list[int]) -> int:
    """Count the leading tokens that two sequences have in common."""
    return next(
        (i for i, (a, b) in enumerate(zip(tokens, wanted, strict=False)) if a != b), min(len(tokens), len(wanted))
    )


def _selection(trace: ScheduleTrace, index: int, shared: list[int], last: int) -> tuple[list[int], list[int]]:
    """Return which rows of a forward are the sequence's own or a shared beginning's, and their positions."""
    rows, positions, first = [], [], 0
    for span in trace.steps[index].spans:
        for offset in range(span.rows):
            position = span.start + offset
            if position <= last and position < shared[span.number]:
                rows.append(first + offset)
                positions.append(position)
        first += span.rows
    return rows, positions


def _micro_batch_of(
    sequences: Sequence[TrainSequence], index: int, micro_batch_rows: int, members: Collection[int]
) -> tuple[int, ...]:
    return next(batch for batch in pack(sequences, sorted(members), micro_batch_rows) if index in batch)


def _trainer_digests(
    decoder: Decoder, sequences: Sequence[TrainSequence], members: tuple[int, ...], index: int, last: int
) -> tuple[Digests, Tensor]:
    """Return the digests of one sequence's rows in a micro-batch that holds it, and the logits of its last row.

    The rows of a prompt that it shares with others are its own too.
    """
    batch = micro_batch(sequences, members)
    rows = batch.places[members.index(index)][: last + 1].tolist()
    recorder = _Recorder(lambda _: (rows, list(range(last + 1))))
    hidden_RK = decoder.hidden(batch.rows(), PackedCache(), (recorder,))
    return recorder.digests, decoder.logits(hidden_RK[rows[last] : rows[last] + 1])


def _logprob(decoder: Decoder, hidden_1K: Tensor, sequence: TrainSequence, last: int) -> float:
    place = last + 1 - sequence.prompt_length
    sampler = sequence.sampler
    suppressed = tuple((0, ids) for index, ids in sampler.suppressed if index == place)
    settings = ops.SamplerRows.uniform_settings(1, sampler.temperature, sampler.top_k, sampler.top_p, sampler.min_p)
    settings = ops.SamplerRows(settings.temperature_R, settings.top_k_R, settings.top_p_R, settings.min_p_R, suppressed)
    target_1 = torch.tensor([sequence.tokens[last + 1]])
    return ops.token_logprobs(hidden_1K, decoder.lm_head_weight, target_1, settings).logprob_R.item()


class _Recorder:
    """A hook that keeps a digest of the selected rows of every op."""

    def __init__(self, select: Callable[[int], tuple[list[int], list[int]]]) -> None:
        self.digests: Digests = defaultdict(lambda: defaultdict(set))
        self._select = select
        self._step = -1
        self._rows: list[int] = []
        self._positions: list[int] = []

    def __call__(self, layer: int, op: str, x: Tensor) -> Tensor:
        if layer < 0:  # a forward begins with the embedding
            self._step += 1
            self._rows, self._positions = self._select(self._step)
        if self._rows:
            digests = _row_digests(x[self._rows])
            for position, digest in zip(self._positions, digests.tolist(), strict=True):
                self.digests[layer, op][position].add(digest)
        return x


def _row_digests(x: Tensor) -> Tensor:
    """Return one integer per row that depends on every bit of the row, whatever the summation order."""
    words_RW = _words(x.flatten(1)).to(torch.int64)
    generator = torch.Generator().manual_seed(0)
    weights_W = torch.randint(-(2**62), 2**62, (words_RW.shape[1],), generator=generator) | 1
    return (words_RW * weights_W).sum(1)  # wraps modulo 2^64: exact in any order


def _words(x: Tensor) -> Tensor:
    """Return the bits of float32 or bfloat16 values as integers of their size, on the CPU."""
    return x.cpu().contiguous().view(torch.int32 if x.dtype.itemsize == 4 else torch.int16)
