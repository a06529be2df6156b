"""Text to tokens and back; the streamed pieces are the whole text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, pre_tokenizers

from zerogap.engine.stops import IncrementalText
from zerogap.errors import UsageError
from zerogap.models.hub import resolve_model
from zerogap.models.tokenizer import Tokenizer, load_tokenizer

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return load_tokenizer(resolve_model("builtin:tiny-qwen3"))


def write_byte_level(folder: Path) -> Path:
    """A tokenizer of one token per byte: every character outside ASCII takes several tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    fast = Fast(models.BPE(vocab={c: i for i, c in enumerate(BYTES)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<stop>"])
    fast.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory) -> Tokenizer:
    return load_tokenizer(write_byte_level(tmp_path_factory.mktemp("bytes")))


def refused(call, *arguments) -> str:
    with pytest.raises(UsageError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_tiny_round_trip_and_stop_ids(tiny):
    assert tiny.decode(tiny.encode("12+34=46")) == "12+34=46"
    assert len(tiny.encode("12+34=")) == 6
    assert tiny.stop_ids == tuple(tiny.encode("<eos>")) == (1,)
    assert tiny.vocab_size == 64


def test_tiny_unknown_character_is_unk(tiny):
    assert tiny.encode("1é2") == [*tiny.encode("1"), *tiny.encode("<unk>"), *tiny.encode("2")]


def test_tiny_decode_skips_special_tokens_unless_asked(tiny):
    ids = tiny.encode("46<eos>")
    assert tiny.decode(ids) == "46"
    assert tiny.decode(ids, skip_special_tokens=False) == "46<eos>"


def test_chat_template(tiny):
    messages = [{"role": "user", "content": "12+34="}]
    assert tiny.encode_chat(messages) == tiny.encode("12+34=")
    messages += [{"role": "assistant", "content": "46"}, {"role": "user", "content": "10+10="}]
    assert tiny.encode_chat(messages) == tiny.encode("12+34=46<eos>10+10=")


def test_chat_errors(tiny, byte_level):
    assert "no chat template" in refused(byte_level.encode_chat, [{"role": "user", "content": "x"}])
    assert "at least one message" in refused(tiny.encode_chat, [])
    assert "message 1" in refused(tiny.encode_chat, [{"role": "user", "content": "x"}, {"role": "user"}])


def test_template_that_refuses_is_one_line(tmp_path):
    folder = write_byte_level(tmp_path)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<stop>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text("{{ raise_exception('roles must\\nalternate') }}")
    tokenizer = load_tokenizer(folder)
    assert "roles must alternate" in refused(tokenizer.encode_chat, [{"role": "user", "content": "x"}])


def test_stop_ids_of_all_files_each_once(tmp_path):
    folder = write_byte_level(tmp_path)
    assert load_tokenizer(folder).stop_ids == ()
    (folder / "config.json").write_text('{"eos_token_id": 5}')
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "<stop>"}}')
    assert load_tokenizer(folder).stop_ids == (7, 5, 256)
    (folder / "generation_config.json").write_text('{"eos_token_id": "x"}')
    assert "give a token id" in refused(load_tokenizer, folder)


def test_unreadable_files(tmp_path):
    assert "no tokenizer.json" in refused(load_tokenizer, tmp_path / "absent")
    folder = write_byte_level(tmp_path / "m")
    (folder / "config.json").write_text("{")
    assert "cannot be read as JSON" in refused(load_tokenizer, folder)
    (folder / "tokenizer.json").write_text('{"version": ')
    assert "not a readable tokenizer" in refused(load_tokenizer, folder)


@given(ids=st.lists(st.integers(0, 256), max_size=40))
def test_streamed_pieces_join_to_the_whole_for_any_bytes(byte_level, ids):
    stream = IncrementalText(byte_level)
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) + stream.flush() == byte_level.decode(ids)


@given(text=st.text(max_size=20))
def test_stream_gives_out_no_half_character(byte_level, text):
    stream = IncrementalText(byte_level)
    given_out = ""
    for i in byte_level.encode(text):
        given_out += stream.push(i)
        assert text.startswith(given_out)
    assert given_out + stream.flush() == text


def test_decoding_token_by_token_would_break_characters(byte_level):
    """The control: without the stream the law above does not hold."""
    ids = byte_level.encode("é")
    assert "".join(byte_level.decode([i]) for i in ids) != "é"
