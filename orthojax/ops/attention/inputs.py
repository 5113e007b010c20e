"""The arguments of attention: checked once, with a batch axis, for every implementation."""

import dataclasses
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orthojax.ops.normalizers import Normalizer, check_normalizer

# Vendor kernels save their output and statistics under this name: with a remat policy that keeps it, such as
# jax.checkpoint_policies.save_only_these_names(ATTENTION_NAME), the forward kernel runs once.
ATTENTION_NAME = "attn_out"


@dataclasses.dataclass(frozen=True)
class AttentionInputs:
    """The arguments of `dot_product_attention`, checked, with a batch axis and without defaults left to fill in."""

    query: jax.Array  # [B, T, N, H]
    key: jax.Array  # [B, S, K, H]; K divides N
    value: jax.Array  # [B, S, K, H]
    bias: jax.Array | None  # [B or 1, N or 1, T or 1, S or 1]
    mask: jax.Array | None  # boolean, shaped likewise
    normalizer: Normalizer
    scale: float
    is_causal: bool = False
    query_seq_lengths: jax.Array | None = None  # int [B]
    key_value_seq_lengths: jax.Array | None = None  # int [B]
    local_window_size: tuple[int, int] | None = None  # (left, right)


def prepare_inputs(
    query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, *, normalizer: Normalizer, **options: Any
) -> AttentionInputs:
    """Checks the arguments of `dot_product_attention`, which it shares, and gives arrays a batch axis.

    Raises:
      ValueError: For shapes or dtypes that do not fit, a mask that is not boolean, or an unknown normalizer.
    """
    if not 3 <= jnp.ndim(query) <= 4:
        shape = jnp.shape(query)
        raise ValueError(f"query must be [batch, length, heads, width] or [length, heads, width]; got {shape}")
    query, key, value = _at_least_4d(query), _at_least_4d(key), _at_least_4d(value)
    bias, mask = (None if array is None else _at_least_4d(array) for array in (bias, mask))
    lengths = {name: options.get(name) for name in ("query_seq_lengths", "key_value_seq_lengths")}
    lengths = {name: None if array is None else jnp.asarray(array) for name, array in lengths.items()}
    _check_queries_and_keys(query, key, value)
    _check_masking(query.shape[:3] + key.shape[1:2], bias, mask, lengths)
    for name, array in {"query": query, "key": key, "value": value, "bias": bias}.items():
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} must be of a floating dtype, got {array.dtype}")
    scale, window = options.get("scale"), options.get("local_window_size")
    is_number = isinstance(scale, int | float | np.number | np.ndarray | jax.Array) and not np.ndim(scale)
    if not (scale is None or is_number):
        raise ValueError(f"scale must be a number, got {scale!r}")
    check_normalizer(normalizer, query.shape[2])
    options |= {"scale": max(query.shape[-1], 1) ** -0.5 if scale is None else scale, **lengths}
    options["local_window_size"] = None if window is None else window_sides(window)
    return AttentionInputs(query, key, value, bias, mask, normalizer, **options)


def _at_least_4d(array: jax.Array) -> jax.Array:
    array = jnp.asarray(array)
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def _check_queries_and_keys(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    if query.ndim != 4 or key.ndim != 4:
        raise ValueError(f"query and key must be [batch, length, heads, width]; got {query.shape} and {key.shape}")
    if key.shape != value.shape:
        raise ValueError(f"key and value must have the same shape; got {key.shape} and {value.shape}")
    (B, _, N, H), K = query.shape, key.shape[2]
    if key.shape[0] != B or key.shape[3] != H:
        raise ValueError(f"query {query.shape} and key {key.shape} differ in batch or head width")
    if K == 0 or N % K:
        raise ValueError(f"the number of query heads ({N}) must be a multiple of the key-value heads ({K})")


def _check_masking(shape: tuple[int, ...], bias: Any, mask: Any, lengths: dict[str, Any]) -> None:
    B, T, N, S = shape
    for name, array in (("bias", bias), ("mask", mask)):
        if array is None:
            continue
        if array.ndim != 4 or any(a not in (1, b) for a, b in zip(array.shape, (B, N, T, S), strict=True)):
            raise ValueError(f"{name} has shape {array.shape}, which does not broadcast to {(B, N, T, S)}")
    if mask is not None and mask.dtype != jnp.bool_:
        raise ValueError(f"mask must be boolean (True keeps), got {mask.dtype}; an additive mask is a bias")
    for name, array in lengths.items():
        if array is not None and (array.shape != (B,) or not jnp.issubdtype(array.dtype, jnp.integer)):
            raise ValueError(f"{name} must be integers of shape {(B,)}, got {array.dtype} of shape {array.shape}")


def window_sides(size: int | tuple[int, int]) -> tuple[int, int]:
    """Returns (left, right) of a `local_window_size`.

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
