"""From texts to the ids of a token file, in batches of bounded size."""

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from orthojax.data.tokenizers import Tokenizer

T = TypeVar("T")
_BATCH_CHARACTERS = 1 << 20  # so much text is tokenised at once, which bounds memory and paces the progress
_LONGEST_TEXT = 1 << 22  # characters; a longer document is tokenised in pieces


def token_dtype(vocab_size: int) -> np.dtype:
    """The little-endian integers that hold every id of a vocabulary."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[np.ndarray, int]:
    """The ids of some documents, one after the other, as they stand in a token file.

    Args:
      tokenizer: Gives the ids.
      texts: The documents. One of more than 4 million characters is tokenised in pieces that end with a line, so that
        memory is bounded; only there may its ids differ from those of the whole.

    Returns:
      uint16 or uint32 [n], end-of-text ids included, and the UTF-8 bytes of the texts.
    """
    pieces = [piece for text in texts for piece in _cut(text)]
    rows = tokenizer.encode_batch([piece for piece, _ in pieces])
    end, dtype = np.array([tokenizer.eos_id], np.int32), token_dtype(tokenizer.vocab_size)
    parts = [part for row, (_, last) in zip(rows, pieces, strict=True) for part in ((row, end) if last else (row,))]
    return np.concatenate(parts).astype(dtype), sum(len(text.encode()) for text in texts)


def _cut(text: str) -> Iterator[tuple[str, bool]]:
    """The pieces of a document, and whether each is the last one."""
    begin = 0
    while len(text) - begin > _LONGEST_TEXT:
        end = text.rfind("\n", begin, begin + _LONGEST_TEXT) + 1 or begin + _LONGEST_TEXT
        yield text[begin:end], False
        begin = end
    yield text[begin:], True


def batches(
    items: Iterable[T], text: Callable[[T], str], key: Callable[[T], Any] = lambda _: None
) -> Iterator[list[T]]:
    """Groups items so that each group has about a million characters of text, and all of it the same key."""
    groups: dict[Any, list[T]] = {}
    characters: collections.Counter[Any] = collections.Counter()
    for item in items:
        name = key(item)
        groups.setdefault(name, []).append(item)
        characters[name] += len(text(item))
        if characters[name] >= _BATCH_CHARACTERS:
            yield groups.pop(name)
            del characters[name]
    yield from groups.values()
