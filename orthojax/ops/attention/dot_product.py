"""`dot_product_attention`: the one entry to every implementation."""

import jax
import jax.numpy as jnp

from orthojax.ops.attention.choice import Implementation, choose
from orthojax.ops.attention.inputs import prepare_inputs
from orthojax.ops.normalizers import Normalizer


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
      normalizer: "softmax1" | "softmax" | "relu" | "sigmoid", a number n (softmax_n), an array [N] of learned sink
        logits, one for each query head, or a `ClippedSoftmax`. See `orthojax.ops.normalizers`.
      scale: Factor of the logits; 1 / sqrt(H) where None.
      is_causal: Query t sees keys 0..t.
      query_seq_lengths: int32 [B]; the output of queries from this position on is zero.
      key_value_seq_lengths: int32 [B]; keys from this position on are not seen.
      local_window_size: Query t sees keys t - left .. t + right; an int means both sides.
      implementation: None picks by platform, dtype and shape. "xla" computes the whole matrix of weights, on any
        platform; "xla_chunked" does so for one chunk of queries at a time, in memory linear in T; "cudnn" is the
        vendor's kernel on NVIDIA GPUs; "splash" the kernel on TPUs. One that is named never falls back to another.
        The two kernels have a first derivative in reverse mode only.

    Returns:
      Shape of `query`, dtype of `value`.

    Raises:
      ValueError: For shapes or dtypes that do not fit, a mask that is not boolean, an unknown normalizer or
        implementation.
      NotImplementedError: Where the named implementation cannot do what is asked, saying what it cannot; or where
        None would have to fall back within `forbid_fallback`.

    >>> import jax, jax.numpy as jnp
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 5, 2, 8))
    >>> dot_product_attention(q, k, v, is_causal=True).shape
    (1, 5, 2, 8)
    """
    inputs = prepare_inputs(
        query,
        key,
        value,
        bias,
        mask,
        normalizer=normalizer,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
    )
    attend = choose(inputs, implementation)
    if inputs.query.size == 0:
        return jnp.zeros(jnp.shape(query), inputs.value.dtype)
    return attend(inputs).reshape(jnp.shape(query))
