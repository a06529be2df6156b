"""Laws 1 and 2: what runs beside a sequence, and how it is cut up, has no influence on its tokens and log-probs.

Each drawn workload runs crowded in one engine; every sequence then runs alone in an engine with other page and chunk
sizes, and all together in one packed training forward. All log-probs are compared as integers.
"""

import contextlib
import functools
import math
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from zerogap.engine import Completion, Request, SamplingParams, suppressed_ids
from zerogap.models import decoder as decoder_module
from zerogap.models.rows import PackedCache, Rows
from zerogap.ops import portable as ops

from ..engine.build import make_engine
from ..support import FAMILY_VALUES, random_decoder, same_bits

THREADS = (1, 2, 3, 5, 8)
LONGEST = 40 + 12


@functools.cache
def shared_decoder(family="qwen3", **changes):
    return random_decoder(family, **changes)


@dataclass
class Workload:
    """Requests, when each arrives (forwards after the one before it), and the engine they meet."""

    requests: list[Request]
    delays: list[int]
    config: dict = field(default_factory=dict)
    threads: int = 1
    hooks: tuple = ()


@contextlib.contextmanager
def torch_threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_crowded(decoder, work: Workload) -> tuple[list[Completion], object]:
    with torch_threads(work.threads):
        engine, done = make_engine(decoder, **work.config), {}
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


def trainer_logprobs(decoder, done: list[Completion], hooks=()) -> list[torch.Tensor]:
    """The packed training forward over whole sequences; log-probs of each one's generated tokens."""
    whole = [[*completion.prompt, *completion.tokens] for completion in done]
    rows, targets, params, first = [], [], [], 0
    for completion, tokens in zip(done, whole, strict=True):
        for index, token in enumerate(completion.tokens):
            rows.append(first + len(completion.prompt) + index - 1)
            targets.append(token)
            params.append((completion.params, suppressed_ids(completion.params, index)))
        first += len(tokens)
    hidden_RK = decoder.hidden(Rows.packed(whole), PackedCache(), hooks)
    sampler = ops.SamplerRows(
        torch.tensor([p.temperature for p, _ in params], dtype=torch.float64),
        torch.tensor([p.top_k for p, _ in params]),
        torch.tensor([p.top_p for p, _ in params], dtype=torch.float64),
        torch.tensor([p.min_p for p, _ in params], dtype=torch.float64),
        tuple((row, ids) for row, (_, ids) in enumerate(params) if ids),
    )
    logprob_R = ops.token_logprobs(hidden_RK[rows], decoder.lm_head_weight, torch.tensor(targets), sampler).logprob_R
    return list(logprob_R.detach().split([len(completion.tokens) for completion in done]))


def different_tokens(first: list[Completion], second: list[Completion]) -> int:
    return sum(
        a.tokens != b.tokens or not same_bits(torch.tensor(a.logprobs), torch.tensor(b.logprobs))
        for a, b in zip(first, second, strict=True)
    )


def different_from_trainer(decoder, done: list[Completion], threads=1, hooks=()) -> int:
    with torch_threads(threads):
        theirs = trainer_logprobs(decoder, done, hooks)
    return sum(
        not same_bits(torch.tensor(completion.logprobs), logprob_T)
        for completion, logprob_T in zip(done, theirs, strict=True)
    )


@st.composite
def sampling(draw, number):
    return SamplingParams(
        temperature=draw(st.sampled_from([1.0, 1.0, 0.7, 1.3, 0.0])),
        top_k=draw(st.sampled_from([0, 0, 5])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.8])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05])),
        max_tokens=draw(st.integers(1, 12)),
        min_tokens=draw(st.sampled_from([0, 1])),
        stop_ids=draw(st.sampled_from([(), (7, 11)])),
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
    return Workload(draw(st.permutations(requests)), delays, config, draw(st.sampled_from(THREADS)))


def check_workload(family, work):
    decoder = shared_decoder(family)
    crowded, _ = run_crowded(decoder, work)
    assert different_tokens(crowded, run_alone(decoder, work)) == 0
    assert different_from_trainer(decoder, crowded, work.threads) == 0
    # In another packing order too.
    assert different_from_trainer(decoder, crowded[::-1]) == 0


QUICK = settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.too_slow])


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
        assert different_from_trainer(decoder, one, threads) == 0


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
