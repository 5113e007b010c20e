"""Outlier channels: norms and second moments of a kernel's output channels, and activations in another basis.

From Attention to Activation (arXiv 2410.17174), appendix E with Figures 4 and 5, appendix F with Figure 6. Legend: I
input features, D output channels, T positions. On the host, in float64: these are quantities of a finished run.
"""

import warnings
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

# Iglewicz and Hoaglin (How to Detect and Handle Outliers, 1993) take 3.5 for one sample; a model has thousands of
# channels, of which Gaussian chance brings 1 in 4,300 beyond that, and 1 in 3.5 million beyond this.
OUTLIER_SCORE = 5.0


def top_count(size: int) -> int:
    """Returns the number of D channels that count as the top ones: a thirty-second, one at least.

    >>> [top_count(D) for D in (16, 96, 768)]
    [1, 3, 24]
    """
    return max(1, size // 32)


def channel_norms(kernel: ArrayLike) -> np.ndarray:
    """The Euclidean norm of the weights of each output channel, sqrt(sum_i W[i, d]^2): [..., I, D] -> [..., D]."""
    return np.linalg.norm(np.asarray(kernel, np.float64), axis=-2)


def summed_second_moments(nu: ArrayLike) -> np.ndarray:
    """Adam's second moments of a kernel, summed over each output channel, sum_i nu[i, d]: [..., I, D] -> [..., D].

    Without bias correction, which is one factor for all.

    Raises:
      ValueError: For negative numbers.
    """
    nu = np.asarray(nu, np.float64)
    if (nu < 0).any():
        raise ValueError("second moments are negative; allowed: nu, not mu")
    return np.sum(nu, axis=-2)


def outlier_scores(values: ArrayLike) -> np.ndarray:
    """Modified z-scores of the logarithms: 0.6745 (log x - median) / MAD, positive for large values.

    MAD is the median of |log x - median|, 0.6745 the MAD of a standard Gaussian; what is beyond `OUTLIER_SCORE` counts
    as an outlier. Logarithms, because norms and moments are positive and differ by factors.

    Args:
      values: [..., D], positive; zeros count as the smallest positive number.

    Returns:
      [..., D] float64; 0 for a value at the median, infinite for another one where MAD is 0.

    Raises:
      ValueError: For negative values.
    """
    values = np.asarray(values, np.float64)
    if (values < 0).any():
        raise ValueError("the values are negative; allowed: norms or moments")
    logs = np.log(np.maximum(values, np.finfo(np.float64).tiny))
    away = logs - np.median(logs, axis=-1, keepdims=True)
    deviation = np.median(np.abs(away), axis=-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(away == 0.0, 0.0, 0.6745 * away / deviation)


def correlation(a: ArrayLike, b: ArrayLike) -> float:
    """Pearson's correlation of [D] and [D]; nan where all of one are equal. Other shapes are a ValueError.

    >>> round(correlation([1.0, 2.0, 3.0], [5.0, 3.0, 1.0]), 9)
    -1.0
    """
    return _correlated("pearsonr", a, b)


def rank_correlation(a: ArrayLike, b: ArrayLike) -> float:
    """Spearman's rank correlation of [D] and [D], ties sharing their mean rank; nan where all of one are equal.

    Other shapes are a ValueError.

    >>> rank_correlation([1.0, 2.0, 30.0], [-1.0, -5.0, -6.0])
    -1.0
    """
    return _correlated("spearmanr", a, b)


def _correlated(function: str, a: ArrayLike, b: ArrayLike) -> float:
    from scipy import stats  # here, because it takes a second to import

    _require_vectors(a, b)
    with warnings.catch_warnings(action="ignore", category=stats.ConstantInputWarning):
        found: Any = getattr(stats, function)(np.asarray(a, np.float64), np.asarray(b, np.float64))
    return float(found.statistic)


def _require_vectors(a: ArrayLike, b: ArrayLike) -> int:
    """Returns their length; ValueError unless they are two vectors of equal length."""
    if np.ndim(a) != 1 or np.shape(a) != np.shape(b):
        raise ValueError(f"arrays of shapes {np.shape(a)} and {np.shape(b)}; allowed: [D] and [D]")
    return np.size(a)


def extreme_overlap(large: ArrayLike, small: ArrayLike, count: int) -> float:
    """Share of the `count` channels with the largest `large` that are among the `count` with the smallest `small`.

    If the two are independent, it is count / D in the mean.

    Args:
      large: [D].
      small: [D].
      count: 1 to D; of equal values the earlier channels are taken.

    Raises:
      ValueError: For other shapes or counts.

    >>> extreme_overlap([9.0, 1.0, 8.0, 2.0], [0.1, 0.2, 5.0, 6.0], 2)
    0.5
    """
    if not 1 <= count <= _require_vectors(large, small):
        raise ValueError(f"count={count}; allowed: 1 to {np.size(large)}")
    top = np.argsort(-np.asarray(large, np.float64), kind="stable")[:count]
    bottom = np.argsort(np.asarray(small, np.float64), kind="stable")[:count]
    return len(np.intersect1d(top, bottom)) / count


def in_singular_basis(x: ArrayLike) -> np.ndarray:
    """X V for every sequence, with V [D, D] the right singular vectors of its X [T, D]; on the host.

    The paper's measure of how large an orthogonal change of basis could make the kurtosis: V gathers the energy of a
    sequence in as few channels as an orthonormal basis can. X V = U S, so the channels beyond min(T, D) are 0, whatever
    V has there; they count as channels. The signs of singular vectors are arbitrary, which moves kurtosis a
    little.

    Args:
      x: [..., T, D].

    Returns:
      [..., T, D] float64; channels in the order of their singular values, the largest first.
    """
    # In NumPy, since several batched decompositions in one program can wait for each other forever on a CPU.
    x = np.asarray(x, np.float64)
    T, D = x.shape[-2:]
    # From the eigenvectors of the smaller Gram matrix, which is several times faster than the decomposition itself.
    if T >= D:
        _, right = np.linalg.eigh(x.swapaxes(-1, -2) @ x)
        return (x @ right)[..., ::-1]
    squares, left = np.linalg.eigh(x @ x.swapaxes(-1, -2))
    rotated = (left * np.sqrt(np.maximum(squares, 0.0))[..., None, :])[..., ::-1]
    return np.concatenate([rotated, np.zeros((*rotated.shape[:-1], D - T))], axis=-1)
