"""The attention logits behind a sink: the gap between BOS and other keys, and the spread of its logits.

Active-Dormant Attention Heads, arXiv 2410.13835. Everything concerns queries at which a head should be dormant: tokens
that are not triggers, with at least one other key between BOS and themselves. Legend: B batch, N query heads, T query
positions, S key positions, V vocabulary. Functions take one layer; arrays of other shapes raise ValueError.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from orthojax.analysis.backcopy import SumAndCount, by_head, mean_over_heads
from orthojax.analysis.inputs import of_one_layer, triggers
from orthojax.ops.statistics import at_least_float32

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

    Returns:
      Name -> (sum, number of terms), with a last axis of N heads in the sum; `sink_logit` and `sink_logit_squared` over
      queries; `gap_of_token` over the queries of each token, [V, N] and [V]; `logit_of_token` and
      `logit_of_token_squared` over the pairs of a query and another key, by the token of the key, [V, N] and [V].
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

    Returns:
      For each head `sink_logit`, the mean logit on BOS; `sink_logit_gap_tokens`, the mean of `sink_logit_gap` over the
      tokens of the query, however often each occurs, and `sink_logit_gap_q10` and `_q90`, its quantiles over them: the
      line and the band of the paper's Figure 4; `sink_logit_spread`, the standard deviation of the logit on BOS over
      queries; `other_logit_spread`, the mean over all other tokens of the standard deviation of logits on keys with
      that token. The logits on BOS are concentrated if `sink_logit_spread` is the smaller. nan if nothing was seen.
      Sums are float32: a spread below a thousandth of the logits' size is not resolved.
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
