"""Locks on files, which the system lifts when their owner dies, however that happens."""

import errno
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # what file systems without locks answer


@contextmanager
def lock_file(path: Path, taken: Callable[[str], None]) -> Iterator[bool]:
    """Hold the lock on the file at `path`, which is made, names its owner, and is removed at the end.

    Yields False where the file system, or Python, has no locks: then all pass. While another has the lock,
    taken("process 7 of host") is called; it may raise, and if it returns, this waits. OSError where the file cannot
    be made.
    """
    while True:
        # No child inherits the descriptor, so none keeps the lock after its parent.
        with path.open("a+", encoding="utf-8") as file:
            try:
                locked = _lock(file, wait=False)
            except BlockingIOError:
                file.seek(0)
                taken(file.read(200).strip() or "another process")
                locked = _lock(file, wait=True)
            if locked and not _is_at(file, path):
                continue  # who had it has removed it: there may be a new one
            if locked:
                file.truncate(0)
                file.write(f"process {os.getpid()} of {platform.node()}")
                file.flush()
            try:
                yield locked
            finally:
                path.unlink(missing_ok=True)
            return


def _lock(file: TextIO, wait: bool) -> bool:
    """False where there are no locks; BlockingIOError where another has it, unless told to wait."""
    try:
        import fcntl  # not on Windows

        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except (ModuleNotFoundError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in NO_LOCKS:
            raise
        return False
    return True


def _is_at(file: TextIO, path: Path) -> bool:
    """Whether the open file is the one that the path names."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
