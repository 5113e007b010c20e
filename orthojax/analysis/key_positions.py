"""Which of the first keys takes over: attention by key position, where a relaxed mask privileges none of them.

From Attention to Activation (arXiv 2410.17174), section 3.2 and Figure 2. Legend: B batch, N query heads, T query
positions, S key positions, k the keys that are looked at. Queries before `first_query` do not count: with k keys that
see each other, the queries from k on see the same keys as under a causal mask.
"""

import math
from collections import Counter
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from orthojax.ops.statistics import at_least_float32


def attention_mass_by_key(weights: ArrayLike, keys: int, first_query: int) -> jax.Array:
    """Weight on each of the first keys, mean over queries: m[b, n, j] = E_{t >= first_query}[w[b, n, t, j]], j < k.

    Args:
      weights: Attention weights of one layer, [B, N, T, S].
      keys: How many keys.
      first_query: The first query that counts, below T.

    Returns:
      [B, N, keys], at least float32.
    """
    return jnp.mean(at_least_float32(weights)[:, :, first_query:, :keys], axis=2)


def attention_fraction_by_key(weights: ArrayLike, keys: int, first_query: int) -> jax.Array:
    """Share of queries that attend most to each of the first keys.

    As `first_attention_fraction`, for any key: it counts only where its weight is above 0 and strictly the largest of
    all S keys.

    Args:
      weights: Attention weights of one layer, [B, N, T, S], not negative.
      keys: How many keys.
      first_query: The first query that counts, below T.

    Returns:
      [B, N, keys], float32; sums over keys to at most 1.
    """
    weights = jnp.asarray(weights)[:, :, first_query:]
    largest = jnp.max(weights, axis=-1, keepdims=True)
    strict = jnp.sum(weights == largest, axis=-1, keepdims=True) == 1
    wins = (weights[..., :keys] == largest) & strict & (largest > 0)
    return jnp.mean(wins, axis=2, dtype=jnp.float32)


def equal_logits_mass(length: int, first_query: int) -> float:
    """What `attention_mass_by_key` is where all visible keys have equal logits: E_{first_query <= t < T}[1 / (t + 1)].

    Args:
      length: T.
      first_query: The first query that counts; the keys that are looked at come before it.

    >>> equal_logits_mass(4, 2) == (1 / 3 + 1 / 4) / 2
    True
    """
    return float(np.mean(1.0 / np.arange(first_query + 1, length + 1)))


def uniformity_p_value(counts: Sequence[int]) -> float:
    """Whether winners may have been drawn uniformly: the exact multinomial test by Pearson's statistic.

    With n draws and k categories of equal probability, P(X >= x) with X = sum_j c_j^2, which orders outcomes as
    chi-square does; exact, since n is the number of seeds.

    Args:
      counts: How often each of the k categories was drawn.

    Returns:
      A probability; 1 without draws.

    >>> uniformity_p_value([0, 5, 0, 0])  # five of five, of four: 4 / 4^5
    0.00390625
    """
    # Outcomes by (draws, sum of squares), category by category: the number of sequences that lead there.
    ways = Counter({(0, 0): 1})
    draws, observed = sum(counts), sum(count * count for count in counts)
    for _ in counts:
        longer: Counter[tuple[int, int]] = Counter()
        for (n, square), number in ways.items():
            for more in range(draws - n + 1):
                longer[n + more, square + more * more] += number * math.comb(n + more, more)
        ways = longer
    as_extreme = sum(number for (n, square), number in ways.items() if n == draws and square >= observed)
    return as_extreme / len(counts) ** draws
