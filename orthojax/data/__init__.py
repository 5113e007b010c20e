"""Where tokens come from: corpora, tokenizers, token files, batches, and the Bigram-Backcopy task.

`open_dataset` goes from a config to tokens, `TokenBatches` from tokens to batches; `prepare` writes token files from
text of any size. Only NumPy is imported at once: `tokenizers`, `grain` and `tensorflow_datasets` where they are used.
"""

from orthojax.data.bigram_backcopy import BigramBackcopy, default_text
from orthojax.data.datasets import Dataset, TokenBatches, open_dataset
from orthojax.data.documents import Document, Source, embedded_corpus, text_corpus
from orthojax.data.preparation import Part, prepare, renamed, require_usable, text_parts, tfds_parts
from orthojax.data.tfds import masked_crc32c
from orthojax.data.token_files import TokenFile, Tokens, open_token_file, open_token_files
from orthojax.data.tokenizers import Tokenizer, load_tokenizer, make_tokenizer, train_bpe

__all__ = [
    "BigramBackcopy",
    "Dataset",
    "Document",
    "Part",
    "Source",
    "TokenBatches",
    "TokenFile",
    "Tokenizer",
    "Tokens",
    "default_text",
    "embedded_corpus",
    "load_tokenizer",
    "make_tokenizer",
    "masked_crc32c",
    "open_dataset",
    "open_token_file",
    "open_token_files",
    "prepare",
    "renamed",
    "require_usable",
    "text_corpus",
    "text_parts",
    "tfds_parts",
    "train_bpe",
]
