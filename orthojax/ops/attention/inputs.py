"""The arguments of one call of attention, checked once for every implementation."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orthojax.ops.attention.visibility import visible_keys, window_sides
from orthojax.ops.normalizers import Normalizer, check_normalizer

# Under this name the vendors' kernels save their output and statistics: where a remat policy keeps it, as in
# jax.checkpoint_policies.save_only_these_names(ATTENTION_NAME), attention runs forward once.
ATTENTION_NAME = "attn_out"


@dataclasses.dataclass(frozen=True)
class AttentionInputs:
    """What `dot_product_attention` was given, in one form.

    Attributes:
      query: [B, T, N, H].
      key: [B, S, K, H]; K divides N.
      value: [B, S, K, H].
      bias: [B or 1, N or 1, T or 1, S or 1], added to the logits.
      mask: Boolean, same shapes; True keeps.
      normalizer: See `orthojax.ops.normalizers`.
      scale: Factor of the logits.
      is_causal: Query t sees keys 0..t.
      query_seq_lengths: int [B]; the output of queries from this position on is zero.
      key_value_seq_lengths: int [B]; keys from this position on are not seen.
      local_window_size: (left, right): query t sees keys t - left .. t + right.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array | None
    mask: jax.Array | None
    normalizer: Normalizer
    scale: float
    is_causal: bool
    query_seq_lengths: jax.Array | None
    key_value_seq_lengths: jax.Array | None
    local_window_size: tuple[int, int] | None

    def visible(self) -> jax.Array | None:
        """Boolean mask that broadcasts to [B, N, T, S], or None where every query sees every key."""
        return visible_keys(
            self.query.shape[0],
            self.query.shape[1],
            self.key.shape[1],
            mask=self.mask,
            is_causal=self.is_causal,
            query_seq_lengths=self.query_seq_lengths,
            key_value_seq_lengths=self.key_value_seq_lengths,
            local_window_size=self.local_window_size,
        )


def _check_kinds(scale: Any, **arrays: jax.Array | None) -> None:
    for name, array in arrays.items():
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} must be of a floating dtype, got {array.dtype}")
    if scale is not None and (
        not isinstance(scale, int | float | np.number | np.ndarray | jax.Array) or np.ndim(scale)
    ):
        raise ValueError(f"scale must be a number, got {scale!r}")


def _check_shapes(query, key, value, bias, mask, lengths, local_window_size) -> None:
    if query.ndim != 4 or key.ndim != 4:
        raise ValueError(f"query and key must be [batch, length, heads, width]; got {query.shape} and {key.shape}")
    if key.shape != value.shape:
        raise ValueError(f"key and value must agree in shape; got {key.shape} and {value.shape}")
    B, T, N, H = query.shape
    S, K = key.shape[1:3]
    if key.shape[0] != B or key.shape[3] != H:
        raise ValueError(f"query {query.shape} and key {key.shape} differ in batch or head width")
    if S == 0:
        raise ValueError(f"there are no keys: key has shape {key.shape}")
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
        window_sides(local_window_size)


def _at_least_4d(array: jax.Array) -> jax.Array:
    array = jnp.asarray(array)
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def prepare_inputs(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    normalizer: Normalizer,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
) -> AttentionInputs:
    """Checks the arguments of `dot_product_attention` and gives them a leading batch axis.

    Raises:
      ValueError: For shapes or dtypes that do not fit, a mask that is not boolean, or a normalizer that is none.
    """
    shape = jnp.shape(query)
    if not 3 <= len(shape) <= 4:
        raise ValueError(f"query must be [batch, length, heads, width] or [length, heads, width]; got {shape}")
    query, key, value = _at_least_4d(query), _at_least_4d(key), _at_least_4d(value)
    bias, mask = (None if array is None else _at_least_4d(array) for array in (bias, mask))
    lengths = {"query_seq_lengths": query_seq_lengths, "key_value_seq_lengths": key_value_seq_lengths}
    lengths = {name: None if array is None else jnp.asarray(array) for name, array in lengths.items()}
    _check_shapes(query, key, value, bias, mask, lengths, local_window_size)
    _check_kinds(scale, query=query, key=key, value=value, bias=bias)
    check_normalizer(normalizer, query.shape[2])
    return AttentionInputs(
        query,
        key,
        value,
        bias,
        mask,
        normalizer,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        is_causal=is_causal,
        local_window_size=None if local_window_size is None else window_sides(local_window_size),
        **lengths,
    )
