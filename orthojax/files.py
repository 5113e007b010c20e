"""Files that are either complete or absent, folders, and locks that end with the process that holds them."""

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import IO

from orthojax.errors import UserError


def make_folder(path: Path, what: str) -> None:
    """Creates a folder and its parents unless it exists.

    Raises:
      UserError: Where the path, or a part of it, is a file or cannot be written; `what` names it.
    """
    allowed = "a folder, new or of an earlier call"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"{what} {path} is a file", allowed=allowed) from None
    except OSError as error:
        raise UserError(f"{what} {path} cannot be made: {error.strerror}", allowed=allowed) from error


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Replaces a file in one step: readers see the old content or the new, also after a kill or a full disk.

    Args:
      path: The file; several processes may write it at once, and the last one wins.
      write: Gets a binary file, at a temporary name in the same folder.

    Raises:
      OSError: With the name of the file, which the error of a full disk lacks.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            write(file)
        temporary.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replaces a UTF-8 text file in one step, as `write_atomically`."""
    write_atomically(path, lambda file: file.write(text.encode("utf-8")))


def try_lock(file: IO) -> bool:
    """Locks an open file until it is closed or the process ends, however it ends.

    Returns:
      False where another process holds the lock; True also where the system or the file system has no locks.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return True
    with contextlib.suppress(OSError):  # some network file systems have no locks
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
