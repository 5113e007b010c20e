"""Dot-product attention with any normalizer, by plain XLA or by a vendor's kernel.

Letters inside functions: B batch, T query positions, S key positions, N query heads, K key-value heads, G = N / K,
H head width. `dot_product.py` is the entry and picks the implementation; `inputs.py` checks the arguments. The module
of a vendor's kernel has

- `unsupported(inputs) -> str`: why it does not support the arguments, naming what is allowed, or "";
- `unavailable() -> str`: why it cannot run in this process, or "";
- `attend(inputs) -> [B, T, N, H]`.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from orthojax.ops.attention.dot_product import Implementation, dot_product_attention
from orthojax.ops.attention.inputs import ATTENTION_NAME, AttentionInputs
from orthojax.ops.attention.xla import (
    attention_logits,
    attention_weights,
    relaxed_causal_mask,
    visible_keys,
    weighted_values,
)
from orthojax.ops.normalizers import Normalizer

__all__ = [
    "ATTENTION_NAME",
    "AttentionInputs",
    "Implementation",
    "attention_fn",
    "attention_logits",
    "attention_weights",
    "dot_product_attention",
    "relaxed_causal_mask",
    "visible_keys",
    "weighted_values",
]


def attention_fn(
    normalizer: Normalizer = "softmax1", *, is_causal: bool = False, implementation: Implementation | None = None
) -> Callable[..., jax.Array]:
    """Makes the `attention_fn` of flax's MultiHeadAttention (linen and nnx), with another normalizer.

    With a mask array the vendors' kernels cannot skip what it hides, and one of them cannot be used at all: say
    `is_causal=True` here rather than pass a causal mask there.

    Args:
      normalizer: As for `dot_product_attention`.
      is_causal: Query t sees keys 0..t. A step of cached decoding, one query, brings its own mask instead.
      implementation: As for `dot_product_attention`.

    Returns:
      A function of query [..., T, N, H], key and value [..., S, K, H], and flax's keyword arguments, `bias` and `mask`
      that broadcast to [..., N, T, S] (non-zero keeps), `dtype` to which query, key and value are cast. It raises
      NotImplementedError for dropout of attention weights, for sown weights, and for a precision or an einsum of the
      caller's own, which it would otherwise ignore.

    >>> import flax.linen as nn
    >>> attention = nn.MultiHeadAttention(num_heads=4, attention_fn=attention_fn("softmax1", is_causal=True))
    """
    causal = is_causal

    def attend(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: jax.Array | None = None,
        mask: jax.Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        force_fp32_for_softmax: bool = True,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
        module: Any = None,
        is_causal: bool = False,
    ) -> jax.Array:
        del broadcast_dropout, dropout_rng, force_fp32_for_softmax  # statistics are float32 in any case
        unsupported = {
            "dropout of attention weights": dropout_rate > 0.0 and not deterministic,
            "sown attention weights": module is not None,
            "a precision": precision is not None,
            "einsums of the caller's own": bool(qk_attn_weights_einsum or attn_weights_value_einsum),
        }
        for what, is_asked in unsupported.items():
            if is_asked:
                raise NotImplementedError(f"orthojax's attention_fn does not support {what}")
        T, S, batch = query.shape[-3], key.shape[-3], query.shape[:-3]
        if (causal or is_causal) and T != S and (mask is None or T > 1):
            raise ValueError(f"causal attention of {T} queries to {S} keys; allowed: as many, or one query and a mask")
        dtype = jnp.result_type(query, key, value) if dtype is None else dtype
        output = dot_product_attention(
            *(array.astype(dtype).reshape(math.prod(batch), *array.shape[-3:]) for array in (query, key, value)),
            bias=None if bias is None else _one_batch_axis(bias, batch),
            mask=None if mask is None else _one_batch_axis(jnp.asarray(mask).astype(bool), batch),
            normalizer=normalizer,
            is_causal=(causal or is_causal) and T == S,
            implementation=implementation,
        )
        return output.reshape(query.shape)

    return attend


def _one_batch_axis(array: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """Reshapes an array that broadcasts to [*batch, N, T, S], so that it broadcasts to [prod(batch), N, T, S]."""
    if len(batch) <= 1 or array.ndim <= 3:
        return array
    array = array.reshape((1,) * (len(batch) + 3 - array.ndim) + array.shape)
    return jnp.broadcast_to(array, (*batch, *array.shape[-3:])).reshape(math.prod(batch), *array.shape[-3:])
