"""How much attention falls on the first key. Legend: B batch, N query heads, T query positions, S key positions.

Weights are what multiplies the values, [B, N, T, S], zero on masked keys. Rows need not sum to 1: softmax-1 and ReLU
rows may hold less, down to nothing.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from orthojax.ops.statistics import at_least_float32


def first_attention_fraction(weights: ArrayLike) -> jax.Array:
    """Share of (query, head) pairs that attend most to key 0.

    Definition: share of (query, head) pairs, all queries (query 0 adds 1/T), whose largest weight is key 0; counts only
    where that weight is > 0 and strictly the largest (an all-zero ReLU row and ties do not count). The '%First Attn' of
    From Attention to Activation (arXiv 2410.17174, Table 2).

    Args:
      weights: Attention weights of one layer, [B, N, T, S], not negative.

    Returns:
      A scalar in [0, 1], float32.

    >>> import jax.numpy as jnp
    >>> float(first_attention_fraction(jnp.array([[[[1.0, 0.0], [0.5, 0.5]]]])))  # a tie does not count
    0.5
    """
    weights = jnp.asarray(weights)
    others = jnp.max(weights[..., 1:], axis=-1, initial=0.0)  # at least 0: an all-zero row must not win
    wins = weights[..., 0] > others
    return jnp.count_nonzero(wins) / wins.size


def first_attention_mass_by_head(weights: ArrayLike) -> jax.Array:
    """Weight on key 0 of every head, mean over queries and sequences; `sink_rate` counts these.

    Args:
      weights: Attention weights of one layer, [B, N, T, S].

    Returns:
      [N], at least float32.
    """
    return jnp.mean(at_least_float32(weights)[..., 0], axis=(0, 2))


def first_attention_mass(weights: ArrayLike) -> jax.Array:
    """Weight on key 0, mean over all (query, head) pairs.

    Definition: mean weight on key 0 over the same pairs as `first_attention_fraction`, query 0 among them.

    Args:
      weights: Attention weights of one layer, [B, N, T, S].

    Returns:
      A scalar, at least float32.
    """
    return jnp.mean(first_attention_mass_by_head(weights))


def first_attention_share(weights: ArrayLike) -> jax.Array:
    """Weight on key 0 as a share of all weight of its row, mean over all (query, head) pairs.

    Definition: mean of w_0 / sum_j w_j over the pairs of `first_attention_fraction`; a row of zeros counts 0. It
    compares normalizers whose rows do not sum to 1, as ReLU's and sigmoid's, and is `first_attention_mass` where rows
    do. The papers do not have it.

    Args:
      weights: Attention weights of one layer, [B, N, T, S], not negative.

    Returns:
      A scalar in [0, 1], at least float32.

    >>> import jax.numpy as jnp
    >>> float(first_attention_share(jnp.array([[[[0.5, 0.0], [0.1, 0.3], [0.0, 0.0], [0.0, 2.0]]]])))
    0.3125
    """
    weights = at_least_float32(weights)
    total = jnp.sum(weights, axis=-1)
    return jnp.mean(weights[..., 0] / jnp.where(total > 0.0, total, 1.0))


def sink_rate(mass_by_head: ArrayLike, threshold: float = 0.3) -> jax.Array:
    """Share of (layer, head) that are attention sinks.

    Definition: share of (layer, head) whose mean weight on key 0 over queries exceeds a threshold (0.3).

    Args:
      mass_by_head: `first_attention_mass_by_head` of one or more layers, [..., N], each over the whole evaluation set.
      threshold: Must be exceeded, equality does not count.

    Returns:
      A scalar in [0, 1], float32.

    >>> float(sink_rate(jnp.array([[0.9, 0.1], [0.3, 0.31]])))
    0.5
    """
    return jnp.mean(jnp.asarray(mass_by_head) > threshold, dtype=jnp.float32)
