"""The tokens as values."""

import dataclasses
from typing import Literal

from orthojax.config.checks import require
from orthojax.config.fields import added, check_types


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where tokens come from.

    Attributes:
      kind: `embedded` is Python's own standard library, `text` reads the text or jsonl files in `paths`, `tokens` a
        train and a validation token file made by launch/prepare_data.py, `bigram_backcopy` is the synthetic task.
      paths: Of `text`, files, folders and patterns (any number); of `tokens` two: the train and the validation file,
        each either there or, under the same name, in shards that --shard=i/n of launch/prepare_data.py made.
      tokenizer: `bytes`, `bpe:N` (trained on the corpus, N ids) or the path of a tokenizer: a tokenizer.json, GPT-2's
        vocab.json beside its merges.txt, a sentencepiece .model or the token ranks of Llama 3. Of `tokens`, what the
        files have to be made with, where it is not the default.
      sequence_length: Input positions of one row.
      bos: Start every row with the beginning-of-sequence token.
      seed: Seed of the order of the rows.
      trigger_count: Bigram-Backcopy: the k most frequent characters are triggers.
      verify: Compare the sha256 of all token files when they are opened, which reads them whole; otherwise, of files of
        more than 256 MB together, their sizes and a few blocks of each are compared.
    """

    kind: Literal["embedded", "text", "tokens", "bigram_backcopy"] = "embedded"
    paths: tuple[str, ...] = ()
    tokenizer: str = "bpe:2048"
    sequence_length: int = 64
    bos: bool = False
    seed: int = 0
    trigger_count: int = 3
    verify: bool = added(False, affects="nothing")

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
