"""Outliers of hidden states, and value-state drains. Legend: B batch, N query heads, T or S positions, D d_model.

Hidden states are block outputs after the second residual add, one array [B, T, D] for each layer; embeddings and the
final norm's output are not among them. `first` is position 0, `rest` are the positions >= 1 (so T >= 2). Every
function takes one layer, averages over sequences and returns a scalar, at least float32. Arrays of another shape are a
ValueError.
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


def kurtosis_first(hidden: ArrayLike) -> jax.Array:
    """Kurtosis over channels at position 0, mean over sequences: E_b[kappa(x[b, 0])].

    Definition: raw, over channels, per layer and position (arXiv 2410.17174, Eq. 2 and Table 2).
    """
    return jnp.mean(kurtosis(hidden_states(hidden)[:, 0]))


def kurtosis_rest(hidden: ArrayLike) -> jax.Array:
    """Kurtosis over channels, mean over positions >= 1 and sequences; see `kurtosis_first`."""
    return jnp.mean(kurtosis(hidden_states(hidden, at_least=2)[:, 1:]))


def kurtosis_pooled(hidden: ArrayLike) -> jax.Array:
    """Kurtosis over channels, mean over all positions and sequences; see `kurtosis_first`."""
    return jnp.mean(kurtosis(hidden_states(hidden)))


def max_abs_first(hidden: ArrayLike) -> jax.Array:
    """Largest absolute activation at position 0, mean over sequences: E_b[max_d |x[b, 0, d]|].

    Definition: per sequence the max over channels, mean over sequences, then over layers (arXiv 2410.17174, Table 2).
    """
    return jnp.mean(_magnitude(hidden_states(hidden))[:, 0])


def max_abs_rest(hidden: ArrayLike) -> jax.Array:
    """Largest absolute activation over positions >= 1, mean over sequences: E_b[max_{t >= 1, d} |x[b, t, d]|].

    Definition: per sequence the max over channels and over positions >= 1, mean over sequences; see `max_abs_first`.
    """
    return jnp.mean(jnp.max(_magnitude(hidden_states(hidden, at_least=2))[:, 1:], axis=1))


def max_abs_first_maximum(hidden: ArrayLike) -> jax.Array:
    """Largest absolute activation at position 0 over all sequences; grows with their number, so report both."""
    return jnp.max(_magnitude(hidden_states(hidden))[:, 0])


def max_abs_rest_maximum(hidden: ArrayLike) -> jax.Array:
    """Largest absolute activation at positions >= 1 over all sequences; grows with their number, so report both."""
    return jnp.max(_magnitude(hidden_states(hidden, at_least=2))[:, 1:])


def norm_ratio_first(hidden: ArrayLike) -> jax.Array:
    """max|x| / ||x||_2 at position 0, mean over sequences, in [1 / sqrt(D), 1].

    Definition: max|x| / ||x||_2 per position (arXiv 2410.17174, section 4.2 and Appendix I.3).
    """
    return jnp.mean(norm_ratio(hidden_states(hidden)[:, 0]))


def norm_ratio_rest(hidden: ArrayLike) -> jax.Array:
    """max|x| / ||x||_2, mean over positions >= 1 and sequences; see `norm_ratio_first`."""
    return jnp.mean(norm_ratio(hidden_states(hidden, at_least=2)[:, 1:]))


def gaussian_norm_ratio(width: int) -> float:
    """Returns `norm_ratio` of D = `width` independent Gaussian values: the median of their largest, over sqrt(D).

    >>> round(gaussian_norm_ratio(64), 2)
    0.32
    """
    return NormalDist().inv_cdf((1 + 0.5 ** (1 / width)) / 2) / math.sqrt(width)


def residual_norm_first(hidden: ArrayLike, first: int = 1) -> jax.Array:
    """||x||_2 at position 0, mean over sequences: the residual-state peak.

    Definition: the l2 norm of a block's output (Active-Dormant Attention Heads, arXiv 2410.13835). With several BOS
    tokens the mean is over the `first` positions.
    """
    return jnp.mean(norm(hidden_states(hidden, at_least=first))[:, :first])


def residual_norm_rest(hidden: ArrayLike, first: int = 1) -> jax.Array:
    """||x||_2, mean over positions >= `first` and sequences; see `residual_norm_first`."""
    return jnp.mean(norm(hidden_states(hidden, at_least=first + 1))[:, first:])


def value_norm_first(value_norms: ArrayLike, first: int = 1, *, by_head: bool = False) -> jax.Array:
    """||W_o v||_2 of the token at position 0, mean over heads and sequences: low where a value state is drained.

    Definition: the norm after the output projection, ||W_o^h v_j||_2 with the rows of W_o that belong to query head h
    of the same layer, because that is what reaches the residual stream (Active-Dormant Attention Heads, arXiv
    2410.13835: value-state drains).

    Args:
      value_norms: ||W_o^h v_j||_2 of one layer, [B, N, S].
      first: The number of first positions that the mean is over, if there are several BOS tokens.
      by_head: Give the value of every head, [N].
    """
    norms = at_least_float32(norms_of_values(value_norms, at_least=first))
    return jnp.mean(norms[..., :first], axis=(0, 2) if by_head else None)


def value_norm_rest(value_norms: ArrayLike, first: int = 1, *, by_head: bool = False) -> jax.Array:
    """||W_o v||_2, mean over positions >= `first`, heads and sequences; see `value_norm_first`."""
    norms = at_least_float32(norms_of_values(value_norms, at_least=first + 1))
    return jnp.mean(norms[..., first:], axis=(0, 2) if by_head else None)
