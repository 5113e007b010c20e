"""Text and jsonl files, plain or compressed, as a stream of documents that can be taken up in the middle."""

import bz2
import glob
import gzip
import io
import json
import lzma
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from orthojax.errors import UserError

COMPRESSED = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}
_BLOCK = 1 << 20


class Document(NamedTuple):
    """One text; the token files put an end-of-text token after each."""

    name: str
    text: str


class Item(NamedTuple):
    """A document, and where to go on after it."""

    document: Document
    position: int  # what to give to the same reader so that it starts with the next document
    offset: int  # bytes of the file, as it lies on the disk, that are behind it


def find_files(paths: Sequence[str | os.PathLike[str]]) -> tuple[tuple[str, Path], ...]:
    """Names and paths of text files, folders taken whole and patterns written out.

    Args:
      paths: Files, in their order; folders, with every file at any depth that is not hidden, sorted; patterns such as
        `data/*.jsonl.gz` or `data/**/*.txt`, sorted. A file is named by its last part, in a folder by its path there.

    Raises:
      UserError: Where there is no path, or it leads to nothing.
    """
    found: list[tuple[str, Path]] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = [file for file in path.rglob("*") if file.is_file()]
            named = sorted((file.relative_to(path).as_posix(), file) for file in inside)
            files = [(name, file) for name, file in named if not any(part[0] == "." for part in name.split("/"))]
        elif not path.exists() and glob.has_magic(str(path)):
            files = [(Path(name).name, Path(name)) for name in sorted(glob.glob(str(path), recursive=True))]
            files = [(name, file) for name, file in files if file.is_file()]
        elif path.exists():
            files = [(path.name, path)]
        else:
            raise UserError(f"there is no file {path}", allowed="paths of text files, folders or patterns")
        if not files:
            what = "is a folder without files" if path.is_dir() else "is a pattern that no file matches"
            raise UserError(f"{path} {what}", allowed="paths of text files, folders or patterns")
        found += files
    if not found:
        raise UserError("no text files", allowed="at least one path")
    return tuple(found)


def is_jsonl(path: Path) -> bool:
    """Whether a file holds one document on each line."""
    name = path.name.removesuffix(path.suffix) if path.suffix in COMPRESSED else path.name
    return Path(name).suffix == ".jsonl"


def divisible(path: Path) -> bool:
    """Whether a part of a file can be read without what stands before it: plain .jsonl."""
    return is_jsonl(path) and path.suffix not in COMPRESSED


def read_documents(name: str, path: Path, start: int = 0, stop: int | None = None) -> Iterator[Item]:
    """The documents of a file, in order; empty ones are left out.

    A .jsonl file has one document on each line, the string under "text"; blank lines are skipped. Any other file is
    one document. Where the name ends in .gz, .bz2, .xz or .zst it is decompressed. No more than one document is held
    in memory.

    Args:
      name: Of the file; documents of a .jsonl file are called `name:line`, after a start in the middle `name@byte`.
      path: The file.
      start: The position of an earlier item. In a .jsonl file it is a byte of the (decompressed) text, and any byte
        will do: reading starts with the first line that begins there or later. In others it is 0, or 1 for the end.
      stop: .jsonl files: lines that begin here or later are left out.

    Raises:
      UserError: For a file that cannot be read or decompressed, is not UTF-8, or has a bad line.
    """
    try:
        with open(path, "rb", buffering=_BLOCK) as raw, _decompressed(path, raw) as file:
            if is_jsonl(path):
                for item in _read_lines(name, path, file, start, stop):
                    yield item if file is raw else item._replace(offset=raw.tell())
            elif start == 0:
                text = _decode(file.read(), path, 0).removeprefix("\ufeff")  # the byte order mark of some editors
                if text:
                    yield Item(Document(name, text), 1, raw.tell())
    except OSError as error:
        if error.errno is None:  # what a decompressor calls an error of its input
            raise _incomplete(path, error) from None
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise _incomplete(path, error) from None


def _read_lines(name: str, path: Path, file: IO[bytes], start: int, stop: int | None) -> Iterator[Item]:
    position = 0
    if start:
        # The line that holds the byte before `start` belongs to whoever reads what stands there.
        _pass_over(file, start - 1)
        position = start - 1 + len(file.readline())
    number = 0
    while stop is None or position < stop:
        line = file.readline()
        if not line:
            return
        number += 1
        where, label = (f"the line at byte {position}", f"@{position}") if start else (f"line {number}", f":{number}")
        text = _decode(line, path, position)
        if position == 0:
            text = text.removeprefix("\ufeff")
        position += len(line)
        if text.strip() and (document := _read_json_line(text, f"{path}, {where}")):
            yield Item(Document(name + label, document), position, position)


def _pass_over(file: IO[bytes], count: int) -> None:
    if isinstance(file, io.BufferedReader) and isinstance(file.raw, io.FileIO):
        file.seek(count)
        return
    while count > 0 and (block := file.read(min(count, _BLOCK))):
        count -= len(block)


def _decompressed(path: Path, raw: IO[bytes]) -> IO[bytes]:
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    if path.suffix == ".bz2":
        return cast(IO[bytes], bz2.BZ2File(raw))
    if path.suffix == ".xz":
        return cast(IO[bytes], lzma.LZMAFile(raw))
    if path.suffix == ".zst":
        return io.BufferedReader(_ZstdReader(path, raw), _BLOCK)
    return raw


class _ZstdReader(io.RawIOBase):
    """Decompresses zstd frames one after the other; unlike the package's own reader it notices a missing end."""

    def __init__(self, path: Path, raw: IO[bytes]):
        try:
            import zstandard  # type: ignore[import-not-found]
        except ImportError:
            raise UserError(f"{path} is zstd, which needs a package", allowed="pip install zstandard") from None
        self._raw, self._package = raw, zstandard
        self._frame: Any = None
        self._input = self._output = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            self._input = self._input or self._raw.read(_BLOCK)
            if not self._input:
                if self._frame is not None:
                    raise EOFError("it ends within a frame")
                return 0
            self._frame = self._frame or self._package.ZstdDecompressor().decompressobj()
            try:
                self._output = self._frame.decompress(self._input)
            except self._package.ZstdError as error:
                raise EOFError(error) from None
            self._input = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        size = min(len(buffer), len(self._output))
        buffer[:size], self._output = self._output[:size], self._output[size:]
        return size


def _incomplete(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} is not a complete {COMPRESSED.get(path.suffix, 'compressed')} file: {error}")


def _decode(content: bytes, path: Path, offset: int) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text: byte {content[error.start]:#04x} at offset {offset + error.start}",
            allowed="UTF-8",
        ) from None


def _read_json_line(line: str, where: str) -> str:
    allowed = 'on every line an object such as {"text": "..."}'
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({error})", allowed=allowed) from None
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise UserError(f'{where}: no string under "text"', allowed=allowed)
    try:
        record["text"].encode()
    except UnicodeEncodeError as error:  # JSON may escape half of a surrogate pair, which is no text
        raise UserError(f'{where}: "text" is not valid Unicode at character {error.start}', allowed=allowed) from None
    return record["text"]
