"""The tokens as values."""

import dataclasses
from typing import Literal

from orthojax.config.checks import require
from orthojax.fields import check_types


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where tokens come from.

    Attributes:
      kind: `embedded` is Python's own standard library, `text` reads the text or jsonl files in `paths`, `tokens` a
        train and a validation token file made by launch/prepare_data.py, `bigram_backcopy` is the synthetic task.
      paths: Files of `text` (any number) or `tokens` (two: train, validation).
      tokenizer: `bytes`, `bpe:N` (trained on the corpus, N ids) or the path of a tokenizer.json.
      sequence_length: Input positions of one row.
      bos: Start every row with the beginning-of-sequence token.
      seed: Seed of the order of the rows.
      trigger_count: Bigram-Backcopy: the k most frequent characters are triggers.
    """

    kind: Literal["embedded", "text", "tokens", "bigram_backcopy"] = "embedded"
    paths: tuple[str, ...] = ()
    tokenizer: str = "bpe:2048"
    sequence_length: int = 64
    bos: bool = False
    seed: int = 0
    trigger_count: int = 3

    def __post_init__(self):
        check_types(self, "data")
        require(self.sequence_length >= 2, f"data.sequence_length={self.sequence_length}", "at least 2")
        require(self.trigger_count >= 1, f"data.trigger_count={self.trigger_count}", "at least 1")
        require(0 <= self.seed < 2**32, f"data.seed={self.seed}", "0 to 2**32 - 1")
        if self.kind == "text":
            require(len(self.paths) > 0, "data.kind='text' without files", "data.paths=FILE[,FILE...]")
        elif self.kind == "tokens":
            require(
                len(self.paths) == 2,
                f"data.kind='tokens' with {len(self.paths)} files",
                "data.paths=TRAIN.bin,VALIDATION.bin",
            )
        else:
            require(
                not self.paths,
                f"data.paths={self.paths} is not read by data.kind={self.kind!r}",
                "kind 'text' or 'tokens'",
            )
