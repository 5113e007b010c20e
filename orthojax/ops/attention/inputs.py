"""The arguments of attention: checked once, with a batch axis, for every implementation."""

import dataclasses
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from orthojax.ops.normalizers import Normalizer, check_normalizer
from orthojax.ops.statistics import real_array, wide_dtype

# Vendor kernels save their output and statistics under this name: with a remat policy that keeps it, such as
# jax.checkpoint_policies.save_only_these_names(ATTENTION_NAME), the forward kernel runs once.
ATTENTION_NAME = "attn_out"
_REAL = ("real floating", "integral")
_FAR = 2**30  # beyond any position, and positions may be added to it in int32
Window = tuple[int | jax.Array, int | jax.Array]  # (left, right): numbers, or traced integers []


@dataclasses.dataclass(frozen=True)
class AttentionInputs:
    """The arguments of `dot_product_attention`, checked, with a batch axis and without defaults left to fill in."""

    query: jax.Array  # [B, T, N, H]
    key: jax.Array  # [B, S, K, H]; K divides N
    value: jax.Array  # [B, S, K, V]
    bias: jax.Array | None  # [B or 1, N or 1, T or 1, S or 1]
    mask: jax.Array | None  # boolean, shaped likewise
    normalizer: Normalizer
    scale: float | jax.Array  # an array is shaped as the bias
    is_causal: bool = False
    query_seq_lengths: jax.Array | None = None  # int [B]
    key_value_seq_lengths: jax.Array | None = None  # int [B]
    segment_ids: tuple[jax.Array, jax.Array] | None = None  # int [B, T] and [B, S]
    local_window_size: Window | None = None
    logits_soft_cap: float | None = None


def prepare_inputs(
    query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, *, normalizer: Normalizer, **options: Any
) -> AttentionInputs:
    """Checks the arguments of `dot_product_attention`, of which it has all others, and gives arrays a batch axis."""
    if not 3 <= (query := real_array(query, "query")).ndim <= 4:
        problem = f"query must be [batch, length, heads, width] or [length, heads, width]; got {query.shape}"
        raise ValueError(problem)
    query, key, value = _at_least_4d(query), _at_least_4d(key, "key"), _at_least_4d(value, "value")
    bias = None if bias is None else _at_least_4d(bias, "bias")
    mask = None if mask is None else _at_least_4d(mask, "mask")
    lengths = {name: options.get(name) for name in ("query_seq_lengths", "key_value_seq_lengths")}
    lengths = {name: None if array is None else real_array(array, name) for name, array in lengths.items()}
    _check_queries_and_keys(query, key, value)
    for name, array in {"query": query, "key": key, "value": value}.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} must be of a floating dtype, got {array.dtype}")
    if bias is not None and not jnp.isdtype(bias.dtype, _REAL):
        raise ValueError(f"bias must be of a floating or integer dtype, got {bias.dtype}; what hides keys is a mask")
    if bias is not None and jnp.isdtype(bias.dtype, "integral"):
        bias = bias.astype(wide_dtype(query))
    if not isinstance(options.get("is_causal", False), bool | np.bool_):
        raise ValueError(f"is_causal must be True or False, got {options['is_causal']!r}")
    scale, window, cap = (options.get(name) for name in ("scale", "local_window_size", "logits_soft_cap"))
    scale = _checked_scale(max(query.shape[-1], 1) ** -0.5 if scale is None else scale)
    if cap is not None and not (isinstance(cap, int | float | np.number) and 0.0 < cap < math.inf):
        raise ValueError(f"logits_soft_cap must be a finite positive number, got {cap!r}")
    arrays = {"bias": bias, "mask": mask, "scale": scale if isinstance(scale, jax.Array) else None}
    _check_masking(query.shape[:3] + key.shape[1:2], arrays, lengths)
    check_normalizer(normalizer, query.shape[2])
    options |= {"scale": scale, "logits_soft_cap": None if cap is None else float(cap), **lengths}
    options["local_window_size"] = None if window is None else window_sides(window)
    options["segment_ids"] = _checked_segments(options.get("segment_ids"), query.shape[:2], key.shape[:2])
    return AttentionInputs(query, key, value, bias, mask, normalizer, **options)


def _checked_scale(scale: Any) -> float | jax.Array:
    if isinstance(scale, int | float | np.number) and not isinstance(scale, bool) and math.isfinite(scale):
        return float(scale)
    if isinstance(scale, jax.Array | np.ndarray) and jnp.isdtype(scale.dtype, _REAL):
        return _at_least_4d(scale)
    raise ValueError(f"scale must be a finite number or an array of numbers, got {scale!r}")


def _at_least_4d(array: ArrayLike, what: str = "values") -> jax.Array:
    array = real_array(array, what)
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def _check_queries_and_keys(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    if query.ndim != 4 or key.ndim != 4:
        raise ValueError(f"query and key must be [batch, length, heads, width]; got {query.shape} and {key.shape}")
    if key.shape[:3] != value.shape[:3] or value.ndim != 4:
        raise ValueError(f"key and value may differ in their widths only; got {key.shape} and {value.shape}")
    (B, _, N, H), K = query.shape, key.shape[2]
    if key.shape[0] != B or key.shape[3] != H:
        raise ValueError(f"query {query.shape} and key {key.shape} differ in batch or head width")
    if K == 0 or N % K:
        raise ValueError(f"the number of query heads ({N}) must be a multiple of the key-value heads ({K})")
    for name, array in {"key": key, "value": value}.items():
        spec = (*jax.typeof(array).sharding.spec, None, None, None, None)[:4]  # without axes that are not Explicit
        if spec[1] or (name == "key" and spec[3]):
            allowed = "batch and heads, and the sequence of queries; gather the rest by jax.sharding.reshard"
            raise ValueError(f"{name} is sharded along its sequence or width, {spec}; allowed: {allowed}")


def _check_masking(shape: tuple[int, ...], arrays: dict[str, Any], lengths: dict[str, Any]) -> None:
    B, T, N, S = shape
    for name, array in arrays.items():
        if array is None:
            continue
        if array.ndim != 4 or any(a not in (1, b) for a, b in zip(array.shape, (B, N, T, S), strict=True)):
            raise ValueError(f"{name} has shape {array.shape}, which does not broadcast to {(B, N, T, S)}")
    if (mask := arrays["mask"]) is not None and mask.dtype != jnp.bool_:
        raise ValueError(f"mask must be boolean (True keeps), got {mask.dtype}; an additive mask is a bias")
    for name, array in lengths.items():
        if array is not None and (array.shape != (B,) or not jnp.issubdtype(array.dtype, jnp.integer)):
            raise ValueError(f"{name} must be integers of shape {(B,)}, got {array.dtype} of shape {array.shape}")


def _checked_segments(ids: Any, queries: tuple[int, ...], keys: tuple[int, ...]) -> tuple[jax.Array, jax.Array] | None:
    """Returns the ids of queries and of keys, one array for both if one is given."""
    if ids is None:
        return None
    arrays = [real_array(array, "segment_ids") for array in (ids if isinstance(ids, tuple | list) else [ids])]
    arrays = [array[None] if array.ndim == 1 else array for array in arrays]
    is_integer = all(jnp.issubdtype(array.dtype, jnp.integer) for array in arrays)
    if not 1 <= len(arrays) <= 2 or not is_integer or (arrays[0].shape, arrays[-1].shape) != (queries, keys):
        found = " and ".join(f"{array.dtype} of shape {array.shape}" for array in arrays)
        raise ValueError(f"segment_ids must be integers of shape {queries}, and {keys} for the keys; got {found}")
    return arrays[0], arrays[-1]


def window_sides(size: Any) -> Window:
    """Returns (left, right) of a `local_window_size`; ValueError for anything but one integer or two."""
    try:
        sides = tuple(size) if isinstance(size, tuple | list) or jnp.ndim(size) else (size, size)
        left, right = map(_side, sides)
    except (TypeError, ValueError):
        raise ValueError(f"local_window_size must be one integer or two, (left, right); got {size}") from None
    return left, right


def _side(size: Any) -> int | jax.Array:
    if not isinstance(size, Tracer):
        if isinstance(size, bool):
            raise TypeError
        return max(min(operator.index(size), _FAR), -_FAR)
    if size.ndim or not jnp.issubdtype(size.dtype, jnp.integer):
        raise TypeError
    low = 0 if jnp.issubdtype(size.dtype, jnp.unsignedinteger) else max(-_FAR, int(jnp.iinfo(size.dtype).min))
    return jnp.clip(size, low, min(_FAR, int(jnp.iinfo(size.dtype).max))).astype(jnp.int32)


def known_window(window: Window | None) -> tuple[int, int] | None:
    """Returns a window of two numbers; None without a window, or if it is traced."""
    left, right = window or (None, None)
    return (left, right) if isinstance(left, int) and isinstance(right, int) else None


def unsupported_window(window: Window | None) -> str:
    """Returns why a kernel, which is compiled for its window, cannot have this one, or ""."""
    if window is None or min(known_window(window) or (-1,)) >= 0:
        return ""
    return f"a window must be numbers >= 0 that are known when tracing, got {window}"
