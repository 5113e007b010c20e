"""What no dominance and no outlier look like: the lines that criteria of claims refer to."""

import math


def chance_of_first(length: int) -> float:
    """Share of queries whose largest weight is key 0 where each picks one of its visible keys by chance: H_T / T.

    It is also the mean weight on key 0 of uniform attention, as query t sees t + 1 keys.

    Args:
      length: T, tokens of a sequence.

    >>> chance_of_first(2)
    0.75
    """
    return sum(1 / (t + 1) for t in range(length)) / length


def gaussian_kurtosis_limit(d_model: int) -> float:
    """Kurtosis that D independent Gaussian values hardly exceed: 3 + 3 sqrt(24 / D), three standard deviations.

    The variance of the sample kurtosis of n Gaussian values is 24 / n for large n. At position 0, where every sequence
    may have the same token, a layer has one such vector, so its kurtosis is not 3 even where nothing sticks out.

    Args:
      d_model: D.

    >>> gaussian_kurtosis_limit(96)
    4.5
    """
    return 3 + 3 * math.sqrt(24 / d_model)
