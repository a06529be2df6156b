"""The run folder: one process at a time, and nothing in it but a run."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from zerogap.errors import UsageError
from zerogap.files import is_temporary

CONFIG_FILE, LOCK_FILE = "config.toml", "run.lock"
# File systems without locks (some network ones): the run goes on unprotected, since it would be refused for ever.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


def holds_run(folder: Path) -> bool:
    """Return whether ``folder`` is the folder of a run that began.

    Raises:
        UsageError: it cannot be looked into.
    """
    try:
        (folder / CONFIG_FILE).stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise UsageError(f"{folder}: cannot be read ({error.strerror}); set another run.dir") from None
    return True


def require_vacant(folder: Path) -> None:
    """Refuse a folder in which something else lives; what a run that was killed at its start left is nothing.

    Raises:
        UsageError: it is a file, or holds files of others.
    """
    try:
        strangers = [path.name for path in folder.iterdir() if path.name != LOCK_FILE and not is_temporary(path)]
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise UsageError(f"{folder}: is not a folder; set another run.dir") from None
    except OSError as error:
        raise UsageError(f"{folder}: cannot be read ({error.strerror}); set another run.dir") from None
    if strangers:
        raise UsageError(f"{folder}: exists and holds no run but {min(strangers)!r}; set another run.dir")


def sweep(folder: Path) -> None:
    """Remove the temporary files of writers that were killed; the folder's lock must be held."""
    for path in [*folder.glob(".*"), *(folder / "samples").glob(".*")]:
        if is_temporary(path):
            path.unlink(missing_ok=True)


class FolderLock:
    """Keeps other processes out of a run folder, until it is closed or this process ends in whatever way."""

    def __init__(self, folder: Path) -> None:
        """Take nothing yet."""
        self._path = folder / LOCK_FILE
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        """Whether this process has the folder."""
        return self._descriptor is not None

    def take(self) -> None:
        """Take the folder, which must exist.

        Raises:
            UsageError: another process has it, or it cannot be written.
        """
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise UsageError(
                f"{self._path.parent}: cannot be written ({error.strerror}); set another run.dir"
            ) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
            raise UsageError(
                f"{self._path.parent}: a run is at work there (process {holder}); "
                "wait for its end or set another run.dir"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                raise
        self._descriptor = descriptor
        with contextlib.suppress(OSError):  # only for the other's error line; a full disk is found out elsewhere
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())

    def close(self) -> None:
        """Give the folder free."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
