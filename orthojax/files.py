"""Files that are either complete or absent, and errors that name the file."""

import contextlib
import difflib
import functools
import glob
import hashlib
import io
import json
import math
import os
import re
import secrets
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from orthojax.errors import UserError, printable


def is_remote(path: Any) -> bool:
    """Returns whether a path of `as_path` is on an object store."""
    return not isinstance(path, str | Path) and "://" in str(path)


def exists(path: Path) -> bool:
    """Returns whether anything is under a path, also a broken link."""
    return path.exists() if is_remote(path) else os.path.lexists(path)


def is_folder(path: Path) -> bool:
    """Returns whether a path is a folder; pathlib raises for names that are too long."""
    return path.is_dir() if is_remote(path) else os.path.isdir(path)


def require_local(path: Path | str, what: str) -> None:
    """Refuses an address such as gs://bucket/run, which as a path would be the local folder `gs:`.

    Raises:
      UserError: If the path begins with a scheme and is not of `as_path`; `what` names it.
    """
    if is_remote(path):
        return
    if scheme := re.match(r"([A-Za-z][\w+.-]+):/+", str(path)):  # a Path has one slash left; C:/ is a drive
        address = f"{scheme[1]}://{str(path)[scheme.end() :]}"
        allowed = "a path of this machine, such as that of a mounted bucket"
        raise UserError(f"{what} {address} is an address, and nothing is read or written there", allowed=allowed)


def make_folder(path: Path, what: str, files: Sequence[str] = ()) -> None:
    """Creates a folder and its parents unless it exists, and checks that `files` can be written to it.

    Raises:
      UserError: If a part of the path is a file or a broken link, the folder cannot be written to, or one of the files
        is a folder, or the path is an address; `what` names the folder in the message.
    """
    require_local(path, what)
    if is_remote(path):
        path.mkdir(parents=True, exist_ok=True)
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        inner = next((part for part in (path, *path.parents) if os.path.lexists(part)), path)
        is_other = os.path.lexists(inner) and not os.path.isdir(inner)
        problem = f"{inner} is {'a file' if inner.is_file() else 'no folder'}" if is_other else error.strerror
        raise UserError(f"{what} {path}: {problem}", allowed="a folder, new or of an earlier call") from error
    for name in files:
        if (path / name).is_dir():
            raise UserError(f"{path / name} is a folder", allowed="a file, new or of an earlier call")


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Replaces a file in one step: readers see the old content or the new, even after a kill or a full disk.

    Several processes may do so at once, and the last one wins; `write` gets a binary file with a temporary name. Files
    that killed processes left under such names are removed.

    Raises:
      OSError: With the name of the file, which the error of a full disk lacks.
    """
    if is_remote(path):  # where a file appears when it is complete
        buffer = io.BytesIO()
        write(buffer)
        path.write_bytes(buffer.getvalue())
        return
    _remove_orphans(path)
    done = False
    while not done:
        temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
        try:
            with temporary.open("xb") as file:
                locked = try_lock(file)  # so that no other process takes it for an orphan
                if locked is False or not temporary.exists():  # one just did
                    continue
                write(file)
                file.flush()
                os.fsync(file.fileno())  # else a power cut leaves an empty file under the new name
                if locked:
                    temporary.replace(path)
            if not locked:  # Windows cannot rename an open file
                temporary.replace(path)
            done = True
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        finally:
            temporary.unlink(missing_ok=True)


def _remove_orphans(path: Path) -> None:
    for left in map(Path, glob.glob(f"{glob.escape(str(path.parent))}/.{glob.escape(path.name)}.*-*.tmp")):
        with contextlib.suppress(OSError), left.open("ab") as file:
            if try_lock(file):
                left.unlink()


def write_text(path: Path, text: str) -> None:
    """Replaces a UTF-8 text file like `write_atomically`; bytes of paths that are not UTF-8 are escaped."""
    write_atomically(path, lambda file: file.write(text.encode("utf-8", "backslashreplace")))


def require_file(path: Path, what: str) -> None:
    """Checks that a path is a regular file; opening a pipe would wait forever.

    Raises:
      UserError: If the path does not exist or is a folder, pipe or device; `what` names it ("token file", "report").
    """
    if path.is_file() if is_remote(path) else os.path.isfile(path):  # pathlib raises for names that are too long
        return
    require_local(path, what)
    if path.exists() if is_remote(path) else os.path.exists(path):
        problem = f"{what} {path} is {'a folder' if path.is_dir() else 'a pipe or a device'}"
    else:
        problem = f"no such {what}: {path}"
    raise UserError(problem, allowed="a regular file", hint=nearest_path(path))


def nearest_path(path: Path) -> str:
    """Returns the hint 'did you mean ...?' for a path whose last part is mistyped, or '' if none is close."""
    if is_remote(path) or os.path.lexists(path):
        return ""
    try:
        found = difflib.get_close_matches(path.name, os.listdir(path.parent), n=1)
    except OSError:
        return ""
    return f"did you mean {str(path.with_name(found[0]))!r}?" if found else ""


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the numbers that JSON can represent: neither NaN nor infinite ones.

    >>> finite({"a": 1.0, "b": math.nan})
    {'a': 1.0}
    """
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def identity(place: Path, workdir: Path | None = None) -> list[tuple[str, int, int]]:
    """Returns names, sizes and times of a file, or of a folder's but those in the workdir; they change with content."""
    files = sorted(path for path in place.rglob("*") if path.is_file()) if place.is_dir() else [place]
    own = workdir and workdir.resolve()
    files = [path for path in files if own is None or own not in path.resolve().parents]
    return [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]


def parse_json(text: str | bytes, what: str) -> Any:
    """Parses JSON that may be damaged.

    Raises:
      UserError: For invalid UTF-8 or JSON, nesting deeper than Python's stack, or integers of thousands of digits.
    """
    try:
        return json.loads(text if isinstance(text, str) else text.decode("utf-8"))
    except RecursionError:
        raise UserError(f"{what} is nested too deeply") from None
    except ValueError as error:  # also UnicodeDecodeError and integers longer than Python converts
        raise UserError(f"{what} is not valid JSON: {str(error)[:200]}") from None


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Reads a JSON object from a file; the caller checks its contents.

    Raises:
      UserError: If the file is absent, not a regular file, unreadable, or holds no object; `what` names it.
    """
    require_file(path, what)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{what} {path} cannot be read: {error.strerror}") from error
    values = parse_json(content, f"{what} {path}")
    if not isinstance(values, dict):
        raise UserError(f"{what} {path} holds a JSON {type(values).__name__}", allowed="a JSON object")
    return values


def kept(path: Path, what: str, make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the JSON object that an earlier call kept in a file, or makes it and keeps it there.

    Raises:
      UserError: If the file or the arrays beside it were changed; `what` names it.
    """
    if not path.exists():
        write_with_digest(path, make())
    return read_with_digest(path, what)


def write_with_digest(path: Path, values: Mapping[str, Any]) -> None:
    """Writes values as JSON with the sha256 of the values and of the .npz file of the same name, if there is one."""
    write_text(path, json.dumps({**values, "sha256": _digest(path, values)}, indent=1, allow_nan=False) + "\n")


def read_with_digest(path: Path, what: str) -> dict[str, Any]:
    """Returns the values that `write_with_digest` wrote.

    Raises:
      UserError: As for `read_json` and `check_digest`.
    """
    return check_digest(path, read_json(path, what))


def check_digest(path: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values that a file holds, without their sha256; a line on stderr says so if they have none.

    Raises:
      UserError: If they or the arrays were changed.
    """
    values = dict(values)
    if (sha256 := values.pop("sha256", None)) is None:
        say_once(f"{path} has no sha256, as files of orthojax 0.1.0 have none: its numbers are not checked")
    elif sha256 != _digest(path, values):
        hint = "without that file they are made again"
        raise UserError(f"{path} or its arrays were changed since they were written", hint=hint)
    return values


@functools.cache
def say_once(line: str) -> None:
    """Prints a line on stderr, the first time."""
    print(printable(line), file=sys.stderr)


def _digest(path: Path, values: Mapping[str, Any]) -> str:
    arrays = path.with_suffix(".npz")
    content = json.dumps(values).encode() + (arrays.read_bytes() if arrays.exists() else b"")
    return hashlib.sha256(content).hexdigest()


def json_line(values: Mapping[str, Any]) -> str:
    """Returns values as a line of JSON, with the CRC-32 of what is before it."""
    return json.dumps({**values, "crc32": zlib.crc32(json.dumps(values).encode())}) + "\n"


def read_json_lines(path: Path, what: str) -> list[dict[str, Any]]:
    """Reads the JSON objects of a file with one in each line, as `json_line` or others write them.

    Lines that a kill or a bad disk corrupted are left out, and a line on stderr says how many.

    Raises:
      UserError: If there is no such file; `what` names it.
    """
    require_file(path, what)
    values: list[dict[str, Any]] = []
    lines = path.read_bytes().split(b"\n")
    for line in filter(None, lines):
        with contextlib.suppress(UserError):
            entry = parse_json(line, "line")
            if isinstance(entry, dict) and entry.pop("crc32", None) in (None, zlib.crc32(json.dumps(entry).encode())):
                values.append(entry)
    if damaged := len(lines) - lines.count(b"") - len(values):
        say_once(f"{path}: left out {damaged} damaged line{'s' * (damaged > 1)}")
    return values


def try_lock(file: IO) -> bool | None:
    """Locks an open file until it is closed or the process ends, however it ends.

    Returns:
      False if another process holds the lock; None if the system or the file system has no locks.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # some network file systems
        return None
    return True


def is_at(path: Path, file: IO) -> bool:
    """Returns whether an open file is still the one under its path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def folder_of_one(folder: Path, what: str) -> Iterator[IO]:
    """Creates a folder and holds its file `.lock`, which it yields; `what` names the folder in messages.

    Raises:
      UserError: If another process has it, or as for `make_folder`.
    """
    make_folder(folder, what, files=[".lock"])
    with (folder / ".lock").open("a") as file:
        if try_lock(file) is False:
            problem = f"another process is working in {what} {folder}"
            raise UserError(problem, allowed="another folder, or to wait until it ends")
        yield file


@contextlib.contextmanager
def one_writer(path: Path) -> Iterator[None]:
    """Lets one process at a time make a file; the others wait, and say so on stderr.

    On a file system without locks, nobody waits.
    """
    lock = path.with_name(f".{path.name}.lock")
    while True:
        with lock.open("a") as file:
            if try_lock(file) is not False and is_at(lock, file):
                try:
                    yield
                finally:
                    lock.unlink(missing_ok=True)
                return
        say_once(f"waiting for another process, which makes {path}")
        time.sleep(0.2)


def require_utf8(path: Path, what: str) -> None:
    """Refuses a path with bytes that are not UTF-8: TensorStore, which reads and writes arrays, cannot open it.

    Raises:
      UserError: If the absolute path has such bytes; `what` names it.
    """
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:
        raise UserError(
            f"{what} {path.absolute()}: a name in it is not UTF-8",
            allowed="a path in UTF-8, such as a symbolic link to it",
        ) from None
