"""Attention by the splash kernel on TPUs: exp(x_i) / (exp(a) + sum_j exp(x_j)) with the sink a inside the kernel.

softmax-1 is a = 0 and costs what softmax costs. Our tests have no TPU: numbers are those of the kernel in interpret
mode, structure that of its lowering for TPUs.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from orthojax.ops.attention.dot_product import AttentionInputs
from orthojax.ops.normalizers import sink_logit

try:
    from orthojax.ops.attention import splash_kernel

    _MISSING = ""
except ImportError as error:  # an experimental module of jax: it may move
    _MISSING = f"jax {jax.__version__} has no splash kernel ({error})"

_INTERPRET = False  # set by tests: the kernel as plain XLA, without a TPU
_DTYPES = ("float32", "bfloat16")
_LENGTH_MULTIPLE = 128
_WIDTH_MULTIPLE = 64
# Stands for a sink of -inf, with which a row that sees nothing would be 0 / 0; its exp is zero beside any logit.
_NO_SINK = -1e38


def unsupported(inputs: AttentionInputs) -> str:
    """Why the kernel does not support the arguments, naming what is allowed, or ""."""
    dtypes = sorted({str(a.dtype) for a in (inputs.query, inputs.key, inputs.value)})
    if _MISSING:
        return _MISSING
    if getattr(getattr(jax.typeof(inputs.query), "mat", None), "varying", ()):
        return "splash's results carry no record of mesh axes; allowed within shard_map: check_vma=False"
    if jax.config.read("jax_enable_x64"):
        return "splash's index arithmetic mixes int32 with the wider default; allowed: jax_enable_x64 off"
    if inputs.bias is not None:
        return "the kernel adds no bias; allowed: bias=None"
    if inputs.mask is not None:
        return "the kernel takes no mask array; allowed: is_causal, local_window_size and sequence lengths"
    if sink_logit(inputs.normalizer) is None:
        allowed = "'softmax1', 'softmax', a number, an array [heads]"
        return f"normalizer {inputs.normalizer!r} has no kernel; allowed: {allowed}"
    if len(dtypes) > 1 or dtypes[0] not in _DTYPES:
        return f"query, key and value are {', '.join(dtypes)}; allowed: one of {', '.join(_DTYPES)} for all three"
    return ""


def unavailable() -> str:
    """Why the kernel cannot run in this process, or ""."""
    if _MISSING:
        return _MISSING
    backend = jax.default_backend()
    if backend != "tpu":
        return f"the kernel runs on TPUs; the backend is {backend!r}"
    if jax.device_count() > 1 and jax.sharding.get_abstract_mesh().empty:
        return "XLA cannot partition the kernel by itself; allowed on several devices: within jax.set_mesh or shard_map"
    return ""


def attend(inputs: AttentionInputs) -> jax.Array:
    """Attention by the splash kernel, for any lengths and head width, sharded over batch and heads.

    Lengths are padded to multiples of 128 and head widths to multiples of 64. The scale is multiplied into the query
    in float32 and rounded once: exact if the scale is a power of two, as for widths of 64 and 256.

    Args:
      inputs: For which `unsupported` is "".

    Returns:
      [B, T, N, H] in the dtype of `value`. Saved for the backward pass under `ATTENTION_NAME`.
    """
    T, H = inputs.query.shape[1], inputs.query.shape[3]
    visible = _visible(inputs)
    query = (inputs.query.astype(jnp.float32) * inputs.scale).astype(inputs.query.dtype)
    out = splash_kernel.attention(
        visible,
        _INTERPRET,
        query=_kernel_layout(query, visible.lengths[0]),
        key=_kernel_layout(inputs.key, visible.lengths[1]),
        value=_kernel_layout(inputs.value, visible.lengths[1]),
        sinks=_sinks(inputs),
        **_segments(inputs, visible.lengths),
    )
    out = jnp.swapaxes(out[:, :, :T, :H], 1, 2)
    return _spread_evenly(inputs, out) if isinstance(inputs.normalizer, str) and inputs.normalizer == "softmax" else out


def _window(inputs: AttentionInputs) -> tuple[int, int]:
    """(left, right) of causality and window together, at most what reaches every key."""
    T, S = inputs.query.shape[1], inputs.key.shape[1]
    left, right = inputs.local_window_size or (T, S)
    return min(left, T - 1), min(0 if inputs.is_causal else right, right, S - 1)


def _visible(inputs: AttentionInputs) -> "splash_kernel.Visible":
    T, S = inputs.query.shape[1], inputs.key.shape[1]
    left, right = _window(inputs)
    padded_T, padded_S = (-(-length // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE for length in (T, S))
    right_is_open = right == S - 1
    return splash_kernel.Visible(
        (padded_T, padded_S),
        left=left if left < T - 1 else None,
        right=None if right_is_open else right,
        keys=S if padded_S > S and (right_is_open or T - 1 + right >= S) else None,  # if a query reaches padding
    )


def _kernel_layout(array: jax.Array, length: int) -> jax.Array:
    """[B, T, N, H] to [B, N, length, width], padded with zeros."""
    _, T, _, H = array.shape
    return jnp.swapaxes(jnp.pad(array, ((0, 0), (0, length - T), (0, 0), (0, -H % _WIDTH_MULTIPLE))), 1, 2)


def _segments(inputs: AttentionInputs, lengths: tuple[int, int]) -> dict[str, jax.Array]:
    """int32 [B, T] and [B, S]: 0 within the sequence; padded queries are alone in segment 1, padded keys in 2."""
    ends = (inputs.query_seq_lengths, inputs.key_value_seq_lengths)
    if all(end is None for end in ends):
        return {}
    B = inputs.query.shape[0]
    segments = {}
    for segment, name, length, end in zip((1, 2), ("query", "key"), lengths, ends, strict=True):
        is_padding = jnp.zeros((B, length), bool) if end is None else jnp.arange(length)[None] >= end[:, None]
        segments[f"{name}_segments"] = jnp.where(is_padding, segment, 0).astype(jnp.int32)
    return segments


def _sinks(inputs: AttentionInputs) -> jax.Array | None:
    """float32 [B, N]; None for softmax, or softmax_n with n = 0, if every row sees something."""
    sink = sink_logit(inputs.normalizer)
    if isinstance(sink, float) and sink == -math.inf and inputs.query_seq_lengths is None and _blind(inputs) is None:
        return None
    B, _, N, _ = inputs.query.shape
    return jnp.broadcast_to(jnp.maximum(jnp.asarray(sink, jnp.float32), _NO_SINK), (B, N))


def _blind(inputs: AttentionInputs) -> jax.Array | np.ndarray | None:
    """Boolean [B or 1, T]: queries that see no key, by causality, window and key lengths; None if all see some."""
    T, S = inputs.query.shape[1], inputs.key.shape[1]
    left, right = _window(inputs)
    first = np.maximum(np.arange(T) - left, 0)[None]
    last = np.minimum(np.arange(T) + right, S - 1)[None]
    if inputs.key_value_seq_lengths is not None:
        return first > jnp.minimum(last, inputs.key_value_seq_lengths[:, None] - 1)
    return first > last if (first > last).any() else None


def _spread_evenly(inputs: AttentionInputs, out: jax.Array) -> jax.Array:
    """`out` with the mean of the values in rows that see nothing: the meaning of softmax in `jax.nn`."""
    blind = _blind(inputs)
    if blind is None:
        return out
    if inputs.query_seq_lengths is not None:
        blind = blind & (np.arange(out.shape[1])[None] < inputs.query_seq_lengths[:, None])
    mean = jnp.mean(inputs.value.astype(jnp.float32), 1, keepdims=True).astype(out.dtype)
    mean = jnp.repeat(mean, out.shape[2] // mean.shape[2], 2)
    return jnp.where(blind[..., None, None], mean, out)
