"""Softmax with a sink in its denominator, and the derivative rules that save only its output."""

import math
from functools import partial

import jax
import jax.numpy as jnp


def _with_sink(logits: jax.Array, axis: int, sink: jax.Array | float) -> jax.Array:
    # The sink takes part in the shift: exp(sink - shift) can then neither overflow, however negative the logits are,
    # nor vanish together with all other terms. So one term of the total is exp(0) and the total at least 1, except
    # where nothing is kept and there is no sink: the two bounds turn only that 0 / 0 into 0. They are maxima because
    # XLA for CPU makes one loop of all these lines, but two passes more over the weights where a `where` stands.
    lowest = float(jnp.finfo(logits.dtype).min)
    bound = max(sink, lowest) if isinstance(sink, float) else jnp.maximum(sink, lowest)
    shift = jnp.maximum(jnp.max(logits, axis, keepdims=True), bound)
    unnormalized = jnp.exp(logits - shift)
    total = jnp.sum(unnormalized, axis, keepdims=True) + jnp.exp(sink - shift)
    return unnormalized / jnp.maximum(total, 1.0)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def softmax_with_sink_array(logits: jax.Array, axis: int, sink: jax.Array) -> jax.Array:
    """exp(x_i) / (exp(sink) + sum_j exp(x_j)) for a sink logit that broadcasts against the logits.

    Args:
      logits: Float32 or float64; -inf where a key is not seen.
      axis: The axis of the keys.
      sink: Same dtype, length 1 along `axis`; -inf for no sink.
    """
    return _with_sink(logits, axis, sink)


@softmax_with_sink_array.defjvp
def _(axis, primals, tangents):
    # d y = y (t - sum_j y_j t_j - y_sink t_sink): only the output is needed, so only it is saved. Automatic
    # differentiation would save the shifted exponentials and their sum as well.
    logits, sink = primals
    t, t_sink = tangents
    y = softmax_with_sink_array(logits, axis, sink)
    inner = jnp.sum(y * t, axis, keepdims=True)
    inner += (1.0 - jnp.sum(y, axis, keepdims=True)) * t_sink
    return y, y * (t - inner)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def softmax_with_constant(logits: jax.Array, axis: int, n: float) -> jax.Array:
    """exp(x_i) / (n + sum_j exp(x_j)): a sink that is no parameter, whose derivative costs nothing.

    Args:
      logits: Float32 or float64; -inf where a key is not seen.
      axis: The axis of the keys.
      n: >= 0 and finite.
    """
    return _with_sink(logits, axis, math.log(n) if n else -math.inf)


@softmax_with_constant.defjvp
def _(axis, n, primals, tangents):
    (logits,), (t,) = primals, tangents
    y = softmax_with_constant(logits, axis, n)
    return y, y * (t - jnp.sum(y * t, axis, keepdims=True))
