"""What token files are made from: text in stretches, which can be shared out and taken up in the middle."""

import dataclasses
import functools
from collections.abc import Callable, Iterator

from orthojax.data.corpus import Corpus
from orthojax.data.text_files import Document, Item, divisible, read_documents


@dataclasses.dataclass(frozen=True)
class Piece:
    """A stretch of one file, or of one data set.

    Attributes:
      read: Called with a position, gives the documents from there to the end of the stretch.
      start: The first position.
      n_bytes: Its size on the disk, which is exact for text files.
      offset: What `Item.offset` is at its beginning.
    """

    read: Callable[[int], Iterator[Item]]
    start: int
    n_bytes: int
    offset: int


@dataclasses.dataclass(frozen=True)
class Source:
    """Documents in a fixed order.

    Attributes:
      description: What it is, for reports.
      sha256: Identity, for what is taken up again; of what, the maker says.
      file_count: Files.
      pieces: Called with (i, n), gives the i-th of n consecutive parts of about the same size: the documents of all
        parts, one part after the other, are those of (0, 1).
    """

    description: str
    sha256: str
    file_count: int
    pieces: Callable[[int, int], list[Piece]]


def text_source(corpus: Corpus) -> Source:
    """The files of a corpus as a source; a plain .jsonl file is divided where needed, any other one is not."""
    files = [(name, path, path.stat().st_size) for name, path in corpus.files]
    total = sum(size for _, _, size in files)

    def pieces(index: int, count: int) -> list[Piece]:
        begin, end = total * index // count, total * (index + 1) // count
        found, first = [], 0
        for name, path, size in files:
            if divisible(path):
                start, stop = max(begin - first, 0), min(end - first, size)
                if start < stop:
                    read = functools.partial(read_documents, name, path, stop=stop)
                    found.append(Piece(read, start, stop - start, start))
            elif size and begin <= first < end:
                found.append(Piece(functools.partial(read_documents, name, path), 0, size, 0))
            first += size
        return found

    return Source(corpus.description, corpus.sha256, corpus.file_count, pieces)


def documents(pieces: list[Piece]) -> Iterator[Document]:
    """All documents of some pieces."""
    for piece in pieces:
        for item in piece.read(piece.start):
            yield item.document


def sample(source: Source, limit_bytes: int, parts: int = 64) -> Iterator[Document]:
    """Documents of the whole source, or from its beginning and further places where it is too long.

    Args:
      source: Where they come from.
      limit_bytes: A source of this size on the disk or less is given whole. From a larger one come, of each of
        `parts` parts, the first documents with limit_bytes / parts bytes of text.
      parts: Places.
    """
    whole = source.pieces(0, 1)
    if sum(piece.n_bytes for piece in whole) <= limit_bytes:
        yield from documents(whole)
        return
    for index in range(parts):
        spent = 0
        for document in documents(source.pieces(index, parts)):
            yield document
            spent += len(document.text.encode())
            if spent >= limit_bytes // parts:
                break
