"""Which part of a text is set aside for validation: a rule, found once, that holds for each document alone."""

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from orthojax.data.text_files import Document

Split = Literal["train", "validation", "all"]


@dataclasses.dataclass(frozen=True)
class HoldOut:
    """A rule that divides documents.

    Attributes:
      rule: `name` sets files aside by the sha256 of their names, `text` documents by the sha256 of their texts, and
        `end` the last tenth of the characters of each document.
      limit: Of `text`: the largest sha256 that is set aside, its first eight bytes as a number.
    """

    rule: Literal["name", "text", "end"]
    limit: int = 0

    def part(self, document: Document, split: Split) -> str:
        """What of a document belongs to a split; '' where nothing does."""
        if split == "all":
            return document.text
        if self.rule == "end":
            cut = len(document.text) - len(document.text) // 10
            return document.text[:cut] if split == "train" else document.text[cut:]
        if self.rule == "name":
            held_out = hashlib.sha256(document.name.encode("utf-8", "surrogateescape")).digest()[0] < 24
        else:
            held_out = _number(document.text) <= self.limit
        return document.text if held_out == (split == "validation") else ""


BY_NAME = HoldOut("name")
"""3 file names in 32, the same ones under every Python."""


def hold_out_by_text(documents: Iterable[Document]) -> HoldOut:
    """The rule for the user's text, wherever the files lie and whatever their names; it keeps 8 bytes a document.

    With 20 documents or more the tenth of them (rounded down) whose texts have the smallest sha256 is set aside; equal
    texts go the same way, so none is on both sides. With fewer documents, or where all are equal, it is the last tenth
    of the characters of each document.

    >>> hold_out_by_text([Document("a", "0123456789" * 2)]).rule
    'end'
    """
    numbers = np.fromiter((_number(document.text) for document in documents), np.uint64)
    if len(numbers) < 20:
        return HoldOut("end")
    tenth = len(numbers) // 10 - 1
    limit = int(np.partition(numbers, tenth)[tenth])
    return HoldOut("text", limit) if numbers.max() > limit else HoldOut("end")


def divide(documents: Sequence[Document], hold_out: HoldOut) -> tuple[list[Document], list[Document]]:
    """The train and the validation documents.

    >>> divide([Document("a", "0123456789")], HoldOut("end"))
    ([Document(name='a', text='012345678')], [Document(name='a', text='9')])
    """
    parts = [
        [Document(document.name, hold_out.part(document, split)) for document in documents]
        for split in ("train", "validation")
    ]
    train, validation = ([document for document in part if document.text] for part in parts)
    return train, validation


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
