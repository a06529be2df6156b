"""Following a log file through rotation, truncation and late birth."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

READ = 1 << 20  # bytes per call
LONGEST_LINE = 1 << 16  # how far to look for the end of a line


@dataclass(frozen=True)
class Span:
    """A part of a file that was passed over: from a start of a line to a start of a line."""

    start: int
    end: int
    inode: int


class Follower:
    """Reads what is appended to ``path``; begins at its start, or at ``offset`` of the file that stands there now."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.offset = offset
        self._handle: int | None = None
        self._inode = -1

    def read(self) -> bytes:
        """Return the next bytes, ``b""`` when there are none now."""
        if self._handle is None and not self._open():
            return b""
        assert self._handle is not None
        data = os.read(self._handle, READ)
        if data:
            self.offset += len(data)
            return data
        try:
            now = os.stat(self.path)
        except OSError:  # moved away, its successor not there yet: the old one may still grow
            return b""
        if now.st_ino != self._inode:
            self.close()
            self.offset = 0
            return self.read() if self._open() else b""
        if now.st_size < self.offset:  # truncated in place (copytruncate)
            os.lseek(self._handle, 0, os.SEEK_SET)
            self.offset = 0
            return self.read() if now.st_size else b""
        return b""

    def pending(self) -> int:
        """Return how many bytes wait to be read in the file that is open, 0 when there is none."""
        if self._handle is None and not self._open():
            return 0
        assert self._handle is not None
        return max(0, os.fstat(self._handle).st_size - self.offset)

    def skip(self, size: int) -> Span:
        """Go ``size`` bytes on, to the next start of a line, and return what was passed over."""
        assert self._handle is not None
        start, target = self.offset, self.offset + size
        head = os.pread(self._handle, LONGEST_LINE, target)
        target += head.find(b"\n") + 1
        os.lseek(self._handle, target, os.SEEK_SET)
        self.offset = target
        return Span(start, target, self._inode)

    def again(self, span: Span, size: int) -> bytes:
        """Return the last ``size`` bytes of a span that was passed over, ``b""`` when its file is gone."""
        if self._handle is None or span.inode != self._inode:
            return b""
        return os.pread(self._handle, size, max(span.start, span.end - size))

    def _open(self) -> bool:
        try:
            self._handle = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return False
        stat = os.fstat(self._handle)
        if not S_ISREG(stat.st_mode):  # a device or a pipe has no end and no place to go back to
            self.close()
            return False
        self._inode = stat.st_ino
        if self.offset > stat.st_size:
            self.offset = 0
        os.lseek(self._handle, self.offset, os.SEEK_SET)
        return True

    def modified(self) -> float | None:
        """Return when the file last changed, None if it is not there."""
        try:
            return self.path.stat().st_mtime
        except OSError:
            return None

    def close(self) -> None:
        """Close the file."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
