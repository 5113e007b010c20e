"""Corpora, tokenizers, token files and batches, and the Bigram-Backcopy task.

`open_dataset` goes from a config to tokens, `TokenBatches` from tokens to batches; `prepare` writes token files from
text of any size. `tokenizers`, `grain`, `datasets` and `tensorflow_datasets` are imported only when they are used.
"""

from orthojax.data.batches import TokenBatches, open_dataset
from orthojax.data.bigram_backcopy import BigramBackcopy, default_text, open_task
from orthojax.data.preparation import Part, prepare, repeat_passages, text_parts, tfds_parts
from orthojax.data.sources import embedded_corpus, text_corpus
from orthojax.data.token_files import TokenFile, open_token_file
from orthojax.data.tokenizers import load_tokenizer, make_tokenizer

__all__ = [
    "BigramBackcopy",
    "Part",
    "TokenBatches",
    "TokenFile",
    "default_text",
    "embedded_corpus",
    "load_tokenizer",
    "make_tokenizer",
    "open_dataset",
    "open_task",
    "open_token_file",
    "prepare",
    "repeat_passages",
    "text_corpus",
    "text_parts",
    "tfds_parts",
]
