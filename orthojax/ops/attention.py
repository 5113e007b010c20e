"""Dot-product attention with any normalizer.

Letters inside functions: B batch, T query positions, S key positions, N query heads, K key-value heads, G = N / K,
H head width.
"""

import operator
from typing import Literal

import jax
import jax.numpy as jnp

from orthojax.ops.normalizers import Normalizer, apply_normalizer

Implementation = Literal["xla"]


def _window(size: int | tuple[int, int]) -> tuple[int, int]:
    """(left, right) of a `local_window_size`."""
    try:
        left, right = map(operator.index, size if isinstance(size, tuple | list) else (size, size))
    except (TypeError, ValueError):
        left = right = -1
    if min(left, right) < 0:
        raise ValueError(f"local_window_size must be one int or (left, right), each >= 0, got {size}")
    return left, right


def visible_keys(
    batch: int,
    query_length: int,
    key_length: int,
    *,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
) -> jax.Array | None:
    """Which keys each query sees: everything that hides a key, in one boolean mask.

    Args:
      batch: Number of sequences, for the shape of sequence lengths.
      query_length: T.
      key_length: S.
      mask: Boolean [B or 1, N or 1, T or 1, S or 1]; True keeps.
      is_causal: Query t sees keys 0..t.
      query_seq_lengths: int32 [B]; queries from this position on see nothing.
      key_value_seq_lengths: int32 [B]; keys from this position on are seen by none.
      local_window_size: Query t sees keys t - left .. t + right; an int means both sides.

    Returns:
      Boolean mask that broadcasts to [B, N, T, S], or None where every query sees every key.
    """
    t = jnp.arange(query_length)[:, None]
    s = jnp.arange(key_length)[None, :]
    parts: list[jax.Array] = [] if mask is None else [mask]
    if is_causal:
        parts.append((s <= t)[None, None])
    if local_window_size is not None:
        left, right = _window(local_window_size)
        parts.append(((s >= t - left) & (s <= t + right))[None, None])
    if query_seq_lengths is not None:
        parts.append((t[None] < query_seq_lengths.reshape(batch, 1, 1))[:, None])
    if key_value_seq_lengths is not None:
        parts.append((s[None] < key_value_seq_lengths.reshape(batch, 1, 1))[:, None])
    if not parts:
        return None
    visible = parts[0]
    for part in parts[1:]:
        visible = visible & part
    return visible


def relaxed_causal_mask(length: int, relaxed: int) -> jax.Array:
    """The causal mask with the first `relaxed` tokens seeing each other (From Attention to Activation, section 3.2).

    Args:
      length: T.
      relaxed: k; 0 or 1 is the causal mask.

    Returns:
      Boolean [1, 1, T, T].
    """
    t, s = jnp.arange(length)[:, None], jnp.arange(length)[None, :]
    return ((s <= t) | ((t < relaxed) & (s < relaxed)))[None, None]


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


def _xla_attention(query, key, value, bias, visible, query_seq_lengths, normalizer, scale) -> jax.Array:
    B, T, N, H = query.shape
    K = value.shape[2]
    weights = apply_normalizer(normalizer, attention_logits(query, key, bias, scale=scale), visible)
    weights = weights.astype(value.dtype)
    if N == K:
        output = jnp.einsum("BNTS,BSNH->BTNH", weights, value)
    else:
        grouped = weights.reshape(B, K, N // K, T, -1)
        output = jnp.einsum("BKGTS,BSKH->BTKGH", grouped, value).reshape(B, T, N, H)
    if query_seq_lengths is not None:  # softmax spreads the weight of such a query; jax.nn zeroes its output
        padding = jnp.arange(T)[None, :, None, None] >= query_seq_lengths[:, None, None, None]
        output = jnp.where(padding, 0, output)
    return output


def _check_shapes(query, key, value, bias, mask, lengths, local_window_size) -> None:
    if query.ndim != 4 or key.ndim != 4:
        raise ValueError(f"query and key must be [batch, length, heads, width]; got {query.shape} and {key.shape}")
    if key.shape != value.shape:
        raise ValueError(f"key and value must agree in shape; got {key.shape} and {value.shape}")
    B, T, N, H = query.shape
    S, K = key.shape[1:3]
    if key.shape[0] != B or key.shape[3] != H:
        raise ValueError(f"query {query.shape} and key {key.shape} differ in batch or head width")
    if K == 0 or N % K:
        raise ValueError(f"the number of query heads ({N}) must be a multiple of the key-value heads ({K})")
    for name, array in (("bias", bias), ("mask", mask)):
        if array is None:
            continue
        fits = array.ndim == 4 and all(a in (1, b) for a, b in zip(array.shape, (B, N, T, S), strict=True))
        if not fits:
            raise ValueError(f"{name} has shape {array.shape}, which does not broadcast to {(B, N, T, S)}")
    if mask is not None and mask.dtype != jnp.bool_:
        raise ValueError(f"mask must be boolean (True keeps), got {mask.dtype}; an additive mask is a bias")
    for name, array in lengths.items():
        if array is not None and (array.shape != (B,) or not jnp.issubdtype(array.dtype, jnp.integer)):
            raise ValueError(f"{name} must be integers of shape {(B,)}, got {array.dtype} of shape {array.shape}")
    if local_window_size is not None:
        _window(local_window_size)


def _at_least_4d(array: jax.Array) -> jax.Array:
    array = jnp.asarray(array)
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    normalizer: Normalizer = "softmax1",
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Attention with the layout and the argument meanings of `jax.nn.dot_product_attention`, and any normalizer.

    weights = normalizer(scale * query @ key^T + bias), output = weights @ value. Logits and weights are computed in
    float32 at least; the weights are rounded to the dtype of `value` for the second product.

    Args:
      query: [B, T, N, H], or [T, N, H] for one sequence.
      key: [B, S, K, H] or [S, K, H]; K divides N (grouped-query attention).
      value: [B, S, K, H] or [S, K, H].
      bias: Added to the logits; [B or 1, N or 1, T or 1, S or 1], missing leading axes are 1.
      mask: Boolean, True keeps; [B or 1, N or 1, T or 1, S or 1], missing leading axes are 1.
      normalizer: "softmax1" | "softmax" | "relu" | "sigmoid", a number n (softmax_n), or an array [N] of learned
        sink logits, one for each query head. See `orthojax.ops.normalizers`.
      scale: Factor of the logits; 1 / sqrt(H) where None.
      is_causal: Query t sees keys 0..t.
      query_seq_lengths: int32 [B]; the output of queries from this position on is zero.
      key_value_seq_lengths: int32 [B]; keys from this position on are not seen.
      local_window_size: Query t sees keys t - left .. t + right; an int means both sides.
      implementation: None picks; "xla" computes the whole matrix of weights.

    Returns:
      Shape of `query`, dtype of `value`.

    Raises:
      ValueError: For shapes that do not fit, a mask that is not boolean, an unknown normalizer or implementation.

    >>> import jax, jax.numpy as jnp
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 5, 2, 8))
    >>> dot_product_attention(q, k, v, is_causal=True).shape
    (1, 5, 2, 8)
    """
    if implementation not in (None, "xla"):
        raise ValueError(f"unknown implementation {implementation!r}; allowed: None, 'xla'")
    shape = jnp.shape(query)
    if not 3 <= len(shape) <= 4:
        raise ValueError(f"query must be [batch, length, heads, width] or [length, heads, width]; got {shape}")
    query, key, value = _at_least_4d(query), _at_least_4d(key), _at_least_4d(value)
    bias, mask = (None if array is None else _at_least_4d(array) for array in (bias, mask))
    lengths = {"query_seq_lengths": query_seq_lengths, "key_value_seq_lengths": key_value_seq_lengths}
    lengths = {name: None if array is None else jnp.asarray(array) for name, array in lengths.items()}
    _check_shapes(query, key, value, bias, mask, lengths, local_window_size)
    visible = visible_keys(
        query.shape[0],
        query.shape[1],
        key.shape[1],
        mask=mask,
        is_causal=is_causal,
        local_window_size=local_window_size,
        **lengths,
    )
    query_seq_lengths = lengths["query_seq_lengths"]
    return _xla_attention(query, key, value, bias, visible, query_seq_lengths, normalizer, scale).reshape(shape)
