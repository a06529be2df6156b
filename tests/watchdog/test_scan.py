"""The scanner finds the same lines whatever the pieces the log comes in; the intake misses none that matters."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerogap.watchdog.follow import Follower
from zerogap.watchdog.intake import BUDGET, Intake
from zerogap.watchdog.rules import load_rules
from zerogap.watchdog.scan import CARRY, PER_LITERAL, Scanner

BOOK = load_rules()
CAUSE = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
LINES = [CAUSE, b"noise", b"", b"\xff\xfe\x00 noise", b"Decode batch. #running-req: 1, #token: 7", b"x" * 300]


def ids(scanner, raws):
    return [hit.rule.id for raw in raws for hit in scanner.match("x", raw, 0.0)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(LINES), max_size=30), st.lists(st.integers(0, 2000), max_size=8))
def test_pieces_do_not_matter(lines, cuts):
    data = b"".join(line + b"\n" for line in lines)
    whole, pieces = Scanner(BOOK), Scanner(BOOK)
    expected = ids(whole, whole.feed("x", data))
    found, last = [], 0
    for cut in [*sorted(cut for cut in cuts if cut < len(data)), len(data)]:
        found += ids(pieces, pieces.feed("x", data[last:cut]))
        last = cut
    if "engine-decode" in expected:  # of a flood of progress lines not all are looked at
        found, expected = ([name for name in names if name != "engine-decode"] for names in (found, expected))
    assert found == expected
    assert pieces.lines == len(lines)


def test_a_line_without_an_end_is_seen_at_the_end():
    scanner = Scanner(BOOK)
    assert scanner.feed("x", CAUSE) == []
    assert ids(scanner, scanner.finish("x")) == ["out-of-memory-gpu"]


def test_a_literal_within_a_line_of_megabytes_is_found():
    scanner = Scanner(BOOK)
    raws = []
    for piece in (b"a" * (CARRY + 10), b"b" * (CARRY - 100) + CAUSE[:30], CAUSE[30:] + b"c" * CARRY, b"\n"):
        raws += scanner.feed("x", piece)
    assert any(b"CUDA out of memory" in raw for raw in raws)
    assert all(len(raw) < 1 << 16 for raw in raws)


def test_a_flood_of_one_message_is_cut_and_counted():
    scanner = Scanner(BOOK)
    raws = scanner.feed("x", (CAUSE + b"\n") * 1000)
    assert len(raws) == PER_LITERAL
    assert scanner.skipped == 1000 - PER_LITERAL


def test_following_through_rotation_truncation_and_late_birth(tmp_path):
    path = tmp_path / "a.log"
    follower = Follower(path)
    assert follower.read() == b""
    path.write_bytes(b"one\n")
    assert follower.read() == b"one\n"
    assert follower.read() == b""
    with path.open("ab") as file:
        file.write(b"two\n")
    os.rename(path, tmp_path / "a.log.1")
    assert follower.read() == b"two\n"
    assert follower.read() == b""
    path.write_bytes(b"three\n")
    assert follower.read() == b"three\n"
    path.write_bytes(b"4\n")  # truncated in place and shorter than before
    assert follower.read() == b"4\n"
    path.unlink()
    assert follower.read() == b""


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "/proc"])
def test_what_is_no_file_is_not_read(path):
    from pathlib import Path

    assert Follower(Path(path)).read() == b""


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 5 * BUDGET), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_a_flood_is_passed_over_and_read_later_line_by_line(tmp_path_factory, sizes, random):
    """Whatever the sizes of the bursts: after all each line was read once, and none was torn."""
    path = tmp_path_factory.mktemp("flood") / "log"
    path.write_bytes(b"")
    got: list[bytes] = []
    carry: dict[str, bytes] = {}

    def digest(name, data, at):
        data = carry.pop(name, b"") + data
        end = data.rfind(b"\n") + 1
        carry[name] = data[end:]
        got.extend(data[:end].splitlines())

    intake = Intake("x", Follower(path), digest, lambda name: carry.pop(name, b""))
    number = 0
    for size in sizes:
        with path.open("ab") as file:
            written = 0
            while written <= size:
                line = b"%09d " % number + b"y" * random.randrange(2000) + b"\n"
                written += file.write(line)
                number += 1
        intake.look(float(size))
        assert sum(map(len, got)) < sum(sizes) + 10_000_000
    intake.look(0.0, everything=True)
    assert sorted(int(line.split()[0]) for line in got) == list(range(number))
    assert intake.waiting == 0
    assert intake.unread == 0
