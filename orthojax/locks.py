"""Locks on files, which the operating system takes away from a process when it ends, however it does."""

import contextlib
from typing import IO


def try_lock(file: IO) -> bool:
    """Locks an open file until it is closed.

    Returns:
      Whether nobody else had it; True also where the system or the file system cannot lock.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return True
    with contextlib.suppress(OSError):  # some network file systems cannot lock
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
