"""Attention by plain XLA operations, and the logits that every implementation computes."""

import jax
import jax.numpy as jnp

from orthojax.ops.attention.inputs import AttentionInputs
from orthojax.ops.normalizers import apply_normalizer


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
    if N == K:  # the grouped einsum with a group of one is slower on CPU
        logits = jnp.einsum("BTNH,BSNH->BNTS", query, key, preferred_element_type=dtype)
    else:
        grouped = query.reshape(B, T, K, N // K, H)
        logits = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, key, preferred_element_type=dtype).reshape(B, N, T, S)
    logits *= jnp.asarray(H**-0.5 if scale is None else scale, dtype)
    return logits if bias is None else logits + bias.astype(dtype)


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
    query, key, value = inputs.query, inputs.key, inputs.value
    B, T, N, H = query.shape
    K = value.shape[2]
    logits = attention_logits(query, key, inputs.bias, scale=inputs.scale)
    weights = apply_normalizer(inputs.normalizer, logits, inputs.visible())
    weights = weights.astype(value.dtype)
    if N == K:
        output = jnp.einsum("BNTS,BSNH->BTNH", weights, value)
    else:
        grouped = weights.reshape(B, K, N // K, T, -1)
        output = jnp.einsum("BKGTS,BSKH->BTKGH", grouped, value).reshape(B, T, N, H)
    if inputs.query_seq_lengths is not None:  # softmax spreads the weight of such a query; jax.nn zeroes its output
        padding = jnp.arange(T)[None, :, None, None] >= inputs.query_seq_lengths[:, None, None, None]
        output = jnp.where(padding, 0, output)
    return output
