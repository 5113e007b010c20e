"""Attention to each of the first keys, if a relaxed mask privileges none of them.

From Attention to Activation (arXiv 2410.17174), section 3.2 and Figure 2. Weights are [B, N, T, S] of one layer: B
batch, N query heads, T query positions, S key positions. Queries before `first_query` do not count: with k keys that
see each other, the queries from k on see the same keys as under a causal mask.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from orthojax.analysis.inputs import attention_weights
from orthojax.ops.statistics import at_least_float32


def attention_mass_by_key(weights: ArrayLike, keys: int, first_query: int) -> jax.Array:
    """Weight on each of the first keys, mean over queries: m[b, n, j] = E_{t >= first_query}[w[b, n, t, j]], j < k.

    Args:
      weights: [B, N, T, S].
      keys: How many keys, k.
      first_query: The first query that counts, below T.

    Returns:
      [B, N, k], at least float32.

    Raises:
      ValueError: For keys beyond S or a first query beyond T.
    """
    return jnp.mean(at_least_float32(_from_query(weights, keys, first_query))[..., :keys], axis=2)


def _from_query(weights: ArrayLike, keys: int, first_query: int) -> jax.Array:
    weights = attention_weights(weights)
    T, S = weights.shape[2:]
    if not (1 <= keys <= S and 0 <= first_query < T):
        raise ValueError(f"keys={keys}, first_query={first_query}; allowed: 1 to {S}, 0 to {T - 1}")
    return weights[:, :, first_query:]


def attention_fraction_by_key(weights: ArrayLike, keys: int, first_query: int) -> jax.Array:
    """Share of queries that attend most to each of the first keys: [B, N, k] float32, over keys at most 1 in sum.

    As `first_attention_fraction`, for any key: it counts only where its weight is above 0 and strictly the largest of
    all S keys. Arguments as of `attention_mass_by_key`.
    """
    weights = _from_query(weights, keys, first_query)
    largest = jnp.max(weights, axis=-1, keepdims=True)
    strict = jnp.sum(weights == largest, axis=-1, keepdims=True) == 1
    wins = (weights[..., :keys] == largest) & strict & (largest > 0)
    return jnp.mean(wins, axis=2, dtype=jnp.float32)


def equal_logits_mass(length: int, first_query: int) -> float:
    """Returns `attention_mass_by_key` for visible keys of equal logits: E_{first_query <= t < T}[1 / (t + 1)].

    Args:
      length: T.
      first_query: The first query that counts; the keys that are looked at come before it.

    >>> equal_logits_mass(4, 2) == (1 / 3 + 1 / 4) / 2
    True
    """
    if not 0 <= first_query < length:
        raise ValueError(f"first_query={first_query}; allowed: 0 to {length - 1}")
    return float(np.mean(1.0 / np.arange(first_query + 1, length + 1)))


def uniformity_p_value(counts: Sequence[int]) -> float:
    """Tests whether winners were drawn uniformly: the exact multinomial test by Pearson's statistic.

    With n draws and k categories of equal probability, P(X >= x) with X = sum_j c_j^2, which orders outcomes as
    chi-square does; exact, since n is the number of seeds.

    Args:
      counts: How often each of the k categories was drawn.

    Returns:
      A probability; 1 without draws.

    >>> uniformity_p_value([0, 5, 0, 0])  # five of five, of four: 4 / 4^5
    0.00390625
    """
    if not len(counts) or min(counts) < 0:
        raise ValueError(f"counts {counts}; allowed: one for each category, not negative")
    draws, observed, as_extreme = sum(counts), sum(count * count for count in counts), 0
    for outcome in itertools.combinations_with_replacement(range(len(counts)), draws):
        drawn = Counter(outcome).values()
        if sum(count * count for count in drawn) >= observed:
            as_extreme += math.factorial(draws) // math.prod(map(math.factorial, drawn))  # sequences that lead there
    return as_extreme / len(counts) ** draws
