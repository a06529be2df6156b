"""Laws 1 and 2: what runs beside a sequence, and how it is cut up, has no influence on its tokens and log-probs.

Each drawn workload runs crowded in one engine; every sequence then runs alone in an engine with other page and chunk
sizes, and all together in one packed training forward. All log-probs are compared as integers.
"""

import contextlib
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from zerogap import ops
from zerogap.engine import Completion, Request, SamplingParams
from zerogap.models import decoder as decoder_module
from zerogap.models.rows import Rows
from zerogap.rl.custom import Transcript
from zerogap.rl.rollout import Rollout, train_sequence
from zerogap.rl.tasks import Prompt
from zerogap.trainer import TrainSequence, score

from ..engine.build import make_engine
from ..support import FAMILY_VALUES, random_decoder, same_bits

THREADS = (1, 2, 3, 5, 8)
TOOL = (9, 4, 9)  # inserted between two turns
LONGEST = 40 + 12 + len(TOOL) + 12


@functools.cache
def shared_decoder(family="qwen3", sharpness=1.0, **changes):
    """A decoder whose logits are ``sharpness`` times as far apart as random weights make them."""
    decoder = random_decoder(family, **changes)
    with torch.no_grad():
        decoder.lm_head_weight.mul_(sharpness)
    return decoder


@dataclass
class Workload:
    """Requests, when each arrives (forwards after the one before it), and the engine they meet."""

    requests: list[Request]
    delays: list[int]
    config: dict = field(default_factory=dict)
    threads: int = 1
    hooks: tuple = ()
    vocab_size: int = 50
    sharpness: float = 1.0

    def next_turn(self, done: list[Completion]) -> "Workload":
        """The same sequences going on after a tool's answer, in the same company."""
        requests = [
            Request(one.key, (*one.prompt, *one.tokens, *TOOL), replace(one.params, seed=one.params.seed + 1))
            for one in done
        ]
        return replace(self, requests=requests)


@contextlib.contextmanager
def torch_threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_crowded(decoder, work: Workload, engine=None) -> tuple[list[Completion], object]:
    with torch_threads(work.threads):
        engine, done = engine or make_engine(decoder, **work.config), {}
        engine.hooks = work.hooks

        def step():
            done.update({event.key: event.completion for event in engine.step() if event.completion})

        for one, delay in zip(work.requests, work.delays, strict=True):
            for _ in range(delay):
                step()
            engine.add(one)
        while engine.has_work():
            step()
    return [done[one.key] for one in work.requests], engine


def run_alone(decoder, work: Workload) -> list[Completion]:
    with torch_threads(1):
        engine = make_engine(decoder, page_size=16, num_pages=100, prefix_cache=False)
        engine.hooks = work.hooks
        return [engine.generate([one])[0] for one in work.requests]


def as_trained(turns: Sequence[Completion]) -> TrainSequence:
    """What the loop would give the trainer of a sequence's turns."""
    transcript = Transcript(list(turns[0].prompt))
    for number, completion in enumerate(turns):
        transcript.add_tokens(TOOL if number else ())
        transcript.add_completion(completion)
    return train_sequence(Rollout(turns[0].key, Prompt("drawn", "", ""), transcript), 1.0, turns[0].params)


@contextlib.contextmanager
def hooked(decoder, hooks):
    """The decoder with hooks in every forward, as a faulty trainer would have."""
    decoder.hidden = lambda rows, cache: type(decoder).hidden(decoder, rows, cache, hooks)
    try:
        yield
    finally:
        del decoder.hidden


def different_tokens(first: list[Completion], second: list[Completion]) -> int:
    return sum(
        (a.tokens, a.text) != (b.tokens, b.text) or not same_bits(torch.tensor(a.logprobs), torch.tensor(b.logprobs))
        for a, b in zip(first, second, strict=True)
    )


def different_from_trainer(decoder, *turns: list[Completion], threads=1, hooks=(), micro_batch_rows=2048) -> int:
    """Sequences whose log-probs the trainer's packed forward does not repeat; greedy ones are never trained on."""
    sequences = [as_trained(own) for own in zip(*turns, strict=True) if own[0].params.temperature > 0]
    with torch_threads(threads), hooked(decoder, hooks):
        scores = score(decoder, sequences, micro_batch_rows)
    return sum(
        not same_bits(sequence.trained_logprobs_engine, scored.logprob_T)
        for sequence, scored in zip(sequences, scores, strict=True)
    )


@st.composite
def sampling(draw, number):
    return SamplingParams(
        temperature=draw(st.sampled_from([1.0, 1.0, 0.7, 1.3, 0.0])),
        top_k=draw(st.sampled_from([0, 0, 5, 300])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.8, 0.9999])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05])),
        max_tokens=draw(st.integers(1, 12)),
        min_tokens=draw(st.sampled_from([0, 1])),
        stop_ids=draw(st.sampled_from([(), (7, 11)])),
        stop_strings=draw(st.sampled_from([(), ("e", "t", "é"), ("ab", "5", "=")])),
        ignore_eos=draw(st.booleans()),
        seed=draw(st.sampled_from([0, 1])),
    )


@st.composite
def workloads(draw):
    bases = [[(7 * base + 3 * i + i // 5) % 50 for i in range(40)] for base in range(2)]
    count = draw(st.integers(2, 7))
    requests = []
    for number in range(count):
        base, length = draw(st.integers(0, 1)), draw(st.sampled_from([1, 2, 8, 16, 17, 31, 33, 40]))
        requests.append(Request((0, base, number), tuple(bases[base][:length]), draw(sampling(number))))
    page_size = draw(st.sampled_from([1, 3, 16, 64]))
    least = -(-LONGEST // page_size)
    config = {
        "page_size": page_size,
        "num_pages": least + draw(st.sampled_from([0, 1, 3])) if draw(st.booleans()) else 8 * least,
        "max_rows_per_step": draw(st.sampled_from([1, 7, 64, 512])),
        "max_sequences": draw(st.sampled_from([2, 256])),
        "prefix_cache": draw(st.booleans()),
    }
    delays = [draw(st.sampled_from([0, 0, 1, 5])) for _ in requests]
    return Workload(
        draw(st.permutations(requests)),
        delays,
        config,
        draw(st.sampled_from(THREADS)),
        # Above 256 tokens the nucleus is searched among the most likely first, above 4,096 among more if need be.
        vocab_size=draw(st.sampled_from([50, 600, 5000])),
        sharpness=draw(st.sampled_from([1.0, 10.0, 30.0])),
    )


def check_workload(family, work):
    decoder = shared_decoder(family, work.sharpness, vocab_size=work.vocab_size)
    first, engine = run_crowded(decoder, work)
    assert different_tokens(first, run_alone(decoder, work)) == 0
    later = work.next_turn(first)
    second, _ = run_crowded(decoder, later, engine)
    assert different_tokens(second, run_alone(decoder, later)) == 0
    assert different_from_trainer(decoder, first, second, threads=work.threads) == 0
    # In another packing order and in smaller micro-batches too.
    assert different_from_trainer(decoder, first[::-1], second[::-1], micro_batch_rows=60) == 0


QUICK = settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.too_slow])


@QUICK
@given(work=workloads())
def test_a_crowd_changes_nothing(work):
    check_workload("qwen3", work)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", sorted(FAMILY_VALUES))
@settings(QUICK, max_examples=150)
@given(work=workloads())
def test_a_crowd_changes_nothing_for_any_family(family, work):
    check_workload(family, work)


def crowd(**changes):
    """A fixed workload that is sure to chunk, share pages and preempt."""
    prompts = [tuple((11 * base + 3 * i) % 50 for i in range(25)) for base in range(3)]
    requests = [
        Request((0, base, sample), prompt, SamplingParams(max_tokens=10, ignore_eos=True))
        for sample in range(3)
        for base, prompt in enumerate(prompts)
    ]
    config = {"page_size": 3, "num_pages": 50, "max_rows_per_step": 23}
    return Workload(requests, [0] * len(requests), **{"config": config, **changes})


@pytest.mark.parametrize("family", sorted(FAMILY_VALUES))
def test_shared_pages_chunks_and_preemption_change_nothing(family):
    decoder, work = shared_decoder(family), crowd()
    crowded, engine = run_crowded(decoder, work)
    assert engine.statistics.preemptions > 0
    assert engine.statistics.cached_tokens > 0
    assert different_tokens(crowded, run_alone(decoder, work)) == 0
    assert different_from_trainer(decoder, crowded) == 0


def test_threads_change_nothing_where_ops_are_large_enough_to_be_split():
    decoder = shared_decoder(hidden_size=256, intermediate_size=704, vocab_size=2000, max_position_embeddings=700)
    prompt = tuple((13 * i + i // 7) % 2000 for i in range(400))
    requests = [Request((0, 0, n), prompt[n:], SamplingParams(max_tokens=3, ignore_eos=True)) for n in range(3)]
    work = Workload(requests, [0] * 3, {"num_pages": 100})
    one, _ = run_crowded(decoder, work)
    for threads in THREADS[1:]:
        work.threads = threads
        assert different_tokens(run_crowded(decoder, work)[0], one) == 0
        assert different_from_trainer(decoder, one, threads=threads) == 0


# Negative controls: each breaks the law on purpose, and the comparisons above must see it.


def adds_row_count(layer, op, x):
    return x + len(x) * 1e-6 if (layer, op) == (1, "q_proj") else x


def treats_the_tail_differently(layer, op, x):
    """A tail path: rows beyond the last full tile of 8."""
    if (layer, op) != (0, "mlp_norm"):
        return x
    full = len(x) // 8 * 8
    return torch.cat([x[:full], x[full:] * (1 + 2**-20)])


@pytest.mark.parametrize("fault", [adds_row_count, treats_the_tail_differently])
def test_a_batch_variant_op_is_seen(fault):
    work = crowd(hooks=(fault,))
    crowded, _ = run_crowded(shared_decoder(), work)
    assert different_tokens(crowded, run_alone(shared_decoder(), work)) > 0
    assert different_from_trainer(shared_decoder(), crowded, hooks=(fault,)) > 0


def test_a_product_split_by_row_count_is_seen(monkeypatch):
    exact = ops.linear

    def split_by_rows(x_RK, weight_NK, bias_N=None, segments=1):
        cut = x_RK.shape[1] // 2 if len(x_RK) % 2 else x_RK.shape[1] // 4
        rest = exact(x_RK[:, cut:].contiguous(), weight_NK[:, cut:].contiguous(), bias_N)
        return exact(x_RK[:, :cut].contiguous(), weight_NK[:, :cut].contiguous()) + rest

    monkeypatch.setattr(decoder_module.ops, "linear", split_by_rows)
    crowded, _ = run_crowded(shared_decoder(), crowd())
    assert different_tokens(crowded, run_alone(shared_decoder(), crowd())) > 0


def test_a_shifted_position_is_seen(monkeypatch):
    build = Rows.build

    def shifted(sequences, page_size):
        rows = build(sequences, page_size)
        rows.positions_R.add_(1)
        return rows

    monkeypatch.setattr(Rows, "build", staticmethod(shifted))
    crowded, _ = run_crowded(shared_decoder(), crowd())
    monkeypatch.undo()
    assert different_from_trainer(shared_decoder(), crowded) > 0


def test_stale_weights_in_the_engine_are_seen():
    crowded, _ = run_crowded(shared_decoder(), crowd())
    fresh = random_decoder()
    with torch.no_grad():
        weight = fresh.model.layers[1].mlp.down_proj.weight
        weight.copy_(torch.nextafter(weight, torch.tensor(1.0)))
    assert different_from_trainer(fresh, crowded) > 0


def test_random_numbers_that_depend_on_the_batch_are_seen(monkeypatch):
    monkeypatch.setattr(
        ops, "uniform", lambda seed, keys: torch.arange(len(keys), dtype=torch.float64) / max(1, len(keys))
    )
    crowded, _ = run_crowded(shared_decoder(), crowd())
    assert different_tokens(crowded, run_alone(shared_decoder(), crowd())) > 0


POISON = 49


def poisoned_decoder():
    """A decoder whose rows of one token are not finite, and so everything later in that token's sequence."""
    decoder = random_decoder()
    with torch.no_grad():
        decoder.model.embed_tokens.weight[POISON] = torch.nan
    return decoder


def poisoned_crowd(prefix_cache):
    """Sequences with and without the poisonous token; the others cannot sample it."""
    params = SamplingParams(max_tokens=10, min_tokens=10, stop_ids=(POISON,), ignore_eos=True)
    prompts = [tuple((11 * base + 3 * i) % 49 for i in range(17)) for base in range(4)]
    prompts[1], prompts[3] = (POISON, *prompts[1]), (*prompts[0][:12], POISON)
    requests = [Request((0, base, n), prompt, params) for n in range(3) for base, prompt in enumerate(prompts)]
    config = {"page_size": 3, "num_pages": 25, "max_rows_per_step": 11, "prefix_cache": prefix_cache}
    return Workload(requests, [0] * len(requests), config)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_value_that_is_not_finite_stays_in_its_sequence(prefix_cache):
    decoder, work = poisoned_decoder(), poisoned_crowd(prefix_cache)
    crowded, engine = run_crowded(decoder, work)
    assert engine.statistics.preemptions > 0
    poisoned = [POISON in completion.prompt for completion in crowded]
    assert [any(map(math.isnan, completion.logprobs)) for completion in crowded] == poisoned
    healthy = [one for one, bad in zip(work.requests, poisoned, strict=True) if not bad]
    alone = run_alone(decoder, Workload(healthy, [0] * len(healthy)))
    assert different_tokens([done for done, bad in zip(crowded, poisoned, strict=True) if not bad], alone) == 0
