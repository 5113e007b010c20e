"""What attention on the first token would be by chance: the lines that every figure of attention has."""

from collections.abc import Iterable, Mapping

import numpy as np

from orthojax.analysis import chance_of_first
from orthojax.config import Config
from orthojax.experiments.results import Result

Lines = Mapping[str, float]  # what a horizontal line means -> where it is

_BY_CHANCE = ("first_attention_fraction", "first_attention_share")  # of any normalizer
_SINKS = ("sink_attention", "sink_attention_rest")  # of Bigram-Backcopy: on all BOS tokens together
_MASSES = ("first_attention_mass", *_SINKS)


def chance_lines(metric: str, config: Config | None) -> Lines:
    """The lines of one metric of one model: none for other metrics than attention on the first token.

    Args:
      metric: A name in results, that of one layer too.
      config: Of the model.
    """
    name = metric.partition("/")[0]
    if config is None or config.model.relaxed_causal_tokens > 1 or name not in (*_BY_CHANCE, *_MASSES):
        return {}
    T, normalizer, window = config.data.sequence_length, config.model.normalizer, config.model.attention_window
    tokens = f"{T} tokens" if window is None or window >= T else f"{T} tokens, windows of {window}"
    if name in _BY_CHANCE:
        return {f"by chance, {tokens}": chance_of_first(T, window=window)}
    if normalizer not in ("softmax", "softmax1"):
        return {}
    softmax1 = normalizer == "softmax1"
    words = f"equal logits, {'softmax-1, ' if softmax1 else ''}{tokens}"
    if name not in _SINKS:
        return {words: chance_of_first(T, softmax1=softmax1, window=window)}
    # Over all queries: those that are no triggers, which these metrics read, are earlier in the mean by a little.
    first = max(1, config.data.bos_tokens)
    t = np.arange(first if name == "sink_attention_rest" else 0, T)  # the rows of BOS itself are left out
    return {words: float(np.mean(np.minimum(first, t + 1) / (t + 1 + softmax1)))}


def all_chance_lines(metric: str, results: Iterable[Result]) -> Lines:
    """The lines of one metric of all models in a figure."""
    return {words: value for result in results for words, value in chance_lines(metric, result.config).items()}


def chance_of_late(T: float) -> float:
    """Mean weight on any earlier key over the queries of the second half of T tokens, if all logits were equal.

    >>> round(chance_of_late(64), 3)
    0.021
    """
    return float(np.mean(1 / np.arange(int(T) // 2 + 1, int(T) + 1)))
