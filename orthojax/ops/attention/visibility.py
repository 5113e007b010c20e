"""Which keys each query sees."""

import operator

import jax
import jax.numpy as jnp


def window_sides(size: int | tuple[int, int]) -> tuple[int, int]:
    """(left, right) of a `local_window_size`.

    Raises:
      ValueError: For anything but one int or two, each >= 0.
    """
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
    query_start: int | jax.Array = 0,
    key_start: int | jax.Array = 0,
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
      query_start: Position of the first of these queries, where they are a part of the sequence; `mask` is of the part.
      key_start: Position of the first of these keys.

    Returns:
      Boolean mask that broadcasts to [B, N, T, S], or None where every query sees every key.
    """
    t = (query_start + jnp.arange(query_length))[:, None]
    s = (key_start + jnp.arange(key_length))[None, :]
    parts: list[jax.Array] = [] if mask is None else [mask]
    if is_causal:
        parts.append((s <= t)[None, None])
    if local_window_size is not None:
        left, right = window_sides(local_window_size)
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
