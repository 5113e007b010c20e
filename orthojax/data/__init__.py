"""Where tokens come from: corpora, tokenizers, token files, batches, and the Bigram-Backcopy task.

`open_dataset` goes from a config to tokens, `TokenBatches` from tokens to batches; `prepare` writes token files from
text of any size. Only NumPy is imported at once, and `jax`, `tokenizers`, `grain` and `tensorflow_datasets` only where
they are used.
"""

from orthojax.data.bigram_backcopy import BigramBackcopy, default_text
from orthojax.data.datasets import TokenBatches, open_dataset, open_task
from orthojax.data.documents import embedded_corpus, text_corpus
from orthojax.data.passages import repeat_passages
from orthojax.data.preparation import Part, prepare, renamed, require_usable, text_parts, tfds_parts
from orthojax.data.records import masked_crc32c
from orthojax.data.token_files import TokenFile, Tokens, open_token_files
from orthojax.data.tokenizers import load_tokenizer, make_tokenizer

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
    "masked_crc32c",
    "open_dataset",
    "open_task",
    "open_token_files",
    "prepare",
    "renamed",
    "repeat_passages",
    "require_usable",
    "text_corpus",
    "text_parts",
    "tfds_parts",
]
