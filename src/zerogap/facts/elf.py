"""Compiled files: which libraries an ELF extension needs, and which GPU architectures a binary names."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import struct
from functools import cache
from pathlib import Path

_DT_NEEDED, _DT_STRTAB, _PT_LOAD, _PT_DYNAMIC = 1, 5, 1, 2


def needed(path: Path) -> tuple[str, ...] | None:
    """Return the DT_NEEDED names of a 64-bit little-endian ELF file, or None when it is none or damaged."""
    try:
        with open(path, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as view:
            return _needed(view)
    except (OSError, ValueError, OverflowError, struct.error):
        return None


def _needed(view: mmap.mmap) -> tuple[str, ...] | None:
    if view[:6] != b"\x7fELF\x02\x01":
        return None
    table, size, count = struct.unpack_from("<Q", view, 32)[0], *struct.unpack_from("<HH", view, 54)
    loads: list[tuple[int, int, int]] = []
    dynamic: tuple[int, int] | None = None
    for index in range(count):
        kind, _, offset, address, _, in_file = struct.unpack_from("<IIQQQQ", view, table + index * size)
        if kind == _PT_LOAD:
            loads.append((address, offset, in_file))
        elif kind == _PT_DYNAMIC:
            dynamic = (offset, in_file)
    if dynamic is None:
        return ()
    names: list[int] = []
    strings = None
    for place in range(dynamic[0], min(dynamic[0] + dynamic[1], len(view) - 15), 16):
        tag, value = struct.unpack_from("<qQ", view, place)
        if tag == 0:
            break
        if tag == _DT_NEEDED:
            names.append(value)
        elif tag == _DT_STRTAB:
            strings = next(
                (offset + value - address for address, offset, length in loads if address <= value < address + length),
                None,
            )
    if strings is None:
        return ()
    found = []
    for name in names:
        end = view.find(b"\0", strings + name, strings + name + 4096)
        if end < 0:
            return None
        found.append(view[strings + name : end].decode("utf-8", "replace"))
    return tuple(found)


def arch_names(path: Path) -> tuple[str, ...]:
    """Return the architectures (sm_90, sm_121a …) whose names stand in a binary; empty when it cannot be read."""
    try:
        with open(path, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as view:
            return tuple(sorted({name.decode() for name in re.findall(rb"\bsm_\d{2,3}[af]?\b", view)}))
    except (OSError, ValueError):
        return ()


@cache
def _system_folders() -> tuple[Path, ...]:
    listed = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    usual = ("/usr/local/cuda/lib64", "/usr/local/cuda/compat", "/lib64", "/usr/lib64", "/usr/local/lib")
    return tuple(Path(entry) for entry in (*listed, *usual) if entry)


def provided_libraries(folders: list[Path]) -> frozenset[str]:
    """Return the names of the shared libraries that wheels, the linker's cache and the usual folders provide."""
    names: set[str] = set()
    with contextlib.suppress(OSError):
        # The cache is a list of NUL-ended names and paths; the names are all that is asked for.
        cache_file = Path("/etc/ld.so.cache").read_bytes()
        names |= {found.decode() for found in re.findall(rb"lib[\w.+-]+\.so[\w.]*", cache_file)}
    wheels = [
        path
        for folder in folders
        for path in (*folder.glob("nvidia/*/lib"), folder / "torch/lib", *folder.glob("*.libs"))
    ]
    for place in (*_system_folders(), *wheels):
        try:
            names |= {entry.name for entry in os.scandir(place) if ".so" in entry.name}
        except OSError:
            continue
    return frozenset(names)


def cubins(listing: str) -> tuple[str, ...]:
    """Return the architectures in the output of ``cuobjdump --list-elf`` (or ``--list-ptx``)."""
    return tuple(dict.fromkeys(re.findall(r"\bsm_\d{2,3}[af]?\b", listing)))
