"""Attention by plain XLA operations, and the logits that every implementation computes."""

import jax
import jax.numpy as jnp

from orthojax.ops.attention.inputs import AttentionInputs
from orthojax.ops.normalizers import Normalizer, apply_normalizer


def attention_logits(
    query: jax.Array, key: jax.Array, bias: jax.Array | None = None, *, scale: float | None = None
) -> jax.Array:
    """Scaled products of queries and keys, before any mask.

    Args:
      query: [B, T, N, H].
      key: [B, S, K, H] with K dividing N; query head n attends with key head n // (N / K).
      bias: Added to the logits; broadcasts to [B, N, T, S].
      scale: Factor of the products; 1 / sqrt(H) where None.

    Returns:
      [B, N, T, S] in float32 (float64 for float64 inputs).
    """
    B, T, N, H = query.shape
    S, K = key.shape[1:3]
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    if N == K:
        # On CPU the grouped einsum with a group of one is slower, and so is the backward pass of an einsum that leaves
        # the order of axes to XLA: it then transposes [B, N, T, S] arrays instead of these.
        query, key = query.transpose(0, 2, 1, 3), key.transpose(0, 2, 3, 1)
        logits = jnp.matmul(query, key, preferred_element_type=dtype)
    else:
        grouped = query.reshape(B, T, K, N // K, H)
        logits = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, key, preferred_element_type=dtype).reshape(B, N, T, S)
    logits *= jnp.asarray(H**-0.5 if scale is None else scale, dtype)
    return logits if bias is None else logits + bias.astype(dtype)


def attend_visible(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    visible: jax.Array | None,
    *,
    normalizer: Normalizer,
    scale: float,
) -> jax.Array:
    """Attention of some queries to some keys, by the whole matrix of weights between them.

    Args:
      query: [B, T, N, H].
      key: [B, S, K, H].
      value: [B, S, K, H].
      bias: Added to the logits; broadcasts to [B, N, T, S].
      visible: Boolean, broadcasts to [B, N, T, S]; None where every query sees every key.
      normalizer: See `orthojax.ops.normalizers`.
      scale: Factor of the logits.

    Returns:
      [B, T, N, H] in the dtype of `value`.
    """
    B, T, N, H = query.shape
    K = value.shape[2]
    logits = attention_logits(query, key, bias, scale=scale)
    weights = apply_normalizer(normalizer, logits, visible).astype(value.dtype)
    # Straight to [B, T, N, H], XLA for CPU would transpose the weights, which are larger than the output.
    if N == K:
        return jnp.einsum("BNTS,BSNH->BNTH", weights, value).transpose(0, 2, 1, 3)
    grouped = weights.reshape(B, K, N // K, T, -1)
    return jnp.einsum("BKGTS,BSKH->BKGTH", grouped, value).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def without_padding(output: jax.Array, query_seq_lengths: jax.Array | None) -> jax.Array:
    """Zeros for queries that are padding: `softmax` spreads their weight over all keys, jax.nn zeroes their output."""
    if query_seq_lengths is None:
        return output
    padding = jnp.arange(output.shape[1])[None, :, None, None] >= query_seq_lengths[:, None, None, None]
    return jnp.where(padding, 0, output)


def unsupported(inputs: AttentionInputs) -> str:
    """Nothing is: "" for all inputs."""
    del inputs
    return ""


def attend(inputs: AttentionInputs) -> jax.Array:
    """Attention by the whole matrix of weights, for every normalizer and every kind of mask.

    Args:
      inputs: Arrays of any floating dtype; logits and weights are float32 at least.

    Returns:
      [B, T, N, H] in the dtype of `value`.
    """
    output = attend_visible(
        inputs.query,
        inputs.key,
        inputs.value,
        inputs.bias,
        inputs.visible(),
        normalizer=inputs.normalizer,
        scale=inputs.scale,
    )
    return without_padding(output, inputs.query_seq_lengths)
