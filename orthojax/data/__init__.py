"""Where tokens come from: corpora, tokenizers, token files, batches, and the Bigram-Backcopy task.

`open_dataset` in `datasets` goes from a config to tokens; `TokenBatches` in `batches` goes from tokens to batches.
Standard library and NumPy only, but for `tokenizers` and `grain`, which are imported where they are used.
"""
