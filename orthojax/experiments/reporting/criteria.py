"""What criteria of claims refer to: what no dominance and no outliers look like."""

import math

import numpy as np

GAUSSIAN = 3.0  # kurtosis of one
# A mean kurtosis over layers above the first is called outliers, below the second none.
OUTLIERS, NO_OUTLIERS = 4.0, 3.5
# The first token dominates where it has this many times what `chance_of_first` gives it.
DOMINANCE = 2.0
# A perplexity that is at most this fraction above another equals it.
EQUAL_PERPLEXITY = 0.01


def chance_of_first(length: int, *, softmax1: bool = False) -> float:
    """Mean weight on key 0 over the queries of a causal row, if all logits were 0: H_T / T with softmax.

    Query t of T = `length`, from 1, sees t keys, so softmax gives each 1/t and softmax-1 1/(t + 1). The former is also
    the share of queries whose largest weight is key 0 where each prefers one of its keys by chance.

    Args:
      length: T, tokens of a sequence.
      softmax1: Whether the weights are those of softmax-1.

    >>> chance_of_first(2), round(chance_of_first(2, softmax1=True), 4)
    (0.75, 0.4167)
    """
    return float(np.mean(1.0 / (np.arange(1, length + 1) + softmax1)))


def gaussian_kurtosis_limit(d_model: int) -> float:
    """Kurtosis that D independent Gaussian values hardly exceed: 3 + 3 sqrt(24 / D), three standard deviations.

    The variance of the sample kurtosis of n Gaussian values is 24 / n for large n. At position 0, where every sequence
    may have the same token, a layer has one such vector, so its kurtosis is not 3 even where nothing sticks out.

    Args:
      d_model: D.

    >>> gaussian_kurtosis_limit(96)
    4.5
    """
    return GAUSSIAN + 3 * math.sqrt(24 / d_model)
