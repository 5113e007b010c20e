"""Objectives besides the next token: rows whose tokens are masked, or cut out in spans, as functions of seed and row.

A corrupted row of T positions is int32 [2 T]: inputs, then the target of each position, -1 if it does not count. Of the
V ids of the model the last, V - 1, is the mask, or ends the prefix of a row with spans; the ids before it, downwards,
are the sentinels of the spans.
"""

import dataclasses
from typing import Literal

import numpy as np

SHARE = 0.15  # of the tokens are predicted, in BERT and in T5
SPAN = 3.0  # mean length of T5's spans


def span_sizes(length: int) -> tuple[int, int, int]:
    """Returns for rows of T = `length`: tokens of text with the begin token, how many are cut out, in how many spans.

    The number of spans is fixed, as in T5's code, so that rows have no padding.

    >>> span_sizes(64)
    (57, 9, 3)
    """
    # spans = 0.15 text / 3 and text = T - 1 - 2 spans.
    spans = max(1, round((length - 1) / (SPAN / SHARE + 2)))
    text = length - 1 - 2 * spans
    return text, max(spans, round(SHARE * text)), spans


def mask_tokens(tokens: np.ndarray, random: np.random.Generator, vocab_size: int, text_ids: int) -> np.ndarray:
    """Masks 15% (rounded) of int [T] tokens except the first: int32 [2 T].

    Of the chosen tokens, the targets, 80% become the mask, 10% any id below `text_ids`, and 10% stay (BERT, `arXiv
    1810.04805 <https://arxiv.org/abs/1810.04805>`_, section 3.1).

    >>> mask_tokens(np.arange(10, 18), np.random.default_rng(0), 100, 90).tolist()
    [10, 11, 12, 13, 14, 15, 99, 17, -1, -1, -1, -1, -1, -1, 16, -1]
    """
    T = len(tokens)
    chosen = 1 + random.choice(T - 1, max(1, round(SHARE * T)), replace=False)
    inputs, targets = np.array(tokens, np.int32), np.full(T, -1, np.int32)
    targets[chosen] = inputs[chosen]
    kind, others = random.random(len(chosen)), random.integers(0, text_ids, len(chosen))
    inputs[chosen] = np.where(kind < 0.8, vocab_size - 1, np.where(kind < 0.9, others, inputs[chosen]))
    return np.concatenate([inputs, targets])


def cut_spans(tokens: np.ndarray, random: np.random.Generator, vocab_size: int, length: int) -> np.ndarray:
    """Cuts spans out of tokens, but never the first, and makes them the targets: int32 [2 T].

    The row is text, sentinel 0, text, sentinel 1, ..., V - 1; then the targets, sentinel 0, span 0, sentinel 1, span 1,
    ..., and one more sentinel, as in Figure 2 of T5 (`arXiv 1910.10683 <https://arxiv.org/abs/1910.10683>`_). Sentinel
    i is V - 2 - i; text and spans alternate, and all ways to cut each of them are equally likely.

    >>> cut_spans(np.arange(10, 15), np.random.default_rng(0), 100, 8).tolist()
    [10, 11, 12, 13, 98, 99, 98, 14, -1, -1, -1, -1, -1, 98, 14, 97]
    """

    def sizes(total: int, parts: int) -> np.ndarray:
        ends = np.sort(random.choice(total - 1, parts - 1, replace=False)) + 1
        return np.diff(np.concatenate([[0], ends, [total]])).astype(int)

    n, noise, spans = span_sizes(length)
    kept, cut = (sizes(total, spans) for total in (n - noise, noise))
    pieces = np.split(np.asarray(tokens, np.int32), np.cumsum(np.stack([kept, cut], axis=1).ravel())[:-1])
    sentinels = np.array(vocab_size - 2 - np.arange(spans + 1), np.int32)[:, None]
    text = [ids for i, piece in enumerate(pieces[::2]) for ids in (piece, sentinels[i])]
    asked = [ids for i, piece in enumerate(pieces[1::2]) for ids in (sentinels[i], piece)]
    row = np.concatenate([*text, [vocab_size - 1], *asked, sentinels[-1]]).astype(np.int32)
    inputs, targets = row[:-1], row[1:].copy()
    targets[: n - noise + spans] = -1  # V - 1 is the first to predict
    return np.concatenate([inputs, targets])


@dataclasses.dataclass(frozen=True)
class Corruption:
    """Makes the rows of an objective from rows of text; `text_length` tokens of text make a row."""

    objective: Literal["masked", "span_corruption"]
    length: int  # T
    vocab_size: int  # V
    text_ids: int  # ids below this are text

    @property
    def text_length(self) -> int:
        """The number of text tokens, begin token included, in a row."""
        return self.length if self.objective == "masked" else span_sizes(self.length)[0]

    @property
    def needed_ids(self) -> int:
        """The number of ids that the text and the objective itself need."""
        return self.text_ids + (1 if self.objective == "masked" else span_sizes(self.length)[2] + 2)

    def __call__(self, rows: np.ndarray, key: tuple[int, ...], start: int = 0) -> np.ndarray:
        """Corrupts int32 [B, text_length]; row start + i depends on only the key, start + i and its tokens."""
        draws = [np.random.default_rng((*key, start + i)) for i in range(len(rows))]
        pairs = zip(rows, draws, strict=True)
        if self.objective == "masked":
            return np.stack([mask_tokens(row, random, self.vocab_size, self.text_ids) for row, random in pairs])
        return np.stack([cut_spans(row, random, self.vocab_size, self.length) for row, random in pairs])
