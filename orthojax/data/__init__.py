"""Corpora, tokenizers, token files and batches, and the Bigram-Backcopy task.

`open_dataset` goes from a config to tokens, `TokenBatches` from tokens to batches; `prepare` writes token files from
text of any size. `tokenizers`, `grain`, `datasets` and `tensorflow_datasets` are imported only when they are used.
"""

from orthojax.data.batches import PackedBatches as PackedBatches
from orthojax.data.batches import TokenBatches as TokenBatches
from orthojax.data.batches import open_dataset as open_dataset
from orthojax.data.bigram_backcopy import BigramBackcopy as BigramBackcopy
from orthojax.data.bigram_backcopy import default_text as default_text
from orthojax.data.bigram_backcopy import open_task as open_task
from orthojax.data.preparation import Part as Part
from orthojax.data.preparation import prepare as prepare
from orthojax.data.preparation import repeat_passages as repeat_passages
from orthojax.data.preparation import text_parts as text_parts
from orthojax.data.preparation import tfds_parts as tfds_parts
from orthojax.data.sources import embedded_corpus as embedded_corpus
from orthojax.data.sources import text_corpus as text_corpus
from orthojax.data.token_files import TokenFile as TokenFile
from orthojax.data.token_files import open_token_file as open_token_file
from orthojax.data.tokenizers import load_tokenizer as load_tokenizer
from orthojax.data.tokenizers import make_tokenizer as make_tokenizer
