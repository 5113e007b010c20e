"""Documents, and the text they come from: files, plain or compressed, and Python's own standard library.

A `Source` is an ordered stream of documents that can be divided into shards and resumed at any position. It knows its
sha256 before any text is decoded, so that a cache can be looked up cheaply.
"""

import bz2
import contextlib
import dataclasses
import functools
import glob
import gzip
import hashlib
import io
import lzma
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from orthojax.data import tables
from orthojax.errors import UserError, needing
from orthojax.files import parse_json, require_file

# Left out of the standard library: what is no part of it or no text; what Debian and slim images lack, so that the
# corpus does not depend on the packaging; generated tables and documentation rather than code.
DROPPED_FOLDERS = frozenset(
    [
        *("site-packages", "dist-packages", "__pycache__"),
        *("test", "tests", "idlelib", "idle_test", "lib2to3", "distutils", "tkinter", "turtledemo", "ensurepip"),
        *("encodings", "pydoc_data"),
    ]
)
# Written by whoever built or packaged this Python: they hold its paths and settings.
DROPPED_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize")
DROPPED_FOLDER_PREFIX = "config-"
_COMPRESSED: dict[str, tuple[str, Any]] = {
    ".gz": ("gzip", gzip.open),
    ".bz2": ("bzip2", bz2.open),
    ".xz": ("xz", lzma.open),
    ".zst": ("zstd", lambda raw: io.BufferedReader(_ZstdReader(raw), _BLOCK)),
}
_BLOCK = 1 << 20
_TEXT_FILES = "paths of text files, folders or patterns"


class Document(NamedTuple):
    """One text; token files put an end-of-text token after each."""

    name: str
    text: str


class Item(NamedTuple):
    """A document, and where to resume after it."""

    document: Document
    position: int  # start position of the next document, for the same reader
    offset: int  # bytes consumed from the file on disk


@dataclasses.dataclass(frozen=True)
class Piece:
    """A contiguous part of one file or data set."""

    read: Callable[[int], Iterator[Item]]  # the documents from a position to the end of the piece
    start: int  # the first position
    n_bytes: int  # on disk; exact for text files, otherwise from the mean size of the records
    offset: int  # `Item.offset` at the start


@dataclasses.dataclass(frozen=True)
class Source:
    """Documents in a fixed order."""

    description: str  # for reports
    sha256: str  # identity; of text files, the sha256 of the listing that `sha256sum` prints for them
    file_count: int
    # (i, n) -> the i-th of n consecutive shards of about equal size on disk; those of all shards are those of (0, 1).
    pieces: Callable[[int, int], list[Piece]]

    @property
    def n_bytes(self) -> int:
        """Size on disk, of all pieces."""
        return sum(piece.n_bytes for piece in self.pieces(0, 1))

    def documents(self, index: int = 0, count: int = 1) -> Iterator[Document]:
        """The documents of one shard, or of the whole source."""
        for piece in self.pieces(index, count):
            for item in piece.read(piece.start):
                yield item.document


def embedded_corpus(root: str | os.PathLike[str] | None = None) -> Source:
    """The sources of the running Python's standard library, about 8 MB in 390 files.

    Every .py file that is valid UTF-8, sorted by path, except `DROPPED_FOLDERS` and folders named config-* at any
    depth, and files whose names start as in `DROPPED_FILES`. The text differs between versions of Python and, slightly,
    between their packagings; the sha256 identifies it. It is code, so losses on it compare only with each other.

    Args:
      root: Folder of the standard library; None asks the running Python.

    Raises:
      UserError: If there are no sources (some minimal images keep only compiled files).
    """
    folder = Path(sysconfig.get_path("stdlib") if root is None else root)
    paths = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [n for n in folders if n not in DROPPED_FOLDERS and not n.startswith(DROPPED_FOLDER_PREFIX)]
        paths += [Path(parent, name) for name in names if name.endswith(".py") and not name.startswith(DROPPED_FILES)]
    named = sorted((path.relative_to(folder).as_posix(), path) for path in paths)
    files = []
    for name, path in named:
        with contextlib.suppress(UnicodeDecodeError, OSError):  # OSError: a dangling link
            path.read_bytes().decode()
            files.append((name, path))
    if not files:
        raise UserError(
            f"this Python keeps no standard library sources in {folder}",
            allowed="a Python with its .py files, or your own text: data.kind=text data.paths=FILE[,FILE...]",
        )
    return _source("the standard library of the running Python", files)


def text_corpus(paths: Sequence[str | os.PathLike[str]], sha256: str = "") -> Source:
    """Text, .jsonl files and tables, as `read_documents` reads them; shards divide plain .jsonl files only.

    Args:
      paths: As `find_files`.
      sha256: Of these files if known; otherwise they are read to compute it.

    Raises:
      UserError: If there is no path, or one is missing or unreadable.
    """
    files = find_files(paths)
    names = ", ".join(name for name, _ in files[:4]) + (f" and {len(files) - 4} more" if len(files) > 4 else "")
    return _source(names, files, sha256)


def find_files(paths: Sequence[str | os.PathLike[str]]) -> list[tuple[str, Path]]:
    """Names and paths of text files, with folders and patterns expanded.

    Args:
      paths: Files, in order; folders, with every file at any depth that is not hidden, sorted, or where there are
        tables (.parquet, .arrow) those alone; patterns such as
        `data/*.jsonl.gz` or `data/**/*.txt`, sorted. A file in a folder is named by its path there, others by their
        last part.

    Raises:
      UserError: If there is no path, or one matches nothing.
    """
    found: list[tuple[str, Path]] = []
    for path in map(Path, paths):
        if os.path.isdir(path):
            named = sorted((file.relative_to(path).as_posix(), file) for file in path.rglob("*") if file.is_file())
            files = [(name, file) for name, file in named if not any(part[0] == "." for part in name.split("/"))]
            # The other files of a data set's folder describe it.
            files = [(name, file) for name, file in files if file.suffix in tables.SUFFIXES] or files
            problem = "is a folder without files"
        elif glob.has_magic(str(path)) and not os.path.lexists(path):
            matches = map(Path, sorted(glob.glob(str(path), recursive=True)))
            files, problem = [(file.name, file) for file in matches if file.is_file()], "is a pattern without matches"
        else:
            require_file(path, "text file")
            files, problem = [(path.name, path)], ""
        if not files:
            raise UserError(f"{path} {problem}", allowed=_TEXT_FILES)
        found += files
    if not found:
        raise UserError("no text files", allowed="at least one path")
    return found


def read_documents(
    name: str, path: Path, start: int = 0, stop: int | None = None, opener: Callable[[Path], IO[bytes]] | None = None
) -> Iterator[Item]:
    """The documents of a file, in order, one in memory at a time; empty ones are left out.

    A .jsonl file has one document per line, the string under "text"; blank lines are skipped. Tables, .parquet and
    .arrow, have one in each row of their column "text". Any other file is one document. Files whose names end in .gz,
    .bz2, .xz or .zst are decompressed.

    Args:
      name: Of the file; documents of a .jsonl file are called `name:line`, after a start in the middle `name@byte`;
        those of a table `name:row`.
      path: The file.
      start: The position of an earlier item. In a .jsonl file it is a byte of the (decompressed) text, and any byte
        will do: reading starts with the first line that begins there or later. In a table it is a row. In others it
        is 0, or 1 for the end.
      stop: .jsonl files: lines that begin here or later are left out.
      opener: Opens a file that is not on disk; not for .arrow.

    Raises:
      UserError: For a file that cannot be read or decompressed, is not UTF-8, or has a bad line.
    """
    if path.suffix in tables.SUFFIXES:
        for row, text, offset in tables.read_texts(path, start, opener):
            yield Item(Document(f"{name}:{row + 1}", text), row + 1, offset)
        return
    kind, opened = _COMPRESSED.get(path.suffix, ("text", lambda raw: raw))
    try:
        with opener(path) if opener else open(path, "rb", buffering=_BLOCK) as raw, opened(raw) as file:
            if _is_jsonl(path):
                for item in _read_lines(name, path, file, start, stop):
                    yield item if file is raw else item._replace(offset=raw.tell())
            elif start == 0:
                text = _decode(file.read(), path, 0).removeprefix("\ufeff")  # some editors write a byte order mark
                if text:
                    yield Item(Document(name, text), 1, raw.tell())
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise UserError(f"cannot read {path}: {error.strerror}") from None
        raise UserError(f"{path} is not a complete {kind} file: {error}") from None


def _source(description: str, files: Sequence[tuple[str, Path]], sha256: str = "") -> Source:
    sizes = [path.stat().st_size for _, path in files]

    def pieces(index: int, count: int) -> list[Piece]:
        begin, end = (sum(sizes) * i // count for i in (index, index + 1))
        found, first = [], 0
        for (name, path), size in zip(files, sizes, strict=True):
            if _is_jsonl(path) and path.suffix not in _COMPRESSED:
                start, stop = max(begin - first, 0), min(end - first, size)
                if start < stop:
                    read = functools.partial(read_documents, name, path, stop=stop)
                    found.append(Piece(read, start, stop - start, start))
            elif size and begin <= first < end:
                found.append(Piece(functools.partial(read_documents, name, path), 0, size, 0))
            first += size
        return found

    return Source(description, sha256 or _listing_sha256(files), len(files), pieces)


def _listing_sha256(files: Sequence[tuple[str, Path]]) -> str:
    digest = hashlib.sha256()
    for name, path in files:
        try:
            with open(path, "rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from None
        digest.update(f"{content}  {name}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _is_jsonl(path: Path) -> bool:
    return (path.with_suffix("") if path.suffix in _COMPRESSED else path).suffix == ".jsonl"


def _read_lines(name: str, path: Path, file: IO[bytes], start: int, stop: int | None) -> Iterator[Item]:
    position = number = 0
    if start:
        # The line that holds the byte before `start` belongs to the reader of the part before.
        if path.suffix in _COMPRESSED:
            while position < start - 1 and (block := file.read(min(start - 1 - position, _BLOCK))):
                position += len(block)
        else:
            file.seek(start - 1)
        position = start - 1 + len(file.readline())
    while (stop is None or position < stop) and (line := file.readline()):
        number += 1
        where, label = (f"the line at byte {position}", f"@{position}") if start else (f"line {number}", f":{number}")
        text = _decode(line, path, position)
        if position == 0:
            text = text.removeprefix("\ufeff")
        position += len(line)
        if text.strip() and (document := _read_json_line(text, f"{path}, {where}")):
            yield Item(Document(name + label, document), position, position)


class _ZstdReader(io.RawIOBase):
    """Decompresses concatenated zstd frames; unlike the package's own reader it notices a truncated one."""

    def __init__(self, raw: IO[bytes]):
        self._blocks, self._output = _decompress_zstd(raw), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output and (block := next(self._blocks, None)) is not None:
            self._output = block
        size = min(len(buffer), len(self._output))
        buffer[:size], self._output = self._output[:size], self._output[size:]
        return size


def _decompress_zstd(raw: IO[bytes]) -> Iterator[bytes]:
    with needing(f"the zstd file {raw.name}", "zstd"):
        import zstandard  # type: ignore[import-not-found]
    frame: Any = None
    try:
        while block := raw.read(_BLOCK):
            while block:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                yield frame.decompress(block)
                block, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    except zstandard.ZstdError as error:
        raise EOFError(error) from None
    if frame is not None:
        raise EOFError("it ends within a frame")


def _decode(content: bytes, path: Path, offset: int) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text: byte {content[error.start]:#04x} at offset {offset + error.start}",
            allowed="UTF-8",
        ) from None


def _read_json_line(line: str, where: str) -> str:
    allowed = 'an object such as {"text": "..."} on every line'
    try:
        text = parse_json(line, where)["text"]
        text.encode()
    except UserError as error:
        raise UserError(str(error), allowed=allowed) from None
    except (AttributeError, KeyError, TypeError, IndexError):
        raise UserError(f'{where}: no string under "text"', allowed=allowed) from None
    except UnicodeEncodeError as error:  # JSON may escape half of a surrogate pair, which is not text
        raise UserError(f'{where}: "text" is not valid Unicode at character {error.start}', allowed=allowed) from None
    return text
