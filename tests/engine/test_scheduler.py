"""The scheduler against a model of the memory: each slot remembers which tokens its row was computed from."""

import random

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from zerogap.engine.pages import PagePool
from zerogap.engine.params import SamplingParams
from zerogap.engine.scheduler import Scheduler
from zerogap.engine.sequence import Sequence


class SimulatedEngine:
    """Runs a scheduler without a decoder, checking every row's past against the memory."""

    def __init__(self, num_pages, page_size, max_rows, max_sequences, prefix_cache=True):
        self.pool = PagePool(num_pages, page_size, prefix_cache)
        self.scheduler = Scheduler(self.pool, max_rows, max_sequences)
        self.memory = {}  # slot -> weights version and tokens up to and including its position
        self.version = 0
        self.sequences = []
        self.rows_computed = 0
        self.rows_per_step = []
        self.hits = 0

    def add(self, prompt, max_tokens, salt=0):
        number = len(self.sequences)
        params = SamplingParams(max_tokens=max_tokens, seed=salt)
        sequence = Sequence((0, 0, number), list(prompt), len(prompt), params, number)
        self.sequences.append(sequence)
        self.scheduler.waiting.append(sequence)
        return sequence

    def start_version(self, version):
        self.scheduler.start_version(version)
        self.version = version

    def live(self):
        return [*self.scheduler.running, *self.scheduler.waiting]

    def step(self):
        chunks = self.scheduler.schedule()
        size = self.pool.page_size
        for page in self.pool.pop_dirty():
            for slot in range(page * size, (page + 1) * size):
                self.memory.pop(slot, None)
        assert len({id(chunk.sequence) for chunk in chunks}) == len(chunks)
        assert sum(chunk.count for chunk in chunks) <= self.scheduler.max_rows
        for chunk in chunks:
            self.compute(chunk)
        sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        self.scheduler.computed(chunks)
        self.rows_per_step.append(sum(chunk.count for chunk in chunks))
        self.hits += sum(chunk.hits for chunk in chunks)
        for sequence in sampling:
            sequence.tokens.append((sum(sequence.tokens) + sequence.params.seed) % 2)
            if sequence.generated >= sequence.params.max_tokens:
                self.scheduler.remove(sequence)
        return chunks

    def compute(self, chunk):
        tokens, table, size = tuple(chunk.sequence.tokens), chunk.sequence.block_table, self.pool.page_size
        assert chunk.count > 0
        assert len(table) == self.pool.pages_for(chunk.start + chunk.count)
        slots = [table[position // size] * size + position % size for position in range(len(table) * size)]
        for position in range(chunk.start):
            assert self.memory.get(slots[position]) == (self.version, tokens[: position + 1]), (
                "a row's past is another sequence's"
            )
        for position in range(chunk.start, len(slots)):
            assert slots[position] not in self.memory, "a slot was not cleared before its new owner"
        for position in range(chunk.start, chunk.start + chunk.count):
            self.memory[slots[position]] = (self.version, tokens[: position + 1])
        self.rows_computed += chunk.count

    def run(self, limit=10_000):
        while self.live():
            assert self.step()
            limit -= 1
            assert limit, "does not end"

    def check(self):
        pool, owners = self.pool, {}
        for sequence in self.live():
            for index, page in enumerate(sequence.block_table):
                owners.setdefault(page, []).append((sequence, index))
        assert pool.holders == [len(owners.get(page, ())) for page in range(pool.num_pages)]
        assert pool.available == sum(not count for count in pool.holders)
        for held in owners.values():
            if len(held) > 1:
                assert all((index + 1) * pool.page_size <= sequence.computed for sequence, index in held)
        assert all(not sequence.block_table for sequence in self.scheduler.waiting)
        assert len(self.scheduler.running) <= self.scheduler.max_sequences


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 2, 3, 16]),
        spare=st.integers(0, 6),
        max_rows=st.sampled_from([1, 2, 7, 64]),
        max_sequences=st.integers(1, 5),
        prefix_cache=st.booleans(),
    )
    def start(self, page_size, spare, max_rows, max_sequences, prefix_cache):
        self.longest = 14
        num_pages = -(-(self.longest - 1) // page_size) + spare
        self.engine = SimulatedEngine(num_pages, page_size, max_rows, max_sequences, prefix_cache)

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=10),
        max_tokens=st.integers(1, 4),
        copies=st.integers(1, 3),
        salt=st.integers(0, 1),
    )
    def add(self, prompt, max_tokens, copies, salt):
        for copy in range(copies):
            self.engine.add(prompt, max_tokens, salt + copy)

    @precondition(lambda self: self.engine.live())
    @rule(times=st.integers(1, 4))
    def step(self, times):
        for _ in range(times):
            if self.engine.live():
                assert self.engine.step()

    @precondition(lambda self: self.engine.live())
    @rule(choice=st.integers(0, 10**6))
    def abort(self, choice):
        live = self.engine.live()
        self.engine.scheduler.remove(live[choice % len(live)])

    @precondition(lambda self: not self.engine.live())
    @rule()
    def new_weights(self):
        self.engine.start_version(self.engine.version + 1)

    @invariant()
    def memory_is_consistent(self):
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self):
        if hasattr(self, "engine"):
            self.engine.run()
            self.engine.check()
            assert self.engine.pool.available == self.engine.pool.num_pages
            assert not self.engine.scheduler._computing


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("max_rows", [7, 64, 512])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_samples_of_a_prompt_compute_it_once(page_size, max_rows):
    prompt = [i % 5 for i in range(50)]
    engine = SimulatedEngine(2000, page_size, max_rows, 256)
    for sample in range(8):
        engine.add(prompt, max_tokens=1, salt=sample)
    engine.run()
    shared = (len(prompt) - 1) // page_size * page_size
    assert engine.rows_computed == len(prompt) + 7 * (len(prompt) - shared)


def test_a_group_waits_for_its_first_member_while_others_go_on():
    engine = SimulatedEngine(100, 4, 8, 256)
    for _ in range(2):
        engine.add([1] * 17, max_tokens=2)
    engine.add([2] * 3, max_tokens=5)
    rows = [[(chunk.sequence.number, chunk.count) for chunk in engine.step()] for _ in range(4)]
    assert rows == [[(0, 8)], [(0, 8)], [(0, 1), (1, 1), (2, 3)], [(0, 1), (1, 1), (2, 1)]]


def test_when_the_first_member_is_aborted_another_takes_over():
    engine = SimulatedEngine(100, 4, 8, 256)
    sequences = [engine.add([1] * 17, max_tokens=1) for _ in range(3)]
    engine.step()
    engine.scheduler.remove(sequences[0])
    engine.run()
    assert engine.rows_computed == 8 + 9 + 1  # the aborted one's pages are found again


def test_pages_of_other_weights_are_not_found():
    engine = SimulatedEngine(100, 4, 64, 256)
    for version in (0, 1):
        engine.start_version(version)
        engine.add([1] * 17, max_tokens=1)
        engine.run()
    assert engine.hits == 0
    engine.add([1] * 17, max_tokens=1)
    engine.run()
    assert engine.hits == 4


def test_generated_pages_serve_the_next_turn():
    engine = SimulatedEngine(100, 4, 64, 256)
    first = engine.add([1] * 6, max_tokens=11)
    engine.run()
    second = engine.add([*first.tokens, 1, 0], max_tokens=1)
    engine.run()
    assert second.cached_tokens == 16


@pytest.mark.parametrize("num_pages", [5, 6, 7, 11])
def test_out_of_pages_the_newest_gives_way_and_all_end(num_pages):
    engine = SimulatedEngine(num_pages, 4, 16, 256)
    generator = random.Random(num_pages)
    sequences = [engine.add([generator.randrange(2) for _ in range(7)], max_tokens=12) for _ in range(6)]
    ended = []
    while engine.live():
        engine.step()
        engine.check()
        ended += [s.number for s in sequences if s.generated == 12 and s.number not in ended]
    assert engine.scheduler.preemptions > 0
    assert ended[0] == 0
    assert sorted(ended) == list(range(6))


def test_a_decode_step_of_many_sequences_gives_each_one_row():
    engine = SimulatedEngine(600, 16, 512, 256)
    for number in range(256):
        engine.add([number, number], max_tokens=4)
    assert [chunk.count for chunk in engine.step()] == [2] * 256
    chunks = engine.step()
    assert len(chunks) == 256
    assert all(chunk.decodes and chunk.count == 1 for chunk in chunks)


def break_clearing(monkeypatch):
    monkeypatch.setattr(PagePool, "pop_dirty", lambda pool: ())


def break_chaining(monkeypatch):
    monkeypatch.setattr("zerogap.engine.scheduler.page_key", lambda parent, tokens: bytes(tokens))


def break_version(monkeypatch):
    monkeypatch.setattr(PagePool, "drop_published", lambda pool: None)
    monkeypatch.setattr("zerogap.engine.scheduler.root_key", lambda version: b"")


def break_counting(monkeypatch):
    def share(pool, page):
        pool._idle.pop(page, None)
        pool.holders[page] = max(1, pool.holders[page])

    monkeypatch.setattr(PagePool, "share", share)


def break_last_token(monkeypatch):
    monkeypatch.setattr(Scheduler, "_most_hits", lambda self, s: -(-len(s.tokens) // self.pool.page_size))


@pytest.mark.parametrize("sabotage", [break_clearing, break_chaining, break_version, break_counting, break_last_token])
def test_the_checks_notice_a_broken_part(monkeypatch, sabotage):
    sabotage(monkeypatch)
    with pytest.raises(AssertionError):
        run_crowded_engines()


def test_the_same_runs_pass_with_nothing_broken():
    run_crowded_engines()


def run_crowded_engines():
    for seed in range(20):
        generator = random.Random(seed)
        engine = SimulatedEngine(9, 4, 16, 256)
        for version in range(2):
            for _ in range(8):
                engine.add([generator.randrange(2) for _ in range(9)], max_tokens=12)
                engine.add([1] * 8, max_tokens=12, salt=generator.randrange(2))
            while engine.live():
                engine.step()
                engine.check()
            engine.start_version(version + 1)
