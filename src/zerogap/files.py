"""Files that are whole or absent: write to a temporary name beside the target, fsync, rename."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

_TEMPORARY = ".tmp"


def write_atomic(path: Path, write: Callable[[Path], None]) -> None:
    """Call ``write(temporary_path)``, then move the result to ``path``; on any failure nothing is left behind.

    Args:
        path: the file to create or replace; its folder must exist.
        write: fills the file at the path it is given.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=_TEMPORARY)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        fsync(temporary)
        os.chmod(temporary, 0o666 & ~umask())
        os.replace(temporary, path)
        fsync(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def check_writable(path: Path) -> None:
    """Find out before long work whether `write_atomic` will be able to create ``path``; its folder is made.

    Raises:
        OSError: it will not.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=_TEMPORARY)
    os.close(handle)
    os.unlink(name)


def is_temporary(path: Path) -> bool:
    """Return whether ``path`` is named as `write_atomic` names its temporary files; a killed process leaves one."""
    return path.name.startswith(".") and path.name.endswith(_TEMPORARY)


def write_text_atomic(path: Path, text: str) -> None:
    """Write UTF-8 ``text`` to ``path``, whole or not at all."""

    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    write_atomic(path, write)


def fsync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def umask() -> int:
    """Return the process's mask of permissions, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
