"""Text to train on: Python's own standard library, which every machine has, or the user's files.

A corpus is a list of files with a sha256, known before any of the text is decoded, so that a cache can be looked up
cheaply; the documents and their split into train and validation are read from it on demand.
"""

import dataclasses
import gzip
import hashlib
import json
import os
import sysconfig
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from orthojax.errors import UserError

# Folders of the standard library that are left out, by what would be wrong with keeping them.
DROPPED_FOLDERS = frozenset(
    [
        # No part of the standard library, or no text of it.
        *("site-packages", "dist-packages", "__pycache__"),
        # Absent from Debian and slim images, so that the corpus would depend on the packaging.
        *("test", "tests", "idlelib", "idle_test", "lib2to3", "distutils", "tkinter", "turtledemo", "ensurepip"),
        # Generated tables and documentation rather than code (`pydoc_data` feeds Bigram-Backcopy instead).
        *("encodings", "pydoc_data"),
    ]
)
# Written by whoever built or packaged this Python: they hold its paths and settings.
DROPPED_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize")
DROPPED_FOLDER_PREFIX = "config-"


class Document(NamedTuple):
    """One text; the token files put an end-of-text token after each."""

    name: str
    text: str


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Files of text, identified by a sha256 over their names and contents.

    Attributes:
      kind: `embedded` is split by file name, `text` by content.
      description: What it is, for reports.
      files: (name, path) of every file; names do not depend on where the files lie.
      n_bytes: Size of all files together (on disk, so compressed where they are).
      sha256: sha256 of the lines `sha256sum` would print, that is `<sha256 of the file>  <name>`.
    """

    kind: Literal["embedded", "text"]
    description: str
    files: tuple[tuple[str, Path], ...]
    n_bytes: int
    sha256: str

    @property
    def file_count(self) -> int:
        """Number of files."""
        return len(self.files)

    def documents(self) -> list[Document]:
        """Every document, in the order of the files.

        Raises:
          UserError: For a file that is not UTF-8, a bad line of a .jsonl file, or where there is no text at all.
        """
        documents = [document for name, path in self.files for document in _read_documents(name, path)]
        if not documents:
            raise UserError(f"no text in {self.description}", allowed="at least one file that is not empty")
        return documents

    def split(self) -> tuple[list[Document], list[Document]]:
        """The train and the validation documents; see `split_by_name` and `split_by_text`.

        Raises:
          UserError: As `documents`, or where there is too little text for a validation split.
        """
        documents = self.documents()
        train, validation = split_by_name(documents) if self.kind == "embedded" else split_by_text(documents)
        if not train or not validation:
            raise UserError(
                f"too little text in {self.description} to set some aside for validation",
                allowed="at least 10 characters in one document",
            )
        return train, validation


def embedded_corpus(root: str | os.PathLike[str] | None = None) -> Corpus:
    """The sources of the running Python's standard library, about 8 MB in 390 files.

    Kept is every .py file that is valid UTF-8, sorted by path, but for `DROPPED_FOLDERS` and folders named
    config-* at any depth, and files whose name starts as in `DROPPED_FILES`. The text differs between versions of
    Python and, slightly, between their packagings: the sha256 says which one it was. It is code, so losses on it
    compare with each other only.

    Args:
      root: Where the standard library lies; None asks the running Python.

    Raises:
      UserError: Where there are no sources (some minimal images keep only compiled files).
    """
    folder = Path(sysconfig.get_path("stdlib") if root is None else root)
    paths = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [n for n in folders if n not in DROPPED_FOLDERS and not n.startswith(DROPPED_FOLDER_PREFIX)]
        paths += [Path(parent, name) for name in names if name.endswith(".py") and not name.startswith(DROPPED_FILES)]
    named = sorted((path.relative_to(folder).as_posix(), path) for path in paths)
    files = tuple((name, path) for name, path in named if _is_utf8(path))
    if not files:
        raise UserError(
            f"this Python keeps no standard library sources in {folder}",
            allowed="a Python with its .py files, or your own text: data.kind=text data.paths=FILE[,FILE...]",
        )
    return _corpus("embedded", "the standard library of the running Python", files)


def text_corpus(paths: Sequence[str | os.PathLike[str]]) -> Corpus:
    """The user's own files.

    A .jsonl file has one document on each line, the string under "text"; blank lines are skipped. Any other file
    (.txt, .md, .py, ...) is one document. Both may be gzipped (.gz). Empty documents are left out. All text is held
    in memory when the documents are read.

    Args:
      paths: Files; their order is the order of the documents.

    Raises:
      UserError: Where there is no path, or one is missing, a folder or unreadable.
    """
    files = tuple((Path(path).name, Path(path)) for path in paths)
    if not files:
        raise UserError("no text files", allowed="at least one path")
    for _, path in files:
        if path.is_dir():
            raise UserError(f"{path} is a folder", allowed="paths of text files")
        if not path.exists():
            raise UserError(f"there is no file {path}", allowed="paths of text files")
    names = ", ".join(name for name, _ in files[:4]) + (f" and {len(files) - 4} more" if len(files) > 4 else "")
    return _corpus("text", names, files)


def split_by_name(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """Sets 3 file names in 32 aside for validation, by their sha256: the same ones under every Python.

    >>> train, validation = split_by_name([Document(f"{i}.py", "") for i in range(160)])
    >>> len(train), len(validation)
    (144, 16)
    """
    chosen = [
        hashlib.sha256(document.name.encode("utf-8", "surrogateescape")).digest()[0] < 24 for document in documents
    ]
    train = [document for document, out in zip(documents, chosen, strict=True) if not out]
    validation = [document for document, out in zip(documents, chosen, strict=True) if out]
    return train, validation


def split_by_text(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """Sets about a tenth of the user's text aside for validation, wherever the files lie and whatever their names.

    With 20 documents or more it is the tenth of them (rounded down) whose texts have the smallest sha256; equal texts
    go the same way, so none is on both sides. With fewer documents, or where all are equal, it is the last tenth of
    the characters of each document.

    >>> split_by_text([Document("a", "0123456789" * 2)])
    ([Document(name='a', text='012345678901234567')], [Document(name='a', text='89')])
    """
    if len(documents) >= 20:
        hashes = [hashlib.sha256(document.text.encode()).digest() for document in documents]
        limit = sorted(hashes)[len(documents) // 10 - 1]
        train = [document for document, value in zip(documents, hashes, strict=True) if value > limit]
        validation = [document for document, value in zip(documents, hashes, strict=True) if value <= limit]
        if train:
            return train, validation
    train, validation = [], []
    for name, text in documents:
        cut = len(text) - len(text) // 10
        train.append(Document(name, text[:cut]))
        if cut < len(text):
            validation.append(Document(name, text[cut:]))
    return train, validation


def _corpus(kind: Literal["embedded", "text"], description: str, files: tuple[tuple[str, Path], ...]) -> Corpus:
    digest, n_bytes = hashlib.sha256(), 0
    for name, path in files:
        try:
            with open(path, "rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
                n_bytes += file.tell()
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from None
        digest.update(f"{content}  {name}\n".encode("utf-8", "surrogateescape"))
    return Corpus(kind, description, files, n_bytes, digest.hexdigest())


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode()
    except (UnicodeDecodeError, OSError):  # OSError: a link that leads nowhere
        return False
    return True


def _read_text(path: Path) -> str:
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path} is not a complete gzip file: {error}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text: byte {content[error.start]:#04x} at offset {error.start}", allowed="UTF-8"
        ) from None
    return text.removeprefix("\ufeff")  # the byte order mark of some editors


def _read_documents(name: str, path: Path) -> list[Document]:
    text = _read_text(path)
    if Path(path.name.removesuffix(".gz")).suffix != ".jsonl":
        return [Document(name, text)] if text else []
    documents = []
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines: JSON may hold U+2028 and such
        if line.strip():
            document = _read_json_line(line, f"{path}, line {number}")
            documents += [Document(f"{name}:{number}", document)] if document else []
    return documents


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
