"""Text to train on: Python's own standard library, which every machine has, or the user's files.

A corpus is a list of files with a sha256, known before any of the text is decoded, so that a cache can be looked up
cheaply; the documents and their split into train and validation are read from it on demand.
"""

import dataclasses
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from orthojax.data.splits import BY_NAME, HoldOut, divide, hold_out_by_text
from orthojax.data.text_files import Document, find_files, read_documents
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
        documents = [item.document for name, path in self.files for item in read_documents(name, path)]
        if not documents:
            raise UserError(f"no text in {self.description}", allowed="at least one file that is not empty")
        return documents

    def split(self) -> tuple[list[Document], list[Document]]:
        """The train and the validation documents; see `orthojax.data.splits`.

        Raises:
          UserError: As `documents`, or where there is too little text for a validation split.
        """
        documents = self.documents()
        train, validation = divide(documents, self.hold_out(documents))
        if not train or not validation:
            raise UserError(
                f"too little text in {self.description} to set some aside for validation",
                allowed="at least 10 characters in one document",
            )
        return train, validation

    def hold_out(self, documents: Iterable[Document]) -> HoldOut:
        """The rule of its split, for which the first documents of `text` are read."""
        return BY_NAME if self.kind == "embedded" else hold_out_by_text(documents)


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


def text_corpus(paths: Sequence[str | os.PathLike[str]], sha256: str = "") -> Corpus:
    """The user's own files.

    What the files may be, and how they are read: `orthojax.data.text_files`. All text is held in memory when the
    documents are read.

    Args:
      paths: Files, folders and patterns; their order is the order of the documents.
      sha256: Of these files, where it is known; otherwise they are read for it.

    Raises:
      UserError: Where there is no path, or one is missing or unreadable.
    """
    files = find_files(paths)
    names = ", ".join(name for name, _ in files[:4]) + (f" and {len(files) - 4} more" if len(files) > 4 else "")
    return _corpus("text", names, files, sha256)


def _corpus(
    kind: Literal["embedded", "text"], description: str, files: tuple[tuple[str, Path], ...], sha256: str = ""
) -> Corpus:
    if sha256:
        return Corpus(kind, description, files, sum(path.stat().st_size for _, path in files), sha256)
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
