"""Which part of a text is set aside for validation: a rule, found once, that holds for each document alone."""

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from typing import Literal

from orthojax.data.text_files import Document

Split = Literal["train", "validation", "all"]
_TEXTS_FOR_THE_RULE = 4096


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
    """The rule for the user's text, wherever the files lie.

    The tenth of the texts (rounded down) whose sha256 is smallest is set aside; equal texts count once and go the same
    way, so none is on both sides. Of text without end that tenth is known well enough, to half a percent of the whole,
    from its first 4,096 different texts, in the order of the files: no more is read. With fewer than 20 different texts
    it is the last tenth of the characters of each document.

    >>> hold_out_by_text([Document("a", "0123456789" * 2)]).rule
    'end'
    """
    numbers: set[int] = set()
    for document in documents:
        numbers.add(_number(document.text))
        if len(numbers) == _TEXTS_FOR_THE_RULE:
            break
    if len(numbers) < 20:
        return HoldOut("end")
    return HoldOut("text", sorted(numbers)[len(numbers) // 10 - 1])


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
