"""Attention to the first key.

Weights are the factors of the values in one layer, [B, N, T, S], zero on masked keys: B batch, N query heads, T query
positions, S key positions. Rows need not sum to 1: softmax-1 and ReLU rows may hold less, down to nothing.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from orthojax.analysis.inputs import attention_weights
from orthojax.ops.statistics import at_least_float32


def first_attention_fraction(weights: ArrayLike) -> jax.Array:
    """Share of (query, head) pairs that attend most to key 0.

    Definition: share of (query, head) pairs, all queries (query 0 adds 1/T), whose largest weight is key 0; counts only
    where that weight is > 0 and strictly the largest (an all-zero ReLU row and ties do not count). The '%First Attn' of
    From Attention to Activation (arXiv 2410.17174, Table 2).

    Read it beside `first_attention_mass`: a head that averages over the keys, or under softmax-1 attends to nearly none
    of them, has a largest weight as well, so that a slight preference for key 0 counts as much as a sink.

    Returns a scalar in [0, 1], float32.

    >>> import jax.numpy as jnp
    >>> float(first_attention_fraction(jnp.array([[[[1.0, 0.0], [0.5, 0.5]]]])))  # a tie does not count
    0.5
    """
    weights = attention_weights(weights)
    others = jnp.max(weights[..., 1:], axis=-1, initial=0.0)  # at least 0: an all-zero row must not win
    wins = weights[..., 0] > others
    return jnp.count_nonzero(wins) / wins.size


def first_attention_mass_by_head(weights: ArrayLike) -> jax.Array:
    """Weight on key 0 of every head, mean over queries and sequences: [N], at least float32; see `sink_rate`."""
    return jnp.mean(at_least_float32(attention_weights(weights))[..., 0], axis=(0, 2))


def first_attention_mass(weights: ArrayLike) -> jax.Array:
    """Mean weight on key 0 over the pairs of `first_attention_fraction`, query 0 among them: at least float32."""
    return jnp.mean(first_attention_mass_by_head(weights))


def first_attention_share(weights: ArrayLike) -> jax.Array:
    """Weight on key 0 as a share of all weight of its row, mean over all (query, head) pairs.

    Definition: mean of w_0 / sum_j w_j over the pairs of `first_attention_fraction`; a row of zeros counts 0. It
    compares normalizers whose rows do not sum to 1, as ReLU's and sigmoid's, and is `first_attention_mass` where rows
    do. The papers do not have it. Returns a scalar in [0, 1], at least float32.

    >>> import jax.numpy as jnp
    >>> float(first_attention_share(jnp.array([[[[0.5, 0.0], [0.1, 0.3], [0.0, 0.0], [0.0, 2.0]]]])))
    0.3125
    """
    weights = at_least_float32(attention_weights(weights))
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


def chance_of_first(length: float, *, softmax1: bool = False, n: float = 0.0, window: int | None = None) -> float:
    """Returns the mean weight on key 0 over the queries of a causal row if all logits were 0: H_T / T with softmax.

    Query t of T = `length`, from 1, sees t keys, so softmax gives each 1/t, softmax-1 1/(t + 1) and softmax_n
    1/(t + n). The first of these is also the share of queries whose largest weight is key 0 if each prefers one of
    its keys by chance. In a window of W keys the queries after W do not see key 0: H_W / T.

    Args:
      length: T, tokens of a sequence.
      softmax1: Whether the weights are those of softmax-1, which is n = 1.
      n: Of softmax_n.
      window: W, how many keys each query sees at most; None means all before it.

    >>> chance_of_first(2), round(chance_of_first(2, softmax1=True), 4)
    (0.75, 0.4167)
    >>> chance_of_first(4, window=2)  # (1 + 1/2) / 4
    0.375
    """
    seen = np.arange(1, int(length) + 1)
    weights = 1.0 / (seen + (1.0 if softmax1 else n))
    return float(np.mean(weights if window is None else np.where(seen <= window, weights, 0.0)))
