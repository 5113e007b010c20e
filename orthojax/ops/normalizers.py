"""Normalizers: from attention logits to weights.

Every normalizer has the arguments of `jax.nn.softmax`: logits, axis and where, as `softmax1` describes them. Weights
have the shape and dtype of the logits (float32 for integers). A row whose keys are all masked has weights of exactly
zero, except with `softmax`, which behaves as in `jax.nn`. Only softmax has rows that always sum to 1.
"""

import math
import numbers
from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from orthojax.ops.statistics import at_least_float32, axes_of, real_array

_SOFTPICK_EPSILON = 1e-8

Axis = int | tuple[int, ...] | None
Name = Literal["softmax", "softmax1", "relu", "gelu", "sigmoid", "softpick"]  # functions of this module
Normalizer = Name | float | jax.Array


def _as_dtype_of(logits: jax.Array, weights: jax.Array) -> jax.Array:
    dtype = jnp.asarray(logits).dtype
    return weights.astype(dtype) if jnp.issubdtype(dtype, jnp.floating) else weights  # integers would round to 0


def _boolean(where: jax.Array) -> jax.Array:
    where = real_array(where, "where")
    if where.dtype != jnp.bool_:
        raise ValueError(f"where must be boolean (True keeps), got {where.dtype}")
    return where


def _masked(logits: jax.Array, where: jax.Array | None) -> jax.Array:
    return logits if where is None else jnp.where(_boolean(where), logits, -jnp.inf)


def _wide(logits: jax.Array, axis: Axis) -> jax.Array:
    x = at_least_float32(logits)
    axes_of(axis, x.ndim)
    return x


def softmax_n(logits: jax.Array, n: float, axis: Axis = -1, where: jax.Array | None = None) -> jax.Array:
    """Computes softmax with n in the denominator, exp(x_i) / (n + sum_j exp(x_j)); n = 1 is `softmax1`, n = 0 softmax.

    n acts as that many further keys with logit 0 and value 0; ValueError if it is negative or not finite. Other
    arguments and the result are as for `softmax1`.

    Reference:
      Attention Is Off By One, `<https://www.evanmiller.org/attention-is-off-by-one.html>`_, 2023 (n = 1); any n in
      Flash-Attention-Softmax-N, `<https://github.com/softmax1/Flash-Attention-Softmax-N>`_, 2023.
    """
    check_normalizer(float(n))
    return _as_dtype_of(logits, _softmax_with_constant(_masked(_wide(logits, axis), where), axis, float(n)))


def softmax1(logits: jax.Array, axis: Axis = -1, where: jax.Array | None = None) -> jax.Array:
    """Computes softmax-1, exp(x_i) / (1 + sum_j exp(x_j)): attention that may go nowhere.

    The 1 acts as a key with logit 0 and value 0, so a head with nothing to say need not park its weight on the
    first token. Weights are correct for any finite logits.

    Args:
      logits: Floating array; half precision is computed in float32.
      axis: The axis of the keys, several, or None for all.
      where: Mask that broadcasts against `logits`, ValueError if not boolean; entries that are False get weight 0.

    Returns:
      Weights, shape and dtype of `logits`; each row sums to less than 1. Only the weights are saved for the derivative.

    Reference:
      From Attention to Activation, `arXiv 2410.17174 <https://arxiv.org/abs/2410.17174>`_, 2024, Eq. 1.

    >>> import jax.numpy as jnp
    >>> [round(float(w), 4) for w in softmax1(jnp.array([0.0, 0.0, -1e9]))]
    [0.3333, 0.3333, 0.0]
    >>> float(softmax1(jnp.full(4, -100.0)).sum()) < 1e-40  # softmax would share out a whole 1
    True
    """
    return softmax_n(logits, 1.0, axis, where)


def softmax_with_sink(logits: jax.Array, sink: jax.Array, axis: Axis = -1, where: jax.Array | None = None) -> jax.Array:
    """Computes softmax with a sink logit, exp(x_i) / (exp(sink) + sum_j exp(x_j)); sink = 0 is `softmax1`.

    `sink` broadcasts against `logits` with length 1 along `axis`, else ValueError, and is differentiable. Other
    arguments and the result are as for `softmax1`.

    Reference:
      One learned logit for each head, as in gpt-oss, `arXiv 2508.10925 <https://arxiv.org/abs/2508.10925>`_, 2025.
    """
    x = _masked(_wide(logits, axis), where)
    sink = jnp.asarray(sink, x.dtype)
    row = tuple(1 if i in axes_of(axis, x.ndim) else length for i, length in enumerate(x.shape))
    if sink.ndim > x.ndim or any(s not in (1, n) for s, n in zip(sink.shape[::-1], row[::-1], strict=False)):
        raise ValueError(f"a sink of shape {sink.shape} for logits {x.shape}; allowed: what broadcasts to {row}")
    return _as_dtype_of(logits, _softmax_with_sink_array(x, axis, sink)[0])


def softmax(logits: jax.Array, axis: Axis = -1, where: jax.Array | None = None) -> jax.Array:
    """Computes exp(x_i) / sum_j exp(x_j), as `jax.nn.softmax`, in at least float32; the rest is as for `softmax1`.

    As in `jax.nn.dot_product_attention`, a masked logit becomes the dtype's lowest number, so a row whose keys are all
    masked spreads its weight evenly over all keys.

    Reference:
      Attention Is All You Need, `arXiv 1706.03762 <https://arxiv.org/abs/1706.03762>`_, 2017, Eq. 1.
    """
    x = _wide(logits, axis)
    if where is not None:
        x = jnp.where(_boolean(where), x, 0.7 * float(jnp.finfo(x.dtype).min))
    return _as_dtype_of(logits, jax.nn.softmax(x, axis))


def relu(logits: jax.Array, axis: Axis = -1, where: jax.Array | None = None) -> jax.Array:
    """Computes max(x_i, 0) / (number of visible keys), the True entries of `where` along `axis`.

    Arguments and result are as for `softmax1`.

    Reference:
      Active-Dormant Attention Heads, `arXiv 2410.13835 <https://arxiv.org/abs/2410.13835>`_, 2024.

    >>> import jax.numpy as jnp
    >>> relu(jnp.array([2.0, -1.0, 4.0]), where=jnp.array([True, True, False])).tolist()
    [1.0, 0.0, 0.0]
    """
    return _as_dtype_of(logits, _by_visible_keys(jnp.maximum(_wide(logits, axis), 0.0), axis, where))


def gelu(logits: jax.Array, axis: Axis = -1, where: jax.Array | None = None) -> jax.Array:
    """Computes x_i Phi(x_i) / (number of visible keys), with the normal distribution function Phi, not its tanh form.

    Arguments and result are as for `softmax1`; weights may be negative, down to -0.17 / visible.

    Reference:
      GELU, `arXiv 1606.08415 <https://arxiv.org/abs/1606.08415>`_, 2016, in place of the ReLU of `relu`.
    """
    x = _wide(logits, axis)
    x = x if where is None else jnp.where(_boolean(where), x, 0.0)  # its derivative at a masked infinity is NaN
    x = jnp.maximum(x, -40.0)  # Phi is 0 there even in float64, and -inf times it is NaN
    return _as_dtype_of(logits, _by_visible_keys(jax.nn.gelu(x, approximate=False), axis, where))


def _by_visible_keys(x: jax.Array, axis: Axis, where: jax.Array | None) -> jax.Array:
    if where is None:
        return x / math.prod(x.shape[a] for a in axes_of(axis, x.ndim))
    where = _boolean(where)
    ndim = max(x.ndim, where.ndim)
    axes = axes_of(axis, ndim)
    x, where = (a.reshape((1,) * (ndim - a.ndim) + a.shape) for a in (x, where))
    # A mask of length 1 along an axis stands for all its keys; the sum runs over the mask as it is, which is smaller.
    visible = jnp.sum(where, axes, keepdims=True) * math.prod(x.shape[a] for a in axes if where.shape[a] == 1)
    return jnp.where(where, x / jnp.maximum(visible, 1).astype(x.dtype), 0.0)


def sigmoid(logits: jax.Array, axis: Axis = -1, where: jax.Array | None = None) -> jax.Array:
    """Computes 1 / (1 + exp(-x_i)) for each key by itself, with no normalisation over keys.

    Arguments and result are as for `softmax1`; `axis` has no effect.

    Reference:
      When Attention Sink Emerges in Language Models, `arXiv 2410.10781 <https://arxiv.org/abs/2410.10781>`_, 2024
      (sigmoid attention without normalisation).
    """
    del axis
    weights = jax.nn.sigmoid(at_least_float32(logits))
    return _as_dtype_of(logits, weights if where is None else jnp.where(_boolean(where), weights, 0.0))


def softpick(logits: jax.Array, axis: Axis = -1, where: jax.Array | None = None) -> jax.Array:
    r"""Computes softpick, :math:`\max(e^{x_i} - 1, 0) / (\sum_j |e^{x_j} - 1| + \epsilon)`, :math:`\epsilon = 10^{-8}`.

    Keys with logits up to 0 have no weight, but count in the denominator, so a row may sum to anything from 0 to 1.
    Arguments and result are as for `softmax1`; weights are correct for any finite logits, and -inf hides a key.

    Reference:
      Softpick, `arXiv 2504.20966 <https://arxiv.org/abs/2504.20966>`_, 2025; the epsilon comes from its code.

    >>> import jax.numpy as jnp
    >>> [round(float(w), 4) for w in softpick(jnp.log(jnp.array([3.0, 2.0, 0.5])))]
    [0.5714, 0.2857, 0.0]
    """
    x = _wide(logits, axis)
    x = jnp.where(_masked(x, where) == -jnp.inf, 0.0, x)  # e^0 - 1 = 0
    # |e^x - 1| = e^max(x, 0) (1 - e^-|x|), where nothing cancels. All is divided by e^shift.
    above = jnp.maximum(x, 0.0)
    shift = jax.lax.stop_gradient(jnp.max(above, axis, keepdims=True, initial=0.0))
    size = -jnp.exp(above - shift) * jnp.expm1(-jnp.abs(x))
    total = jnp.sum(size, axis, keepdims=True) + _SOFTPICK_EPSILON * jnp.exp(-shift)
    return _as_dtype_of(logits, jnp.where(x > 0.0, size, 0.0) / total)


# Softmax with a sink in its denominator. Logits are float32 or float64, -inf for a hidden key; a sink of -inf is none.
# The derivative rules save only the output, and the sink's weight if the sink has a derivative.


def _with_sink(logits: jax.Array, axis: Axis, sink: jax.Array | float) -> tuple[jax.Array, jax.Array]:
    """Computes the weights of the logits and of the sink, the latter with length 1 along the axis."""
    # The sink takes part in the shift: exp(sink - shift) can then neither overflow, however negative the logits are,
    # nor vanish together with all other terms. So one term of the total is exp(0) and the total at least 1, except if
    # all keys are masked and there is no sink: the two bounds turn only that 0 / 0 into 0. They are maxima because XLA
    # for CPU makes one loop of all these lines; a `where` would cost two more passes over the weights.
    lowest = float(jnp.finfo(logits.dtype).min)
    bound = max(sink, lowest) if isinstance(sink, float) else jnp.maximum(sink, lowest)
    shift = jnp.maximum(jnp.max(logits, axis, keepdims=True, initial=-jnp.inf), bound)
    unnormalized, sink_term = jnp.exp(logits - shift), jnp.exp(sink - shift)
    total = jnp.maximum(jnp.sum(unnormalized, axis, keepdims=True) + sink_term, 1.0)
    return unnormalized / total, sink_term / total


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _softmax_with_sink_array(logits: jax.Array, axis: Axis, sink: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes exp(x_i) / (exp(sink) + sum_j exp(x_j)), and the weight of the sink, which broadcasts to the logits."""
    return _with_sink(logits, axis, sink)


@_softmax_with_sink_array.defjvp
def _(axis, primals, tangents):
    # d y = y (t - sum_j y_j t_j - y_sink t_sink), the sink's weight among the y: only the outputs are needed, so only
    # they are saved. Automatic differentiation would save the shifted exponentials and their sum as well; and computing
    # y_sink as 1 - sum_j y_j would lose a small one.
    logits, sink = primals
    t, t_sink = tangents
    y, y_sink = _softmax_with_sink_array(logits, axis, sink)
    inner = jnp.sum(y * t, axis, keepdims=True) + y_sink * t_sink
    return (y, y_sink), (y * (t - inner), y_sink * (t_sink - inner))


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _softmax_with_constant(logits: jax.Array, axis: Axis, n: float) -> jax.Array:
    """Computes exp(x_i) / (n + sum_j exp(x_j)): a sink that is not a parameter, whose derivative costs nothing."""
    return _with_sink(logits, axis, math.log(n) if n else -math.inf)[0]


@_softmax_with_constant.defjvp
def _(axis, n, primals, tangents):
    (logits,), (t,) = primals, tangents
    y = _softmax_with_constant(logits, axis, n)
    return y, y * (t - jnp.sum(y * t, axis, keepdims=True))


_BY_NAME = {name: globals()[name] for name in get_args(Name)}
_ALLOWED = ", ".join(_BY_NAME) + ", a number, an array [heads]"


def check_normalizer(normalizer: Normalizer, *heads: int) -> None:
    """Raises ValueError for an unknown name, a negative or infinite n, or an array other than one logit per head."""
    if isinstance(normalizer, str):
        if normalizer not in _BY_NAME:
            raise ValueError(f"unknown normalizer {normalizer!r}; allowed: {_ALLOWED}")
    elif isinstance(normalizer, jax.Array | np.ndarray):
        if normalizer.shape != heads:
            raise ValueError(f"sink logits have shape {normalizer.shape}; expected one for each head, {heads}")
        if not jnp.issubdtype(normalizer.dtype, jnp.floating):
            raise ValueError(f"sink logits must be of a floating dtype, got {normalizer.dtype}")
    elif isinstance(normalizer, numbers.Real) and not isinstance(normalizer, bool):
        if not 0.0 <= float(normalizer) < math.inf:
            raise ValueError(f"softmax_n needs a finite n >= 0, got {normalizer}")
    else:
        raise ValueError(f"normalizer {normalizer!r}; allowed: {_ALLOWED}")


def apply_normalizer(normalizer: Normalizer, logits: jax.Array, where: jax.Array | None = None) -> jax.Array:
    """Computes weights over the last axis of attention logits.

    Args:
      normalizer: A name, a number n (`softmax_n`), or an array [heads] of sink logits (`softmax_with_sink`).
      logits: [batch, heads, queries, keys], float as the weights.
      where: Boolean mask that broadcasts against `logits`.
    """
    check_normalizer(normalizer, *logits.shape[-3:-2])
    if isinstance(normalizer, str):
        return _BY_NAME[normalizer](logits, where=where)
    if not isinstance(normalizer, jax.Array | np.ndarray):
        return softmax_n(logits, float(normalizer), where=where)
    return softmax_with_sink(logits, jnp.asarray(normalizer)[None, :, None, None], where=where)


def sink_logit(normalizer: Normalizer) -> float | jax.Array | None:
    """Returns the logit a of a normalizer exp(x_i) / (exp(a) + sum_j exp(x_j)), which fused kernels can compute.

    Returns None for a normalizer without this form.

    >>> sink_logit("softmax1"), sink_logit("softmax"), sink_logit("relu")
    (0.0, -inf, None)
    """
    if isinstance(normalizer, str):
        return {"softmax1": 0.0, "softmax": -math.inf}.get(normalizer)  # pyright: ignore[reportArgumentType]
    if isinstance(normalizer, jax.Array | np.ndarray):
        return jnp.asarray(normalizer)
    return math.log(normalizer) if normalizer else -math.inf
