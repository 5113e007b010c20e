"""The same attention by the public `jax.nn.dot_product_attention` alone, where JAX's private module is not as expected.

The sink becomes a key: one with logit a and value 0, put before the others. For softmax-1 that is a key of zeros. Other
logits a go through further channels of the heads, which are a in the query and 1 in the sink's key. Where attention is
causal a query is put before the others, too, and its output dropped, so that every query sees the sink. The numbers are
those of the private form; the time is not, since lengths are no longer multiples of a tile and everything is copied.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from orthojax.ops.attention import cudnn_probe
from orthojax.ops.attention.inputs import AttentionInputs
from orthojax.ops.normalizers import sink_logit

_CHANNELS = 8  # head widths are multiples of it


def unsupported(inputs: AttentionInputs) -> str:
    """Why this form cannot do what the private one can, or ""."""
    reason = "with this version of JAX, whose private cuDNN module is not as expected,"
    a = sink_logit(inputs.normalizer)
    if isinstance(a, float) and a == -np.inf:
        return ""  # softmax is jax.nn's own
    if inputs.bias is not None or inputs.mask is not None:
        return f"{reason} a bias or a mask needs 'softmax'"
    if inputs.local_window_size is not None:
        return f"{reason} a window needs 'softmax'"
    H, widest = inputs.query.shape[3], cudnn_probe.widest_head()
    if not isinstance(a, float) or a != 0.0:
        if H + _CHANNELS > widest:
            return f"{reason} sinks other than softmax-1's need heads of at most {widest - _CHANNELS}, got {H}"
    return ""


def attend(inputs: AttentionInputs) -> jax.Array:
    """Attention for inputs that `unsupported` does not refuse.

    Returns:
      [B, T, N, H] in the dtype of the query.

    Raises:
      NotImplementedError: Where there is no cuDNN.
    """
    try:
        return with_sink_key(inputs, "cudnn")
    except RuntimeError as error:  # jax.nn asks for cuDNN's version while it is traced
        raise NotImplementedError(f"attention with implementation='cudnn' needs an NVIDIA GPU: {error}") from error


def with_sink_key(inputs: AttentionInputs, implementation: str) -> jax.Array:
    """`attend`, by either implementation of `jax.nn.dot_product_attention`."""
    query, key, value = inputs.query, inputs.key, inputs.value
    options = {"scale": float(inputs.scale), "is_causal": inputs.is_causal, "implementation": implementation}
    queries, keys = inputs.query_seq_lengths, inputs.key_value_seq_lengths
    queries, keys = (None if lengths is None else lengths.astype(jnp.int32) for lengths in (queries, keys))
    a = sink_logit(inputs.normalizer)
    attention: Callable[..., jax.Array] = jax.nn.dot_product_attention
    if isinstance(a, float) and a == -np.inf:
        window = inputs.local_window_size
        options |= {"query_seq_lengths": queries, "key_value_seq_lengths": keys, "local_window_size": window}
        return attention(query, key, value, inputs.bias, inputs.mask, **options)
    H = query.shape[3]
    if not isinstance(a, float) or a != 0.0:
        query, key, value = _with_logit_channels(query, key, value, a / options["scale"])
    else:
        key, value = _with_zero_first(key), _with_zero_first(value)
    if inputs.is_causal:
        query = _with_zero_first(query)
        queries = None if queries is None else queries + 1
    options["query_seq_lengths"] = queries
    options["key_value_seq_lengths"] = None if keys is None else keys + 1
    return attention(query, key, value, **options)[:, int(inputs.is_causal) :, :, :H]


def _with_zero_first(array: jax.Array) -> jax.Array:
    return jnp.pad(array, ((0, 0), (1, 0), (0, 0), (0, 0)))


def _with_logit_channels(query, key, value, logit: float | jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query, key and value with further channels, and with a key before the others whose logit is scale * `logit`."""
    B, T, N, _ = query.shape
    logit = jnp.broadcast_to(jnp.asarray(logit, jnp.float32)[..., None, None], (N, 1, 1)).reshape(1, 1, N, 1)
    # Rounded once, a logit near 8 would be off by up to 0.03 in bfloat16; the rest of it goes into a second channel,
    # which is then also the one that its gradient comes from.
    rounded = jax.lax.stop_gradient(logit).astype(query.dtype).astype(jnp.float32)
    channels = jnp.broadcast_to(jnp.concatenate([rounded, logit - rounded], -1), (B, T, N, 2)).astype(query.dtype)
    channels = jnp.pad(channels, ((0, 0), (0, 0), (0, 0), (0, _CHANNELS - 2)))
    query = jnp.concatenate([query, channels], -1)
    widths = ((0, 0), (1, 0), (0, 0), (0, _CHANNELS))
    key, value = jnp.pad(key, widths), jnp.pad(value, widths)
    return query, key.at[:, 0, :, -_CHANNELS : 2 - _CHANNELS].set(1), value
