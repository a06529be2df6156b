"""What a file is, from its first bytes; safe opening of files of any size and encoding."""

from __future__ import annotations

import gzip
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from zerogap.errors import UsageError

HEAD = 1 << 16
_BLOCK = 1 << 22
_LINE_LIMIT = 1 << 26  # bytes; a longer line is no log line and no sample


def kind_of(path: Path) -> str:
    """Return parquet, zip, pickle, tfrecord, gzip, empty, binary or text.

    Raises:
        UsageError: the path is missing, unreadable or no regular file.
    """
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise UsageError(f"{path}: not a regular file; name a log, dump, run folder or table")
        with path.open("rb") as file:
            head = file.read(HEAD)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}; check the path") from None
    if not head:
        return "empty"
    if head[:4] == b"PAR1":
        return "parquet"
    if head[:2] == b"\x1f\x8b":
        return "gzip"
    if head[:4] == b"PK\x03\x04":
        return "zip"
    if head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05":
        return "pickle"
    if _is_tfrecord(head):
        return "tfrecord"
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "text"
    start = head.rstrip(b"\0")  # what a crash or a hole left behind the text does not count
    if not start or start.count(0) * 3 > len(start):
        return "binary"
    return "text"


def _is_tfrecord(head: bytes) -> bool:
    from zerogap.gap.readers.tensorboard import masked_crc32c

    return len(head) > 16 and int.from_bytes(head[8:12], "little") == masked_crc32c(head[:8])


def blocks(path: Path, start: int = 0) -> Iterator[bytes]:
    """Yield the bytes of a file in blocks; holes of sparse files are skipped, gzip is unpacked."""
    # Unbuffered, since holes are found by moving the descriptor itself.
    with path.open("rb", buffering=0) as raw:
        packed_file = raw.read(2) == b"\x1f\x8b"
        raw.seek(0 if packed_file else start)
        if packed_file:
            try:
                with gzip.GzipFile(fileobj=raw) as packed:
                    while block := packed.read(_BLOCK):
                        yield block
            except (OSError, EOFError) as error:
                raise UsageError(f"{path}: damaged gzip file: {error}; unpack it or copy it again") from None
            return
        raw.seek(start)
        while True:
            position = _next_data(raw)
            if position is None:
                return
            block = raw.read(_BLOCK)
            if not block:
                return
            yield block


def _next_data(raw: IO[bytes]) -> int | None:
    try:
        position = os.lseek(raw.fileno(), raw.tell(), os.SEEK_DATA)
    except OSError as error:
        return None if error.errno == 6 else raw.tell()  # ENXIO: only holes up to the end
    raw.seek(position)
    return position


def text_blocks(path: Path) -> Iterator[bytes]:
    """Yield a text file in blocks of whole lines, as UTF-8; UTF-16 with a mark is converted.

    Overlong lines and stretches of zero bytes, as a crash leaves in a log, are dropped.
    """
    source = blocks(path)
    block = next(source, b"")
    if block[:2] in (b"\xff\xfe", b"\xfe\xff"):
        with open(path, encoding="utf-16", errors="replace", newline=None) as text:
            try:
                while part := text.readlines(_BLOCK):
                    yield "".join(part).encode()
            except UnicodeError:
                return
        return
    if block[:3] == b"\xef\xbb\xbf":
        block = block[3:]
    rest = b""
    while block:
        if b"\0" in block:
            block = block.replace(b"\0", b"")
        end = block.rfind(b"\n") + 1
        if end:
            yield rest + block[:end]
            rest = block[end:]
        else:
            rest += block
        if len(rest) > _LINE_LIMIT:
            rest = b""
        block = next(source, b"")
    if rest:
        yield rest


def lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a text file as UTF-8 bytes without their ends."""
    for block in text_blocks(path):
        parts = block.split(b"\n")
        if not parts[-1]:
            parts.pop()
        yield from parts
