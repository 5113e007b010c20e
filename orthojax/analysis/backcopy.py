"""Bigram-Backcopy: the risk of each half of the task, and attention to the sink.

Active-Dormant Attention Heads, arXiv 2410.13835. At a trigger the next token is a copy of the previous one, elsewhere
it is drawn from the bigram law of the current token. Legend: B batch, N query heads, T query positions, S key
positions, V vocabulary. Every function takes arrays of one layer or of the output and returns a scalar, at least
float32. Means over selected positions are also available as (sum, count), so that batches with different numbers of
triggers add up.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from orthojax.analysis.inputs import attention_weights, triggers
from orthojax.ops.statistics import at_least_float32

SumAndCount = tuple[jax.Array, jax.Array]


def _sum_and_count(values: jax.Array, where: jax.Array) -> SumAndCount:
    return jnp.sum(values, where=where), jnp.sum(where, dtype=jnp.int32)


def _mean(sum_and_count: SumAndCount) -> jax.Array:
    total, count = sum_and_count
    return total / count.astype(total.dtype)


def _cross_entropy(oracle_probs: jax.Array, log_probs: jax.Array) -> jax.Array:
    """Computes -sum_v q(v) log p(v) in nats over the last axis, terms with q = 0 dropped."""
    possible = oracle_probs > 0.0
    # log p may be -inf if q = 0, and 0 * -inf is nan.
    return -jnp.sum(oracle_probs * jnp.where(possible, log_probs, 0.0), axis=-1)


def risk_sums(log_probs: ArrayLike, oracle_probs: ArrayLike, is_trigger: ArrayLike) -> dict[str, SumAndCount]:
    """Returns `backcopy_risk_nats`, `backcopy_excess_risk_nats` and `bigram_excess_risk_nats` as (sum, count)."""
    if jnp.ndim(log_probs) != 3 or jnp.shape(log_probs) != jnp.shape(oracle_probs):
        shapes = f"{jnp.shape(log_probs)} and {jnp.shape(oracle_probs)}"
        raise ValueError(f"log_probs and oracle_probs have shapes {shapes}; allowed: [B, T, V] for both")
    log_probs, oracle = at_least_float32(log_probs), at_least_float32(oracle_probs)
    is_trigger = triggers(is_trigger, oracle.shape[:2])
    risk = _cross_entropy(oracle, log_probs)
    divergence = risk - _cross_entropy(oracle, jnp.log(jnp.where(oracle > 0.0, oracle, 1.0)))
    return {
        "backcopy_risk_nats": _sum_and_count(risk, is_trigger),
        "backcopy_excess_risk_nats": _sum_and_count(divergence, is_trigger),
        "bigram_excess_risk_nats": _sum_and_count(divergence, ~is_trigger),
    }


def backcopy_risk_nats(log_probs: ArrayLike, oracle_probs: ArrayLike, is_trigger: ArrayLike) -> jax.Array:
    """Risk at positions where the task is to copy: mean over trigger positions of -sum_v q(v) log p(v).

    It is the expected cross-entropy under the oracle q, with terms of q = 0 dropped; the oracle's own is 0 if it
    copies.

    Args:
      log_probs: Log-probabilities of the model in nats, [B, T, V].
      oracle_probs: Probabilities of the next token under the law of the data, [B, T, V].
      is_trigger: The mask of tokens that are triggers, bool [B, T].

    Returns:
      Nats; nan without triggers.
    """
    return _mean(risk_sums(log_probs, oracle_probs, is_trigger)["backcopy_risk_nats"])


def backcopy_excess_risk_nats(log_probs: ArrayLike, oracle_probs: ArrayLike, is_trigger: ArrayLike) -> jax.Array:
    """Risk above the oracle's at triggers, for rules whose outcome is not certain: mean of KL(q || p) over them."""
    return _mean(risk_sums(log_probs, oracle_probs, is_trigger)["backcopy_excess_risk_nats"])


def bigram_excess_risk_nats(log_probs: ArrayLike, oracle_probs: ArrayLike, is_trigger: ArrayLike) -> jax.Array:
    """Risk above the oracle's where the task is the bigram: mean over non-trigger positions of KL(q || p).

    Definition: the bigram risk over all non-trigger positions, the BOS position included, minus the oracle's. The
    oracle's row at BOS must be the true law of the first token (triggers excluded), else a perfect model would show a
    positive excess.

    Arguments are as for `backcopy_risk_nats`. Returns nats, >= 0 up to rounding.
    """
    return _mean(risk_sums(log_probs, oracle_probs, is_trigger)["bigram_excess_risk_nats"])


def by_head(values: jax.Array, where: jax.Array) -> SumAndCount:
    """Sums values [B, N, T] over the queries of a mask [B, T]: the sum [N], and the number of queries."""
    return jnp.sum(values, axis=(0, 2), where=where[:, None]), jnp.sum(where, dtype=jnp.int32)


def mean_over_heads(sum_and_count: SumAndCount) -> jax.Array:
    """Returns the mean of a sum by head [N]; nan if nothing was summed."""
    total, count = sum_and_count
    return jnp.mean(total) / count.astype(total.dtype)


def sink_attention_sum(
    weights: ArrayLike, is_trigger: ArrayLike, bos_count: int = 1, *, own_rows: bool = True
) -> SumAndCount:
    """Returns `sink_attention`, or `sink_attention_rest` without the rows of BOS, as (sum by head [N], queries)."""
    n = max(1, bos_count)
    on_bos = jnp.sum(at_least_float32(attention_weights(weights))[..., :n], axis=-1)
    dormant, start = ~triggers(is_trigger, (on_bos.shape[0], on_bos.shape[2])), 0 if own_rows else n
    return by_head(on_bos[..., start:], dormant[:, start:])


def sink_attention(weights: ArrayLike, is_trigger: ArrayLike, bos_count: int = 1) -> jax.Array:
    """Mean attention to BOS over the queries at which the head should be dormant.

    Definition: mean over batch and non-trigger positions of the weight on key 0, the BOS row (1 for softmax) included;
    mean over heads. One layer; over layers the maximum is reported. With several BOS tokens their weights are summed.

    Args:
      weights: Attention weights, [B, N, T, S].
      is_trigger: The mask of tokens that are triggers, bool [B, T].
      bos_count: BOS tokens at the start; without one the first token takes their place.
    """
    return mean_over_heads(sink_attention_sum(weights, is_trigger, bos_count))


def sink_attention_rest(weights: ArrayLike, is_trigger: ArrayLike, bos_count: int = 1) -> jax.Array:
    """`sink_attention` without the rows of BOS.

    BOS sees only itself. Softmax gives it weight 1 there, but unnormalised weights are unbounded in that row, and ReLU
    attention without any sink can reach 10, enough to move the mean over all rows. Arguments are as for
    `sink_attention`.
    """
    return mean_over_heads(sink_attention_sum(weights, is_trigger, bos_count, own_rows=False))
