"""What attention on the first token would be by chance: the lines that every figure of attention has."""

from collections.abc import Iterable, Mapping

import numpy as np

from orthojax.analysis import chance_of_first
from orthojax.config import Config
from orthojax.experiments.results import Result

Lines = Mapping[str, float]  # what a horizontal line means -> where it is

_BY_CHANCE = ("first_attention_fraction", "first_attention_share")  # of any normalizer
_MASSES = ("first_attention_mass", "sink_attention", "sink_attention_rest")


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
    mass = chance_of_first(T, softmax1=softmax1, window=window)
    if name == "sink_attention_rest":  # the row of the first token itself is left out
        mass = (T * mass - 1 / (1 + softmax1)) / (T - 1)
    return {f"equal logits, {'softmax-1, ' if softmax1 else ''}{tokens}": mass}


def all_chance_lines(metric: str, results: Iterable[Result]) -> Lines:
    """The lines of one metric of all models in a figure."""
    return {words: value for result in results for words, value in chance_lines(metric, result.config).items()}


def chance_of_late(T: float) -> float:
    """Mean weight on any earlier key over the queries of the second half of T tokens, if all logits were equal.

    >>> round(chance_of_late(64), 3)
    0.021
    """
    return float(np.mean(1 / np.arange(int(T) // 2 + 1, int(T) + 1)))
