"""Outliers of hidden states, and value-state drains. Legend: B batch, N query heads, T or S positions, D d_model.

Hidden states are block outputs after the second residual add, one array [B, T, D] for each layer; embeddings and the
final norm's output are not among them. `first` is position 0, `rest` are the positions >= 1 (so T >= 2), or only
those at which `where` [B, T] is True. Every function takes one layer, averages over sequences and returns a scalar, at
least float32. Arrays of another shape raise ValueError.
"""

import math
from statistics import NormalDist

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from orthojax.analysis.inputs import hidden_states
from orthojax.analysis.inputs import value_norms as norms_of_values
from orthojax.ops.statistics import at_least_float32, kurtosis, norm, norm_ratio


def _magnitude(hidden: ArrayLike) -> jax.Array:
    return jnp.max(jnp.abs(at_least_float32(hidden)), axis=-1)


def _mean_of_rest(x: jax.Array, where: ArrayLike | None) -> jax.Array:
    """Averages [B, T] over the positions >= 1 of `where`, then over sequences; 0 for a sequence without one."""
    if where is None:
        return jnp.mean(x[:, 1:])
    kept = jnp.asarray(where)[:, 1:]
    return jnp.mean(jnp.sum(jnp.where(kept, x[:, 1:], 0.0), axis=1) / jnp.maximum(jnp.sum(kept, axis=1), 1))


def _only(x: jax.Array, where: ArrayLike | None) -> jax.Array:
    """Sets positions [B, T] that do not count to 0, which is never a largest magnitude."""
    return x if where is None else jnp.where(jnp.asarray(where), x, 0.0)


def kurtosis_first(hidden: ArrayLike) -> jax.Array:
    """Kurtosis over channels at position 0, mean over sequences: E_b[kappa(x[b, 0])].

    Definition: raw, over channels, per layer and position (arXiv 2410.17174, Eq. 2 and Table 2).
    """
    return jnp.mean(kurtosis(hidden_states(hidden)[:, 0]))


def kurtosis_rest(hidden: ArrayLike, where: ArrayLike | None = None) -> jax.Array:
    """Kurtosis over channels, mean over positions >= 1 and sequences; see `kurtosis_first`."""
    return _mean_of_rest(kurtosis(hidden_states(hidden, at_least=2)), where)


def kurtosis_pooled(hidden: ArrayLike) -> jax.Array:
    """Kurtosis over channels, mean over all positions and sequences; see `kurtosis_first`."""
    return jnp.mean(kurtosis(hidden_states(hidden)))


def max_abs_first(hidden: ArrayLike) -> jax.Array:
    """Largest absolute activation at position 0, mean over sequences: E_b[max_d |x[b, 0, d]|].

    Definition: per sequence the max over channels, mean over sequences, then over layers (arXiv 2410.17174, Table 2).
    """
    return jnp.mean(_magnitude(hidden_states(hidden))[:, 0])


def max_abs_rest(hidden: ArrayLike, where: ArrayLike | None = None) -> jax.Array:
    """Largest absolute activation over positions >= 1, mean over sequences: E_b[max_{t >= 1, d} |x[b, t, d]|].

    Definition: per sequence the max over channels and over positions >= 1, mean over sequences; see `max_abs_first`.
    """
    return jnp.mean(jnp.max(_only(_magnitude(hidden_states(hidden, at_least=2)), where)[:, 1:], axis=1))


def max_abs_first_maximum(hidden: ArrayLike) -> jax.Array:
    """Largest absolute activation at position 0 over all sequences; grows with their number, so report both."""
    return jnp.max(_magnitude(hidden_states(hidden))[:, 0])


def max_abs_rest_maximum(hidden: ArrayLike, where: ArrayLike | None = None) -> jax.Array:
    """Largest absolute activation at positions >= 1 over all sequences; grows with their number, so report both."""
    return jnp.max(_only(_magnitude(hidden_states(hidden, at_least=2)), where)[:, 1:])


def norm_ratio_first(hidden: ArrayLike) -> jax.Array:
    """max|x| / ||x||_2 at position 0, mean over sequences, in [1 / sqrt(D), 1].

    Definition: max|x| / ||x||_2 per position (arXiv 2410.17174, section 4.2 and Appendix I.3).
    """
    return jnp.mean(norm_ratio(hidden_states(hidden)[:, 0]))


def norm_ratio_rest(hidden: ArrayLike, where: ArrayLike | None = None) -> jax.Array:
    """max|x| / ||x||_2, mean over positions >= 1 and sequences; see `norm_ratio_first`."""
    return _mean_of_rest(norm_ratio(hidden_states(hidden, at_least=2)), where)


def special_sums(hidden: ArrayLike, special: ArrayLike) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Sums the kurtosis and the largest |x| of later positions that `special` [B, T] marks, each with their number."""
    hidden, special = hidden_states(hidden, at_least=2)[:, 1:], jnp.asarray(special)[:, 1:]
    values = {"kurtosis_special": kurtosis(hidden), "max_abs_special": _magnitude(hidden)}
    count = jnp.sum(special, dtype=jnp.int32)
    return {name: (jnp.sum(jnp.where(special, x, 0.0)), count) for name, x in values.items()}


def osp_kurtosis(hidden: ArrayLike) -> jax.Array:
    """Excess kurtosis of Outlier-Safe Pre-Training, mean over tokens: E[max(0, mean(x^4) / std(x)^4 - 3)].

    Definition: over channels, with the mean subtracted for the standard deviation (D - 1 degrees of freedom) but not
    for the fourth moment, as the evaluation of Outlier-Safe Pre-Training (arXiv 2506.19697) computes it. So an offset
    counts: Gaussian channels of deviation 1 get near 0 with mean 0, and 40 with mean 2. The paper's number is the mean
    over the embeddings and the outputs of all blocks, as in `observe_predictors`. Definition here: a constant vector
    gets 0, as in `kurtosis`.

    >>> import jax.numpy as jnp
    >>> round(float(osp_kurtosis(jnp.array([[[7.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]]))), 4)  # D - 3
    5.0
    """
    x = at_least_float32(hidden_states(hidden))
    # Fourth powers of outliers overflow long before the outliers do; the ratio does not depend on a factor.
    x /= jnp.maximum(jnp.max(jnp.abs(x), -1, keepdims=True), jnp.finfo(x.dtype).tiny)
    variance = jnp.var(x, -1, ddof=1)
    ratio = jnp.mean(jnp.square(jnp.square(x)), -1) / jnp.square(jnp.where(variance == 0, 1.0, variance))
    return jnp.mean(jnp.where(variance == 0, 0.0, jnp.maximum(ratio - 3.0, 0.0)))


def max_over_median(hidden: ArrayLike) -> jax.Array:
    """max|x| / median|x| over channels and positions, mean over sequences.

    This is the max-to-median ratio (MMR) of arXiv 2509.23500, for the input of a layer. Definition here: over the
    channels and positions of a sequence, mean over sequences, then over layers (the paper's summaries disagree on mean
    or median over layers). Infinite if more than half of the values are 0.
    """
    x = jnp.abs(at_least_float32(hidden_states(hidden)))
    return jnp.mean(jnp.max(x, axis=(1, 2)) / jnp.median(x, axis=(1, 2)))


def gaussian_norm_ratio(width: int) -> float:
    """Returns `norm_ratio` of D = `width` independent Gaussian values: the median of their largest, over sqrt(D).

    >>> round(gaussian_norm_ratio(64), 2)
    0.32
    """
    return NormalDist().inv_cdf((1 + 0.5 ** (1 / width)) / 2) / math.sqrt(width)


def gaussian_max_over_median(count: int) -> float:
    """Returns `max_over_median` of `count` independent Gaussian values: the median of their largest, over their median.

    >>> round(gaussian_max_over_median(64 * 64), 2)
    5.58
    """
    quantile = NormalDist().inv_cdf
    return quantile((1 + 0.5 ** (1 / count)) / 2) / quantile(0.75)


def residual_norm_first(hidden: ArrayLike, first: int = 1) -> jax.Array:
    """||x||_2 at position 0, mean over sequences: the residual-state peak.

    Definition: the l2 norm of a block's output (Active-Dormant Attention Heads, arXiv 2410.13835). With several BOS
    tokens the mean is over the `first` positions.
    """
    return jnp.mean(norm(hidden_states(hidden, at_least=first))[:, :first])


def residual_norm_rest(hidden: ArrayLike, first: int = 1, where: ArrayLike | None = None) -> jax.Array:
    """||x||_2, mean over positions >= `first` and sequences; see `residual_norm_first`."""
    norms = norm(hidden_states(hidden, at_least=first + 1))
    return jnp.mean(norms[:, first:]) if where is None else _mean_of_rest(norms, where)


def value_norm_first(value_norms: ArrayLike, first: int = 1, *, by_head: bool = False) -> jax.Array:
    """||W_o v||_2 of the token at position 0, mean over heads and sequences: low if a value state is drained.

    Definition: the norm after the output projection, ||W_o^h v_j||_2 with the rows of W_o that belong to query head h
    of the same layer, because that is what reaches the residual stream (Active-Dormant Attention Heads, arXiv
    2410.13835: value-state drains).

    Args:
      value_norms: ||W_o^h v_j||_2 of one layer, [B, N, S].
      first: The number of first positions that the mean is over, if there are several BOS tokens.
      by_head: Return the value of every head, [N].
    """
    norms = at_least_float32(norms_of_values(value_norms, at_least=first))
    return jnp.mean(norms[..., :first], axis=(0, 2) if by_head else None)


def value_norm_rest(value_norms: ArrayLike, first: int = 1, *, by_head: bool = False) -> jax.Array:
    """||W_o v||_2, mean over positions >= `first`, heads and sequences; see `value_norm_first`."""
    norms = at_least_float32(norms_of_values(value_norms, at_least=first + 1))
    return jnp.mean(norms[..., first:], axis=(0, 2) if by_head else None)
