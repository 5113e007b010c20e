"""Attention over parts of the keys, joined to attention over all: the arithmetic of context parallelism."""

import jax
import jax.numpy as jnp

from orthojax.ops.statistics import wide_dtype


def merge(outputs: jax.Array, lse: jax.Array, sink: float | jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Joins softmax attention over P parts of the keys, such as those of P devices, to that over all keys.

    Merging is associative and takes parts in any order, so a ring may merge two at a time. A sink counts once: give it
    to the last merge only, be it of a single part. All is differentiable, if the outputs and `lse` are: a kernel whose
    `lse` has no gradient, such as that of `jax.nn.dot_product_attention(..., return_residual=True)`, gives wrong ones.

    Args:
      outputs: [P, B, T, N, V], of softmax over the keys of each part; ignored where a query sees no key of a part.
      lse: log sum exp of the logits of each part, [P, B, N, T]; -inf where a query sees no key of it.
      sink: Logit in the denominator of all keys, a number or one for each head [N]: 0 is softmax-1, log n softmax_n,
        None no sink.

    Returns:
      The output [B, T, N, V], zero where a query sees no key, in the dtype of `outputs`; and the new `lse`, at least
      float32, with the sink in it.

    >>> import jax.numpy as jnp
    >>> outputs, lse = jnp.array([1.0, 4.0]).reshape(2, 1, 1, 1, 1), jnp.log(jnp.array([2.0, 1.0])).reshape(2, 1, 1, 1)
    >>> merge(outputs, lse, sink=0.0)[0].tolist()  # (2 * 1 + 1 * 4) / (2 + 1 + 1)
    [[[[1.5]]]]
    """
    lse = lse.astype(wide_dtype(lse))
    parts = lse
    if sink is not None:
        a = jnp.reshape(jnp.asarray(sink, lse.dtype), (1, 1, -1, 1))
        parts = jnp.concatenate([lse, jnp.broadcast_to(a, (1, *lse.shape[1:]))])
    top = jax.lax.stop_gradient(jnp.max(parts, 0))
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    total = jnp.sum(jnp.exp(parts - top[None]), 0)
    sees = total > 0.0
    whole = jnp.where(sees, top + jnp.log(jnp.where(sees, total, 1.0)), -jnp.inf)
    weights = jnp.exp(lse - jnp.where(sees, whole, 0.0)[None])
    weights = jnp.swapaxes(weights, 2, 3)[..., None]
    output = jnp.sum(jnp.where(weights > 0.0, outputs, 0.0) * weights, 0)
    return output.astype(outputs.dtype), whole
