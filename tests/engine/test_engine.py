import dataclasses
import itertools

import pytest
import torch

from zerogap.engine import suppressed_ids
from zerogap.errors import UsageError
from zerogap.models.weights import weights_digest
from zerogap.ops.portable.sampling import most_probable

from ..support import random_decoder
from .build import LetterTokenizer, make_engine, request

PROMPT = (5, 9, 14, 3, 22, 8, 31)


def test_a_completion_holds_what_was_asked_for():
    engine = make_engine()
    done = engine.generate([request(0, PROMPT, max_tokens=10, ignore_eos=True)])[0]
    assert (done.key, done.prompt, done.finish_reason, done.weights_version) == ((0, 0, 0), PROMPT, "length", 0)
    assert len(done.tokens) == len(done.logprobs) == 10
    assert all(value == torch.tensor(value, dtype=torch.float32).item() < 0 for value in done.logprobs)
    assert done.text == LetterTokenizer().decode(done.tokens)
    assert done.top_logprobs is None
    assert not engine.has_work()
    assert engine.step() == []


def test_completions_come_in_request_order_with_distinct_samples():
    requests = [request(number, PROMPT, max_tokens=number + 1, ignore_eos=True) for number in (3, 0, 2, 1)]
    done = make_engine().generate(requests)
    assert [completion.key for completion in done] == [r.key for r in requests]
    assert [len(completion.tokens) for completion in done] == [4, 1, 3, 2]
    assert len({completion.tokens[0] for completion in done}) > 1


def test_a_seed_and_a_key_choose_the_tokens():
    def tokens(number, seed):
        return make_engine().generate([request(number, PROMPT, max_tokens=12, seed=seed, ignore_eos=True)])[0].tokens

    assert tokens(0, 1) == tokens(0, 1)
    assert len({tuple(tokens(*which)) for which in [(0, 1), (0, 2), (1, 1), (1, 2)]}) == 4


def test_greedy_takes_the_most_probable_token():
    done = make_engine().generate([request(0, PROMPT, temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)])[0]
    assert [top[0] for top in done.top_logprobs] == list(zip(done.tokens, done.logprobs, strict=True))


def test_top_logprobs_are_ordered_and_hold_only_tokens_that_can_be_drawn():
    done = make_engine().generate([request(0, PROMPT, top_k=3, max_tokens=6, logprobs=5, ignore_eos=True)])[0]
    for token, logprob, top in zip(done.tokens, done.logprobs, done.top_logprobs, strict=True):
        assert len(top) == 3
        assert (token, logprob) in top
        assert list(top) == sorted(top, key=lambda pair: (-pair[1], pair[0]))


def test_equal_log_probs_are_listed_by_lower_id():
    logprobs = torch.tensor([-2.0, -1.0, -3.0, -1.0, -torch.inf, -2.0])
    assert most_probable(logprobs, 3) == ((1, -1.0), (3, -1.0), (0, -2.0))
    assert [token for token, _ in most_probable(logprobs, 9)] == [1, 3, 0, 5, 2]


def end_token_of(number, at):
    """A token id that the sequence draws at generated index ``at`` and not before."""
    tokens = make_engine().generate([request(number, PROMPT, max_tokens=20, ignore_eos=True)])[0].tokens
    assert tokens[at] not in tokens[:at]
    return tokens[at], tokens


def test_a_stop_id_ends_the_sequence_is_kept_and_is_not_in_the_text():
    stop, tokens = end_token_of(0, 4)
    done = make_engine().generate([request(0, PROMPT, max_tokens=20, ignore_eos=True, stop_ids=(stop,))])[0]
    assert done.tokens == tokens[:5]
    assert done.finish_reason == "stop"
    assert done.text == LetterTokenizer().decode(tokens[:4])


def test_the_tokenizers_end_token_stops_unless_ignored():
    class EndsEarly(LetterTokenizer):
        stop_ids = (end_token_of(0, 4)[0], 10**6)  # an end token that the model does not have is no harm

    engine = make_engine()
    engine.tokenizer = EndsEarly()
    assert engine.generate([request(0, PROMPT, max_tokens=20)])[0].finish_reason == "stop"
    assert engine.generate([request(0, PROMPT, max_tokens=20, ignore_eos=True)])[0].finish_reason == "length"


def test_min_tokens_takes_stop_ids_out_of_the_distribution():
    stop, tokens = end_token_of(0, 4)
    params = {"max_tokens": 20, "ignore_eos": True, "stop_ids": (stop,), "logprobs": 50}
    done = make_engine().generate([request(0, PROMPT, min_tokens=8, **params)])[0]
    assert done.tokens[:4] == tokens[:4]
    assert stop not in done.tokens[:8]
    assert len(done.tokens) >= 8
    for index, top in enumerate(done.top_logprobs):
        ids = {token for token, _ in top}
        assert (stop not in ids) == (index < 8)
        assert ids.isdisjoint(suppressed_ids(done.params, index))


@pytest.mark.parametrize("min_tokens", [0, 12])
def test_a_stop_string_cuts_the_text_and_keeps_the_tokens(min_tokens):
    free = make_engine().generate([request(0, PROMPT, max_tokens=20, ignore_eos=True)])[0]
    stop = LetterTokenizer().decode(free.tokens[6:9])
    assert "\ufffd" not in stop
    params = {"max_tokens": 20, "ignore_eos": True, "stop_strings": ("~~", stop), "min_tokens": min_tokens}
    done = make_engine().generate([request(0, PROMPT, **params)])[0]
    if min_tokens:
        assert (done.tokens, done.finish_reason, done.text) == (free.tokens, "length", free.text)
    else:
        assert (done.tokens, done.finish_reason) == (free.tokens[:9], "stop")
        assert done.text == LetterTokenizer().decode(free.tokens[:6])


def test_streamed_pieces_join_to_the_text():
    requests = [request(n, PROMPT, max_tokens=20, stop_strings=("a", "e"), ignore_eos=True) for n in range(6)]
    plain = make_engine().generate(requests)
    texts, last = {r.key: "" for r in requests}, {}
    for event in make_engine().stream(requests):
        assert event.key not in last
        texts[event.key] += event.text
        if event.completion:
            last[event.key] = event.completion
    assert [last[r.key] for r in requests] == plain
    assert [texts[completion.key] for completion in plain] == [completion.text for completion in plain]
    assert {completion.finish_reason for completion in plain} == {"stop", "length"}


def test_closing_a_stream_aborts_the_rest():
    engine = make_engine(num_pages=20)
    stream = engine.stream([request(n, PROMPT, max_tokens=30, ignore_eos=True) for n in range(4)])
    list(itertools.islice(stream, 5))
    assert engine.has_work()
    stream.close()
    assert not engine.has_work()
    assert engine._scheduler.pool.available == 20


def test_abort_returns_what_there_is_and_leaves_the_others_alone():
    requests = [request(n, PROMPT, max_tokens=10, ignore_eos=True) for n in range(3)]
    whole = make_engine().generate(requests)
    engine = make_engine()
    for one in requests:
        engine.add(one)
    events = [event for _ in range(4) for event in engine.step()]
    aborted = engine.abort(requests[1].key)
    assert aborted.finish_reason == "abort"
    assert aborted.tokens == whole[1].tokens[: len(aborted.tokens)]
    assert 0 < len(aborted.tokens) < 10
    assert engine.abort(requests[1].key) is None
    while engine.has_work():
        events += engine.step()
    done = {event.key: event.completion for event in events if event.completion}
    assert done == {whole[0].key: whole[0], whole[2].key: dataclasses.replace(whole[2], cached_tokens=0)}


def test_an_error_in_a_forward_leaves_the_engine_usable():
    engine = make_engine()

    def fail(layer, op, x):
        raise RuntimeError("broken op")

    engine.hooks = (fail,)
    with pytest.raises(RuntimeError, match="broken op"):
        engine.generate([request(0, PROMPT, max_tokens=5)])
    engine.hooks = ()
    assert not engine.has_work()
    params = {"max_tokens": 5, "ignore_eos": True}
    assert (
        engine.generate([request(0, PROMPT, **params)])[0].tokens
        == make_engine().generate([request(0, PROMPT, **params)])[0].tokens
    )


def test_new_weights_change_version_digest_tokens_and_forget_pages():
    prompt = tuple(range(1, 40))
    requests = [request(0, prompt, max_tokens=8, ignore_eos=True)]
    old, new = random_decoder(seed=0), random_decoder(seed=1)
    engine = make_engine(random_decoder(seed=0))
    first = engine.generate(requests)[0]
    assert engine.digest == weights_digest(old.state_dict())
    engine.load_weights(new.state_dict(), 3, weights_digest(new.state_dict()))
    assert (engine.version, engine.digest) == (3, weights_digest(new.state_dict()))
    assert engine.trace.version == 3
    assert engine.trace.steps == []
    second = engine.generate(requests)[0]
    assert second == dataclasses.replace(make_engine(new).generate(requests)[0], weights_version=3)
    assert (second.cached_tokens, second.tokens != first.tokens) == (0, True)
    # The weights were copied: what happens to the source afterwards does not reach the engine.
    with torch.no_grad():
        new.lm_head_weight.zero_()
    engine.load_weights(old.state_dict(), 4)
    assert engine.generate(requests)[0].tokens == first.tokens


def test_weights_that_do_not_fit_change_nothing():
    engine = make_engine()
    digest, state = engine.digest, random_decoder(seed=1).state_dict()
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(UsageError, match=name):
        engine.load_weights({key: value for key, value in state.items() if key != name}, 1)
    with pytest.raises(UsageError, match="'extra'"):
        engine.load_weights({**state, "extra": torch.zeros(1)}, 1)
    with pytest.raises(UsageError, match=name):
        engine.load_weights({**state, name: torch.zeros(2, 2)}, 1)
    with pytest.raises(UsageError, match="float64"):
        engine.load_weights({**state, name: state[name].double()}, 1)
    assert (engine.version, weights_digest(engine.decoder.state_dict())) == (0, digest)
    with pytest.raises(UsageError, match="expected 00"):
        engine.load_weights(state, 1, digest="00")


def test_weights_are_not_replaced_under_running_sequences():
    engine = make_engine()
    engine.add(request(0, PROMPT))
    with pytest.raises(UsageError, match="1 requests still wait or run"):
        engine.load_weights(engine.decoder.state_dict(), 1)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"prompt": range(1, 40), "max_tokens": 480}, "39 tokens and max_tokens=480 need 519 positions.* 512"),
        ({"max_tokens": 75}, "need 21 pages of 4; the KV memory has 20"),
        ({"prompt": (1, 50)}, r"prompt has token id 50; the vocabulary is 0\.\.49"),
        ({"stop_ids": (50,)}, "stop_ids has token id 50"),
        ({"stop_ids": tuple(range(50)), "min_tokens": 1}, "leaves none to draw"),
    ],
)
def test_a_request_that_can_never_run_is_refused_with_the_numbers(changes, what):
    engine = make_engine(num_pages=20, page_size=4)
    with pytest.raises(UsageError, match=what) as refusal:
        engine.add(request(0, **{"prompt": PROMPT, **changes}))
    assert "\n" not in str(refusal.value)
    assert not engine.has_work()


def test_a_request_that_just_fits_runs():
    engine = make_engine(num_pages=20, page_size=4)
    done = engine.generate([request(n, PROMPT, max_tokens=74, ignore_eos=True) for n in range(2)])
    assert [len(completion.tokens) for completion in done] == [74, 74]


def test_a_key_in_use_is_refused_and_generate_undoes_what_it_added():
    engine = make_engine()
    with pytest.raises(UsageError, match="keys must be unique"):
        engine.generate([request(0, PROMPT), request(1, PROMPT), request(0, PROMPT)])
    assert not engine.has_work()


def test_generate_does_not_run_beside_other_requests():
    engine = make_engine()
    engine.add(request(0, PROMPT))
    with pytest.raises(UsageError, match="alone"):
        engine.generate([request(1, PROMPT)])
    assert engine.has_work()


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"num_pages": 0}, "0 pages .* one sequence of 512 tokens needs 32 pages of 16"),
        ({"num_pages": None, "kv_bytes": 0}, r"0 pages \(0 bytes\)"),
        ({"num_pages": None, "kv_bytes": 10_000}, "0 pages"),
        (
            {"num_pages": 3, "max_length": 49},
            r"3 pages .* one sequence of 49 tokens needs 4 pages of 16 \(65,536 bytes\)",
        ),
        ({"kv_bytes": 1}, "exactly one"),
        ({"num_pages": None}, "exactly one"),
        ({"page_size": 0}, "page_size: must be 1 or more"),
        ({"max_rows_per_step": 0}, "max_rows_per_step"),
        ({"max_sequences": 0}, "max_sequences"),
    ],
)
def test_memory_and_sizes_that_cannot_work_are_refused(config, what):
    with pytest.raises(UsageError, match=what):
        make_engine(**config)


def test_kv_bytes_are_cut_into_whole_pages():
    assert make_engine(num_pages=None, kv_bytes=100_000).num_pages == 6


def test_statistics_count_what_happened():
    engine = make_engine(page_size=4, num_pages=9, max_rows_per_step=16)
    done = engine.generate([request(n, tuple(range(1, 10)), max_tokens=10, ignore_eos=True) for n in range(4)])
    statistics = engine.statistics
    assert statistics.generated_tokens == 40
    assert statistics.preemptions > 0
    assert statistics.prefill_tokens >= 9 + 3 * 1
    assert statistics.cached_tokens >= 3 * 8
    assert [completion.cached_tokens for completion in done] == [0, 8, 8, 8]
    assert statistics.steps == len(engine.trace.steps)
    assert statistics.forward_seconds > 0
