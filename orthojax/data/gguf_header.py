"""The lengths in a GGUF file, compared with its size before it is read: a flipped bit must not ask for exabytes."""

import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from orthojax.errors import UserError

_STRING, _ARRAY = 8, 9
_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of a number, by its type
_LEAST = {**_BYTES, _STRING: 8}


class _Header:
    """Walks over the header of a file; every step says what it is of."""

    def __init__(self, file: IO[bytes], path: Path):
        self._file, self._path, self._size = file, path, os.fstat(file.fileno()).st_size

    def refuse(self, problem: str) -> UserError:
        return UserError(f"{self._path} is damaged, or no GGUF file: {problem}")

    def require(self, needed: int, what: str) -> None:
        left = self._size - self._file.tell()
        if needed > left:
            raise self.refuse(f"{what} needs {needed:,} bytes, and {left:,} are left")

    def number(self, kind: str, what: str) -> int:
        self.require(struct.calcsize(kind), what)
        return struct.unpack(f"<{kind}", self._file.read(struct.calcsize(kind)))[0]

    def skip(self, length: int, what: str) -> None:
        self.require(length, what)
        self._file.seek(length, os.SEEK_CUR)

    def string(self, what: str) -> str:
        length = self.number("Q", what)
        self.require(length, what)
        return self._file.read(length).decode("utf-8", "backslashreplace")

    def value(self, kind: int, name: str) -> None:
        if kind == _STRING:
            self.skip(self.number("Q", name), name)
        elif kind != _ARRAY:
            self.skip(self._bytes(kind, name), name)
        else:
            of, count = self.number("I", name), self.number("Q", name)
            if of == _ARRAY:
                raise self.refuse(f"{name} is an array of arrays")
            self.require(count * self._bytes(of, name), f"{name}, {count:,} values,")
            for _ in range(count if of == _STRING else 0):
                self.skip(self.number("Q", name), name)
            self.skip(0 if of == _STRING else count * _BYTES[of], name)

    def _bytes(self, kind: int, name: str) -> int:
        if kind not in _LEAST:
            raise self.refuse(f"{name} has the unknown type {kind}")
        return _LEAST[kind]


def check_header(path: Path) -> None:
    """Checks that every string, array and count of the header fits into the file.

    Raises UserError if one does not, with its name; for unknown types and arrays of arrays.
    """
    with path.open("rb") as file:
        header = _Header(file, path)
        magic, version = header.number("I", "the magic number"), header.number("I", "the version")
        if magic != 0x46554747 or version not in (2, 3):  # big-endian, or another version: the reader judges
            return
        tensors, pairs = header.number("Q", "the header"), header.number("Q", "the header")
        header.require(24 * tensors + 13 * pairs, f"a header of {tensors:,} tensors and {pairs:,} fields")
        for _ in range(pairs):
            name = header.string("the name of a field")
            header.value(header.number("I", name), name)
        for _ in range(tensors):
            name = header.string("the name of a tensor")
            header.skip(8 * header.number("I", name) + 4 + 8, name)


def check_offsets(path: Path, tensors: Iterable[Any]) -> None:
    """Checks that the tensors of `gguf.GGUFReader` follow each other and end with the file, as llama.cpp writes them.

    Raises UserError for one that begins inside of the one before it, or ends beyond the file.
    """
    end, before = 0, "the header"
    for tensor in tensors:
        start = int(tensor.data_offset)
        if start < end:
            raise UserError(f"{path} is damaged: tensor {tensor.name} begins inside of {before}")
        end, before = start + int(tensor.n_bytes), tensor.name
    if end > path.stat().st_size:
        raise UserError(f"{path} is damaged: tensor {before} ends beyond the file")
