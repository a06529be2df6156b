"""TensorBoard event files without TensorBoard: records with checksums, of which only scalars are decoded.

File format: tensorflow/core/lib/io/record_writer.h and tensorflow/core/util/event.proto; each record is a length, its
masked CRC-32C, the bytes and their masked CRC-32C.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_POLYNOMIAL = 0x82F63B78
_RECORD_LIMIT = 1 << 28


@cache
def _crc_table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return tuple(table)


def masked_crc32c(data: bytes) -> int:
    """Return the masked CRC-32C that TFRecord files carry."""
    crc = 0xFFFFFFFF
    table = _crc_table()
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def records(path: Path) -> Iterator[bytes]:
    """Yield the records of a TFRecord file up to its end or the first damaged or unfinished one."""
    with path.open("rb") as file:
        while len(head := file.read(12)) == 12:
            length, crc = struct.unpack("<QI", head)
            if length > _RECORD_LIMIT or masked_crc32c(head[:8]) != crc:
                return
            data = file.read(length)
            tail = file.read(4)
            if len(data) < length or len(tail) < 4:
                return
            yield data


def scalars(path: Path) -> Iterator[tuple[int, str, float]]:
    """Yield (step, tag, value) of every scalar in an event file, of the old and the tensor form."""
    for record in records(path):
        step = 0
        summaries: list[bytes] = []
        for number, _, value in fields(record):
            if number == 2 and isinstance(value, int):
                step = value
            elif number == 5 and isinstance(value, bytes):
                summaries.append(value)
        for summary in summaries:
            for number, _, item in fields(summary):
                if number == 1 and isinstance(item, bytes):
                    found = _scalar(item)
                    if found is not None:
                        yield step, *found


def _scalar(item: bytes) -> tuple[str, float] | None:
    tag, value = "", None
    for number, wire, content in fields(item):
        if number == 1 and isinstance(content, bytes):
            tag = content.decode("utf-8", "replace")
        elif number == 2 and wire == 5 and isinstance(content, bytes):
            value = struct.unpack("<f", content)[0]
        elif number == 8 and isinstance(content, bytes):
            value = _tensor_scalar(content)
    return (tag, value) if tag and value is not None else None


def _tensor_scalar(tensor: bytes) -> float | None:
    dtype, content, value = 0, b"", None
    for number, _, part in fields(tensor):
        if number == 1 and isinstance(part, int):
            dtype = part
        elif number == 4 and isinstance(part, bytes):
            content = part
        elif number == 5 and isinstance(part, bytes) and len(part) >= 4:
            value = struct.unpack("<f", part[:4])[0]
        elif number == 6 and isinstance(part, bytes) and len(part) >= 8:
            value = struct.unpack("<d", part[:8])[0]
    if value is None and dtype == 1 and len(content) == 4:
        value = struct.unpack("<f", content)[0]
    if value is None and dtype == 2 and len(content) == 8:
        value = struct.unpack("<d", content)[0]
    return value


def fields(data: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """Yield (field number, wire type, value) of one protobuf message, stopping at anything malformed."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, position = _varint(data, position)
            yield number, wire, value
            continue
        if wire == 2:
            size, position = _varint(data, position)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            return
        if position + size > len(data):
            return
        yield number, wire, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(data) and shift < 70:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            break
        shift += 7
    return value, position
