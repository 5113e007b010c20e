"""Corpora, tokenizers, token files and batches, and the Bigram-Backcopy task.

`open_dataset` goes from a config to tokens, `TokenBatches` from tokens to batches; `prepare` writes token files from
text of any size. The names of the task import JAX, and resolve on first use; the others import NumPy alone, and
`tokenizers`, `grain`, `datasets` and `tensorflow_datasets` only when they are used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from orthojax.data.batches import TokenBatches, open_dataset
from orthojax.data.preparation import Part, prepare, repeat_passages, require_usable, text_parts, tfds_parts
from orthojax.data.sources import embedded_corpus, text_corpus
from orthojax.data.token_files import TokenFile, Tokens, open_token_files
from orthojax.data.tokenizers import load_tokenizer, make_tokenizer

if TYPE_CHECKING:
    from orthojax.data.bigram_backcopy import BigramBackcopy, default_text, open_task

_OF_THE_TASK = ("BigramBackcopy", "default_text", "open_task")

__all__ = [
    "BigramBackcopy",
    "Part",
    "TokenBatches",
    "TokenFile",
    "Tokens",
    "default_text",
    "embedded_corpus",
    "load_tokenizer",
    "make_tokenizer",
    "open_dataset",
    "open_task",
    "open_token_files",
    "prepare",
    "repeat_passages",
    "require_usable",
    "text_corpus",
    "text_parts",
    "tfds_parts",
]


def __getattr__(name: str) -> Any:
    if name in _OF_THE_TASK:
        return getattr(importlib.import_module("orthojax.data.bigram_backcopy"), name)
    raise AttributeError(f"module 'orthojax.data' has no attribute {name!r}")
