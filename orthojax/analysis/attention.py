"""Attention to the first key, and the unused weight, the entropy and the activity of heads.

Weights are the factors of the values in one layer, [B, N, T, S], zero on masked keys: B batch, N query heads, T query
positions, S key positions. Rows need not sum to 1: softmax-1 and ReLU rows may hold less, down to nothing. Functions
whose names end in `_by_head`, and null mass, entropy and activity, keep the axis N.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from orthojax.analysis.inputs import attention_weights, hidden_states, value_norms
from orthojax.ops.statistics import at_least_float32, norm

# Bins of activity: 20 in each power of ten; the first and the last also hold what lies beyond.
_LOWEST, _HIGHEST, _BINS = -5.0, 3.0, 160
DORMANT = 0.1  # of a head's largest activity
SINK = 0.3  # mean weight on key 0 above which a head counts as a sink


def first_attention_fraction(weights: ArrayLike) -> jax.Array:
    """Share of (query, head) pairs that attend most to key 0.

    Definition: share of (query, head) pairs, all queries (query 0 adds 1/T), whose largest weight is on key 0; a pair
    counts only if that weight is > 0 and strictly the largest (an all-zero ReLU row and ties do not count). It is the
    '%First Attn' of From Attention to Activation (arXiv 2410.17174, Table 2).

    Read it with `first_attention_mass`: a head that averages over the keys, or with softmax-1 attends to almost none of
    them, also has a largest weight, so a slight preference for key 0 counts as much as a sink.

    Returns a scalar in [0, 1], float32.

    >>> import jax.numpy as jnp
    >>> float(first_attention_fraction(jnp.array([[[[1.0, 0.0], [0.5, 0.5]]]])))  # a tie does not count
    0.5
    """
    weights = attention_weights(weights)
    others = jnp.max(weights[..., 1:], axis=-1, initial=0.0)  # at least 0: an all-zero row must not win
    wins = weights[..., 0] > others
    return _unless_nan(weights, jnp.count_nonzero(wins) / wins.size)


def _unless_nan(numbers: jax.Array, share: jax.Array) -> jax.Array:
    """Returns a share, or nan if it is of numbers with a NaN, which no comparison shows."""
    return jnp.where(jnp.isnan(jnp.sum(numbers)), jnp.nan, share).astype(jnp.float32)


def first_attention_mass_by_head(weights: ArrayLike) -> jax.Array:
    """Weight on key 0 of every head, mean over queries and sequences: [N], at least float32; see `sink_rate`."""
    return jnp.mean(at_least_float32(attention_weights(weights))[..., 0], axis=(0, 2))


def first_attention_mass(weights: ArrayLike) -> jax.Array:
    """Mean weight on key 0 over the pairs of `first_attention_fraction`, including query 0: at least float32."""
    return jnp.mean(first_attention_mass_by_head(weights))


def sink_rate(mass_by_head: ArrayLike, threshold: float = SINK) -> jax.Array:
    """Share of (layer, head) that are attention sinks, a scalar in [0, 1], float32.

    Definition: share of (layer, head) whose mean weight on key 0 over queries exceeds a threshold (0.3).

    Args:
      mass_by_head: `first_attention_mass_by_head` of one or more layers, [..., N], each over the whole evaluation set.
      threshold: Must be exceeded; equality does not count.

    >>> float(sink_rate(jnp.array([[0.9, 0.1], [0.3, 0.31]])))
    0.5
    """
    mass = jnp.asarray(mass_by_head)
    return _unless_nan(mass, jnp.mean(mass > threshold, dtype=jnp.float32))


def mean_weights_by_key(weights: ArrayLike, visible: ArrayLike | None = None) -> jax.Array:
    """Mean weight on each key over the queries that see it: [B, N, S], at least float32; 0 for a key that none sees.

    Args:
      weights: Weights of one layer, [B, N, T, S].
      visible: Which keys each query sees, bool, broadcast against [B, N, T, S]; None is a causal mask (T = S).
    """
    weights = at_least_float32(attention_weights(weights))
    if visible is None:
        if weights.shape[2] != weights.shape[3]:
            raise ValueError(f"weights of shape {weights.shape}; allowed: as many queries as keys, or visible=...")
        visible = jnp.tri(weights.shape[2], dtype=bool)[None, None]
    queries = jnp.sum(jnp.broadcast_to(visible, (*jnp.shape(visible)[:2], *weights.shape[2:])), axis=2)
    return jnp.sum(weights, axis=2) / jnp.maximum(queries, 1).astype(weights.dtype)


def gu_sink_rate(
    weights: ArrayLike, threshold: float = SINK, *, any_key: bool = False, visible: ArrayLike | None = None
) -> jax.Array:
    """Share of (sequence, head) with an attention sink at key 0, or at any key.

    Definition: share of (sequence, layer, head) with alpha_k > 0.3, where alpha_k = 1 / (T - k) sum_{i >= k} A_ik is
    the mean weight on key k (from 0) over the T - k queries that see it (When Attention Sink Emerges in Language
    Models, arXiv 2410.10781). `sink_rate` takes the mean over all sequences first. Definition here: with another mask,
    such as a window, the mean is over the queries that see key k; `any_key` takes the largest alpha_k over all keys,
    the last of which are means over few queries: the very last is one weight.

    Args:
      weights: Weights of one layer, [B, N, T, S].
      threshold: Must be exceeded; equality does not count.
      any_key: Whether key 0 or any key must exceed it.
      visible: Which keys each query sees, bool, broadcast against [B, N, T, S]; None is a causal mask (T = S).

    Returns:
      A scalar in [0, 1], float32.

    >>> import jax.numpy as jnp
    >>> own = jnp.eye(2)[None, None]
    >>> float(gu_sink_rate(own)), float(gu_sink_rate(own * 0.5)), float(gu_sink_rate(own * 0.5, any_key=True))
    (1.0, 0.0, 1.0)
    """
    alpha = mean_weights_by_key(weights, visible)
    alpha = jnp.max(alpha, axis=-1) if any_key else alpha[..., 0]
    return _unless_nan(alpha, jnp.mean(alpha > threshold, dtype=jnp.float32))


def chance_of_first(length: float, *, softmax1: bool = False, n: float = 0.0, window: int | None = None) -> float:
    """Returns the mean weight on key 0 over the queries of a causal row if all logits were 0: H_T / T with softmax.

    Query t of T = `length`, from 1, sees t keys, so softmax gives each 1/t, softmax-1 1/(t + 1) and softmax_n
    1/(t + n). The value for softmax is also the share of queries whose largest weight is on key 0 if each prefers one
    of its keys by chance. In a window of W keys the queries after W do not see key 0: H_W / T.

    >>> chance_of_first(2), round(chance_of_first(2, softmax1=True), 4)
    (0.75, 0.4167)
    >>> chance_of_first(4, window=2)  # (1 + 1/2) / 4
    0.375
    """
    if not 1 <= length < math.inf or not (window is None or window >= 1):
        raise ValueError(f"length={length}, window={window}; allowed: 1 or more, and None or 1 or more")
    seen = np.arange(1, int(length) + 1)
    weights = 1.0 / (seen + (1.0 if softmax1 else n))
    return float(np.mean(weights if window is None else np.where(seen <= window, weights, 0.0)))


def null_mass_by_head(weights: ArrayLike) -> jax.Array:
    """1 - sum of the weights of a row, mean over queries and sequences: [N].

    It is 0 for softmax, the weight on no key for softmax-1, and negative if weights sum to more than 1, as ReLU's may.
    """
    return 1.0 - jnp.mean(jnp.sum(at_least_float32(attention_weights(weights)), axis=-1), axis=(0, 2))


def attention_entropy_by_head(weights: ArrayLike) -> jax.Array:
    """Entropy of a row of weights in nats, mean over queries and sequences: [N].

    Definition: -sum_j w_j log w_j, with the null mass as one more key; ln(t) for equal weights on t keys. Negative
    weights, as with GELU, count as 0, and a row that sums to more than 1, as with ReLU, is divided by its sum first.
    """
    weights = jnp.maximum(at_least_float32(attention_weights(weights)), 0.0)
    weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1.0)
    entropy = jnp.sum(jax.scipy.special.entr(weights), axis=-1)
    rest = jnp.maximum(1.0 - jnp.sum(weights, axis=-1), 0.0)
    return jnp.mean(entropy + jax.scipy.special.entr(rest), axis=(0, 2))


def max_attention_logit_by_head(logits: ArrayLike, visible: ArrayLike) -> jax.Array:
    """Largest attention logit of each head over sequences, queries and the keys that they see: [N].

    Definition: S_max of QK-clip (Kimi K2, arXiv 2507.20534), which scales queries and keys of a head down once it
    exceeds a threshold of 100; here of all sequences. Logits [B, N, T, S] are scaled and capped, `visible` is bool and
    broadcast against them.
    """
    return jnp.max(jnp.where(visible, at_least_float32(logits), -jnp.inf), axis=(0, 2, 3))


def head_activity(head_norms: ArrayLike, residual_before: ArrayLike) -> jax.Array:
    """Activity of a head at a query, the relative change of the residual stream: ||W_o^h sum_j A_ij v_j|| / ||x_i||.

    A head is active at a query if this is at least a tenth (`DORMANT`) of its largest activity, and dormant otherwise.
    This quantifies the terms of Active-Dormant Attention Heads (arXiv 2410.13835).

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
    """Counts the queries of each data domain, int [B, T], by activity and head: [domains, bins, N]; counts add up."""
    activity = at_least_float32(activity)
    place = (jnp.log10(jnp.maximum(activity, 1e-30)) - _LOWEST) / (_HIGHEST - _LOWEST)
    bins = jax.nn.one_hot(jnp.clip((place * _BINS).astype(int), 0, _BINS - 1), _BINS, dtype=activity.dtype)
    domains = jax.nn.one_hot(domain, num_domains, dtype=activity.dtype)
    return jnp.einsum("BTM,BNTK->MKN", domains, bins)


def active_shares(histogram: ArrayLike) -> np.ndarray:
    """Share of queries at which a head is active, by data domain: [..., domains, N]; nan for an empty domain.

    The bins are 12% wide, which is the resolution of the threshold. The lowest bin, with the queries at which a head
    writes nothing, is never active: a head that writes nothing anywhere is active nowhere. The histogram comes from
    `activity_histogram`, summed over all batches, or is any multiple of it.
    """
    histogram = np.asarray(histogram, float)
    seen = histogram.sum(axis=-3) > 0  # [..., bins, N]
    largest = histogram.shape[-2] - 1 - np.argmax(seen[..., ::-1, :], axis=-2)  # [..., N]
    threshold = largest + round(np.log10(DORMANT) * _BINS / (_HIGHEST - _LOWEST))
    active = np.arange(histogram.shape[-2])[:, None] >= np.maximum(threshold, 1)[..., None, :]  # [..., bins, N]
    with np.errstate(invalid="ignore"):
        return (histogram * active[..., None, :, :]).sum(axis=-2) / histogram.sum(axis=-2)
