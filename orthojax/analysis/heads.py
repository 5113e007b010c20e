"""Measures of single attention heads: their unused weight, their entropy, their activity.

Legend: B batch, N query heads, T query positions, S key positions, D d_model. Functions take one layer; what is by head
has N as its last axis. Arrays of other shapes are a ValueError.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from orthojax.analysis.inputs import attention_weights, hidden_states, value_norms
from orthojax.ops.statistics import at_least_float32, norm

# Bins of activity: 20 in each power of ten, the first and the last also of what lies beyond.
_LOWEST, _HIGHEST, _BINS = -5.0, 3.0, 160
DORMANT = 0.1  # of a head's largest activity


def null_mass_by_head(weights: ArrayLike) -> jax.Array:
    """1 - sum of the weights of a row, mean over queries and sequences: [N].

    0 for softmax; what softmax-1 leaves to none of the keys; negative where weights sum to more than 1, as ReLU's may.

    Args:
      weights: Attention weights, [B, N, T, S].
    """
    return 1.0 - jnp.mean(jnp.sum(at_least_float32(attention_weights(weights)), axis=-1), axis=(0, 2))


def attention_entropy_by_head(weights: ArrayLike) -> jax.Array:
    """Entropy of a row of weights in nats, mean over queries and sequences: [N].

    Definition: -sum_j w_j log w_j, with the null mass as one more key; ln(t) for equal weights on t keys. Negative
    weights, as GELU's, count as 0, and a row that sums to more than 1, as ReLU's may, is divided by its sum first.

    Args:
      weights: Attention weights, [B, N, T, S].
    """
    weights = jnp.maximum(at_least_float32(attention_weights(weights)), 0.0)
    weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1.0)
    entropy = jnp.sum(jax.scipy.special.entr(weights), axis=-1)
    rest = jnp.maximum(1.0 - jnp.sum(weights, axis=-1), 0.0)
    return jnp.mean(entropy + jax.scipy.special.entr(rest), axis=(0, 2))


def value_norm_first_by_head(norms: ArrayLike, first: int = 1) -> jax.Array:
    """`activations.value_norm_first` of every head: [N]."""
    return jnp.mean(at_least_float32(value_norms(norms, at_least=first))[..., :first], axis=(0, 2))


def value_norm_rest_by_head(norms: ArrayLike, first: int = 1) -> jax.Array:
    """`activations.value_norm_rest` of every head: [N]."""
    return jnp.mean(at_least_float32(value_norms(norms, at_least=first + 1))[..., first:], axis=(0, 2))


def head_activity(head_norms: ArrayLike, residual_before: ArrayLike) -> jax.Array:
    """Activity of a head at a query, the relative change of the residual stream: ||W_o^h sum_j A_ij v_j|| / ||x_i||.

    A head is active at a query at which this is at least a tenth (`DORMANT`) of its largest activity, and dormant at
    the others. This puts a number to the words of Active-Dormant Attention Heads (arXiv 2410.13835).

    Args:
      head_norms: ||W_o^h sum_j A_ij v_j||, [B, N, T].
      residual_before: The residual stream x that the block gets, [B, T, D].

    Returns:
      [B, N, T], at least float32.
    """
    head_norms, before = at_least_float32(value_norms(head_norms)), norm(hidden_states(residual_before))
    if before.shape != (head_norms.shape[0], head_norms.shape[2]):
        raise ValueError(f"head_norms {head_norms.shape} and the residual norms {before.shape} do not belong together")
    return head_norms / before[:, None]


def activity_histogram(activity: ArrayLike, domain: ArrayLike, num_domains: int) -> jax.Array:
    """Counts the queries of each data domain by activity and head: [domains, bins, N]; counts of batches add up.

    Args:
      activity: From `head_activity`, [B, N, T].
      domain: Number of the domain of each query, int [B, T]; below `num_domains`.
      num_domains: Their number.
    """
    activity = at_least_float32(activity)
    place = (jnp.log10(jnp.maximum(activity, 1e-30)) - _LOWEST) / (_HIGHEST - _LOWEST)
    bins = jax.nn.one_hot(jnp.clip((place * _BINS).astype(int), 0, _BINS - 1), _BINS, dtype=activity.dtype)
    domains = jax.nn.one_hot(domain, num_domains, dtype=activity.dtype)
    return jnp.einsum("BTM,BNTK->MKN", domains, bins)


def active_shares(histogram: ArrayLike) -> np.ndarray:
    """Share of queries at which a head is active, by data domain: [..., domains, N]; nan for an empty domain.

    The bins are 12% wide, and so is what is known of the threshold. The lowest bin, which has the queries at which a
    head writes nothing, is never active: a head that writes nothing anywhere is active nowhere.

    Args:
      histogram: From `activity_histogram`, of all batches, [..., domains, bins, N]; any multiple of it.
    """
    histogram = np.asarray(histogram, float)
    seen = histogram.sum(axis=-3) > 0  # [..., bins, N]
    largest = histogram.shape[-2] - 1 - np.argmax(seen[..., ::-1, :], axis=-2)  # [..., N]
    threshold = largest + round(np.log10(DORMANT) * _BINS / (_HIGHEST - _LOWEST))
    active = np.arange(histogram.shape[-2])[:, None] >= np.maximum(threshold, 1)[..., None, :]  # [..., bins, N]
    with np.errstate(invalid="ignore"):
        return (histogram * active[..., None, :, :]).sum(axis=-2) / histogram.sum(axis=-2)
