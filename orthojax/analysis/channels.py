"""Output channels of a kernel: their norms, their second moments, and whether the outliers of both are the same.

From Attention to Activation (arXiv 2410.17174), appendix E, Figures 4 and 5. Legend: I input features, D output
channels. On the host, in float64: these are quantities of a finished run, not of a step.
"""

import numpy as np
from numpy.typing import ArrayLike

# Iglewicz and Hoaglin (How to Detect and Handle Outliers, 1993) take 3.5 for one sample; a model has thousands of
# channels, of which Gaussian chance brings 1 in 4,300 beyond that, and 1 in 3.5 million beyond this.
OUTLIER_SCORE = 5.0


def top_count(size: int) -> int:
    """How many of D channels count as the top ones: a thirty-second, one at least.

    >>> [top_count(D) for D in (16, 96, 768)]
    [1, 3, 24]
    """
    return max(1, size // 32)


def channel_norms(kernel: ArrayLike) -> np.ndarray:
    """The Euclidean norm of the weights of each output channel, sqrt(sum_i W[i, d]^2).

    Args:
      kernel: [..., I, D].

    Returns:
      [..., D] float64.
    """
    return np.linalg.norm(np.asarray(kernel, np.float64), axis=-2)


def summed_second_moments(nu: ArrayLike) -> np.ndarray:
    """The second moments of a kernel's gradient, summed over the weights of each output channel, sum_i nu[i, d].

    Args:
      nu: Adam's second moments, [..., I, D], without bias correction, which is one factor for all.

    Returns:
      [..., D] float64.
    """
    return np.sum(np.asarray(nu, np.float64), axis=-2)


def outlier_scores(values: ArrayLike) -> np.ndarray:
    """Modified z-scores of the logarithms: 0.6745 (log x - median) / MAD, positive for large values.

    MAD is the median of |log x - median|, 0.6745 the MAD of a standard Gaussian; what is beyond `OUTLIER_SCORE` counts
    as an outlier. Logarithms, because norms and moments are positive and differ by factors.

    Args:
      values: [..., D], positive; zeros count as the smallest positive number.

    Returns:
      [..., D] float64; 0 for a value at the median, infinite for another one where MAD is 0.
    """
    logs = np.log(np.maximum(np.asarray(values, np.float64), np.finfo(np.float64).tiny))
    away = logs - np.median(logs, axis=-1, keepdims=True)
    deviation = np.median(np.abs(away), axis=-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(away == 0.0, 0.0, 0.6745 * away / deviation)


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1, ties sharing their mean."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[which.reshape(values.shape)]


def rank_correlation(a: ArrayLike, b: ArrayLike) -> float:
    """Spearman's rank correlation: Pearson's of the ranks, ties sharing their mean rank.

    Args:
      a: [D].
      b: [D].

    Returns:
      -1 to 1; nan where all values of one are equal.

    >>> rank_correlation([1.0, 2.0, 30.0], [-1.0, -5.0, -6.0])
    -1.0
    """
    ranks = [_ranks(np.asarray(values, np.float64)) for values in (a, b)]
    centred = [rank - rank.mean() for rank in ranks]
    scale = np.sqrt(np.prod([np.sum(rank**2) for rank in centred]))
    return float(np.sum(centred[0] * centred[1]) / scale) if scale else float("nan")


def extreme_overlap(large: ArrayLike, small: ArrayLike, count: int) -> float:
    """Which share of the `count` channels where `large` is largest are among the `count` where `small` is smallest.

    Where the two know nothing of each other it is count / D in the mean.

    Args:
      large: [D].
      small: [D].
      count: 1 to D; of equal values the earlier channels are taken.

    >>> extreme_overlap([9.0, 1.0, 8.0, 2.0], [0.1, 0.2, 5.0, 6.0], 2)
    0.5
    """
    top = np.argsort(-np.asarray(large, np.float64), kind="stable")[:count]
    bottom = np.argsort(np.asarray(small, np.float64), kind="stable")[:count]
    return len(np.intersect1d(top, bottom)) / count
