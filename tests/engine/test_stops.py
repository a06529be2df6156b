import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerogap.engine.stops import IncrementalText, TextTail


class ByteTokenizer:
    """Token ids are UTF-8 bytes."""

    stop_ids = (0,)

    def decode(self, ids):
        return bytes(ids).decode("utf-8", errors="replace")


class PieceTokenizer:
    """Token ids name pieces that may cut characters; a leading space of the whole text is dropped (SentencePiece)."""

    stop_ids = ()
    pieces = (
        b" a",
        b" b",
        b"c",
        "é".encode()[:1],
        "é".encode()[1:],
        "日本".encode()[:4],
        "日本".encode()[4:],
        b"</",
        b"s>",
    )

    def decode(self, ids):
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", errors="replace").removeprefix(" ")


@given(st.text(max_size=30))
def test_pieces_of_text_join_to_the_whole(text):
    incremental = IncrementalText(ByteTokenizer())
    pieces = [incremental.push(byte) for byte in text.replace("\ufffd", "").encode()]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) + incremental.flush() == text.replace("\ufffd", "")


@given(st.lists(st.integers(0, 255), max_size=40))
def test_bytes_that_are_no_text_come_out_as_by_decoding_at_once(tokens):
    incremental = IncrementalText(ByteTokenizer())
    text = "".join([incremental.push(token) for token in tokens]) + incremental.flush()
    assert text == ByteTokenizer().decode(tokens)


@given(st.lists(st.integers(0, 8), max_size=40))
def test_pieces_that_depend_on_their_predecessor(tokens):
    incremental = IncrementalText(PieceTokenizer())
    text = "".join([incremental.push(token) for token in tokens]) + incremental.flush()
    assert text == PieceTokenizer().decode(tokens)


def follow(text, stops, armed_from=0):
    """Push the bytes of text; return (text shown, text kept, bytes used, stopped)."""
    tail, shown = TextTail(ByteTokenizer(), stops), ""
    for used, byte in enumerate(text.encode(), 1):
        if tail.push(byte, armed=used >= armed_from):
            return shown + tail.show(ended=True), tail.text, used, True
        shown += tail.show(ended=False)
    tail.flush()
    return shown + tail.show(ended=True), tail.text, len(text.encode()), False


@pytest.mark.parametrize(
    ("text", "stops", "kept", "used"),
    [
        ("hello END more", ("END",), "hello ", 9),
        ("aab", ("aab",), "", 3),
        ("aaab", ("aab",), "a", 4),
        ("x日本y", ("日本",), "x", 7),
        ("x日本y", ("本",), "x日", 7),
        ("abc", ("bcd",), "abc", 3),
        ("abcd", ("cd", "bcd"), "a", 4),
        ("ab\n\nQ:", ("\n\n", "Q:"), "ab", 4),
    ],
)
def test_text_is_cut_before_the_stop_string_and_tokens_end_with_it(text, stops, kept, used):
    shown, cut, bytes_used, stopped = follow(text, stops)
    assert (shown, cut, bytes_used) == (kept, kept, used)
    assert stopped == (used < len(text.encode()) or text.endswith(stops))


def test_stop_strings_completed_before_min_tokens_do_not_count():
    assert follow("a.b.c", (".",), armed_from=3) == ("a.b", "a.b", 4, True)
    assert follow("ENDED", ("END",), armed_from=4) == ("ENDED", "ENDED", 5, False)
    assert follow("END", ("END",), armed_from=3) == ("", "", 3, True)


@given(st.text(alphabet="ab日é", max_size=20), st.lists(st.text(alphabet="ab日é", min_size=1, max_size=4), max_size=3))
def test_shown_text_equals_kept_text_and_follows_the_definition(text, stops):
    shown, kept, used, stopped = follow(text, tuple(stops))
    assert shown == kept
    # Definition: the first prefix that holds a stop string, cut where the stop string that begins first begins.
    for end in range(1, len(text) + 1):
        if found := [text[:end].find(stop) for stop in stops if stop in text[:end]]:
            assert (stopped, kept, used) == (True, text[: min(found)], len(text[:end].encode()))
            return
    assert (stopped, kept) == (False, text)


def test_a_long_run_of_undecodable_bytes_ends():
    tail = TextTail(ByteTokenizer(), ())
    for _ in range(300):
        tail.push(random.Random(0).choice([0x80, 0xFF]))
    tail.flush()
    assert tail.text == "\ufffd" * 300
