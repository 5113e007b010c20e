"""Bigram-Backcopy: the risk of each half of the task, and attention to the sink.

Active-Dormant Attention Heads, arXiv 2410.13835. At a trigger the next token is a copy of the previous one, elsewhere
it is drawn from the bigram law of the current token. Legend: B batch, N query heads, T query positions, S key
positions, V vocabulary. Every function takes arrays of one layer or of the output and returns a scalar, at least
float32. Means over selected positions are also available as (sum, count), so that batches with different numbers of
triggers add up.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from orthojax.analysis.inputs import attention_weights, of_one_layer, triggers
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


ONLY_SUMS = ("sink_logit_squared", "gap_of_token", "logit_of_token", "logit_of_token_squared")  # not metrics


def _split(
    logits: ArrayLike, is_trigger: ArrayLike, bos_count: int, visible: ArrayLike | None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns logits on BOS [B, N, T] and all keys [B, N, T, S]; masks of keys between and of queries.

    The masks are [1 or B, T, S] and [B, T].
    """
    logits, n = at_least_float32(of_one_layer(logits, "attention logits", "B, N, T, S")), max(1, bos_count)
    query, key = jnp.arange(logits.shape[-2])[:, None], jnp.arange(logits.shape[-1])[None]
    between = ((key >= n) & (key < query))[None]  # logits come before the mask: later keys hold anything
    on_bos = logits[..., 0] if n == 1 else jax.nn.logsumexp(logits[..., :n], axis=-1)
    dormant = ~triggers(is_trigger, (logits.shape[0], logits.shape[2])) & (query[:, 0] > n)[None]
    if visible is not None:
        seen = jnp.broadcast_to(visible, (*jnp.shape(visible)[:2], *logits.shape[2:]))[:, 0]
        between, dormant = between & seen, dormant & jnp.all(seen[..., :n], axis=-1)
        dormant = dormant & jnp.any(between, axis=-1)
    return on_bos, logits, between, dormant


def _gap(on_bos: jax.Array, logits: jax.Array, between: jax.Array) -> jax.Array:
    number = jnp.maximum(jnp.sum(between, axis=-1), 1).astype(logits.dtype)
    return on_bos - jnp.sum(logits, axis=-1, where=between[:, None]) / number[:, None]


def sink_logit_gap_sum(
    logits: ArrayLike, is_trigger: ArrayLike, bos_count: int = 1, visible: ArrayLike | None = None
) -> SumAndCount:
    """`sink_logit_gap` as (sum by head [N], number of non-trigger queries with a key between BOS and themselves)."""
    on_bos, logits, between, dormant = _split(logits, is_trigger, bos_count, visible)
    return by_head(_gap(on_bos, logits, between), dormant)


def sink_logit_gap(
    logits: ArrayLike, is_trigger: ArrayLike, bos_count: int = 1, visible: ArrayLike | None = None
) -> jax.Array:
    """Logit on BOS minus the mean of the others, at queries at which the head should be dormant.

    Definition: for a query i >= 2 the logit on key 0 minus the mean logit of keys 1 .. i - 1 (neither BOS nor itself),
    averaged over non-trigger queries, batch and heads. Several BOS tokens count as one key with the sum of their
    weights: its logit is the logarithm of the sum of the exponentials of their logits, and only later queries and keys
    count.

    Args:
      logits: Scaled attention logits, before the mask, [B, N, T, S].
      is_trigger: The mask of tokens that are triggers, bool [B, T].
      bos_count: BOS tokens at the start; without one the first token takes their place.
      visible: Which keys each query sees, bool [1 or B, 1, T, S], such as a window; a query that does not see BOS, or
        no key between, does not count. None is a causal mask.

    Returns:
      nan if no query qualifies.
    """
    return mean_over_heads(sink_logit_gap_sum(logits, is_trigger, bos_count, visible))


def logit_sums(
    logits: ArrayLike,
    tokens: ArrayLike,
    is_trigger: ArrayLike,
    vocab_size: int,
    bos_count: int = 1,
    visible: ArrayLike | None = None,
) -> dict[str, SumAndCount]:
    """Sums the logits of one batch for `logit_summary`, with tokens int [B, T] of V ids; sums of two batches add up.

    Returns name -> (sum, number of terms), with a last axis of N heads in the sum; `sink_logit` and
    `sink_logit_squared` over queries; `gap_of_token` over the queries of each token, [V, N] and [V]; `logit_of_token`
    and `logit_of_token_squared` over the pairs of a query and another key, by the token of the key, [V, N] and [V].
    """
    on_bos, logits, between, dormant = _split(logits, is_trigger, bos_count, visible)
    token = jax.nn.one_hot(tokens, vocab_size, dtype=logits.dtype)  # [B, T, V]
    of_queries = jnp.where(dormant[..., None], token, 0.0)
    pairs = dormant[..., None] & between
    counted = jnp.where(pairs[:, None], logits, 0.0)
    gap = jnp.where(dormant[:, None], _gap(on_bos, logits, between), 0.0)  # 0 times nan would be nan
    of_keys = jnp.sum(pairs, axis=1, dtype=jnp.int32)[..., None] * token.astype(jnp.int32)
    queries, keys = jnp.sum(of_queries, axis=(0, 1)).astype(jnp.int32), jnp.sum(of_keys, axis=(0, 1))
    return {
        "sink_logit": by_head(on_bos, dormant),
        "sink_logit_squared": by_head(on_bos**2, dormant),
        "gap_of_token": (jnp.einsum("BNT,BTV->VN", gap, of_queries), queries),
        "logit_of_token": (jnp.einsum("BNTS,BSV->VN", counted, token), keys),
        "logit_of_token_squared": (jnp.einsum("BNTS,BSV->VN", counted**2, token), keys),
    }


def logit_summary(means: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Computes metrics on the host from `logit_sums`, given as sum / number of terms by name with any axes in front.

    Returns for each head `sink_logit`, the mean logit on BOS; `sink_logit_gap_tokens`, the mean of `sink_logit_gap`
    over the tokens of the query, however often each occurs, and `sink_logit_gap_q10` and `_q90`, its quantiles over
    them: the line and the band of the paper's Figure 4; `sink_logit_spread`, the standard deviation of the logit on BOS
    over queries; `other_logit_spread`, the mean over all other tokens of the standard deviation of logits on keys with
    that token. The logits on BOS are concentrated if `sink_logit_spread` is the smaller. nan if nothing was seen. Sums
    are float32: a spread below a thousandth of the logits' size is not resolved.
    """
    of_token, of_token_squared = (np.asarray(means[f"logit_of_token{end}"], float) for end in ("", "_squared"))
    mean, squared = (np.asarray(means[f"sink_logit{end}"], float) for end in ("", "_squared"))
    with np.errstate(invalid="ignore"):
        gap_of_token = np.asarray(means["gap_of_token"], float)
        gaps = np.nanquantile(gap_of_token, (0.1, 0.9), axis=-2)
        return {
            "sink_logit": mean,
            "sink_logit_gap_tokens": np.nanmean(gap_of_token, axis=-2),
            "sink_logit_gap_q10": gaps[0],
            "sink_logit_gap_q90": gaps[1],
            "sink_logit_spread": np.sqrt(np.maximum(squared - mean**2, 0.0)),
            "other_logit_spread": np.nanmean(np.sqrt(np.maximum(of_token_squared - of_token**2, 0.0)), axis=-2),
        }
