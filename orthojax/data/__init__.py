"""Where tokens come from: corpora, tokenizers, token files, batches, and the Bigram-Backcopy task.

`open_dataset` goes from a config to tokens, `TokenBatches` from tokens to batches; `prepare` writes token files from
text of any size. Only NumPy is imported at once, and `jax`, `tokenizers`, `grain` and `tensorflow_datasets` only where
they are used.
"""

from orthojax.data.bigram_backcopy import BigramBackcopy as BigramBackcopy
from orthojax.data.bigram_backcopy import default_text as default_text
from orthojax.data.datasets import TokenBatches as TokenBatches
from orthojax.data.datasets import open_dataset as open_dataset
from orthojax.data.datasets import open_task as open_task
from orthojax.data.documents import embedded_corpus as embedded_corpus
from orthojax.data.documents import text_corpus as text_corpus
from orthojax.data.passages import repeat_passages as repeat_passages
from orthojax.data.preparation import Part as Part
from orthojax.data.preparation import prepare as prepare
from orthojax.data.preparation import renamed as renamed
from orthojax.data.preparation import require_usable as require_usable
from orthojax.data.preparation import text_parts as text_parts
from orthojax.data.preparation import tfds_parts as tfds_parts
from orthojax.data.records import masked_crc32c as masked_crc32c
from orthojax.data.token_files import TokenFile as TokenFile
from orthojax.data.token_files import Tokens as Tokens
from orthojax.data.token_files import open_token_files as open_token_files
from orthojax.data.tokenizers import load_tokenizer as load_tokenizer
from orthojax.data.tokenizers import make_tokenizer as make_tokenizer
