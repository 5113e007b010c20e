"""Statistics of activation vectors: how far a few channels stand out from the others.

They work up to the largest finite numbers. The scaling for that leaves smaller numbers bitwise unchanged.
"""

import contextlib
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike


def wide_dtype(x: jax.Array) -> Any:
    """Returns float64 for float64 arrays, else float32: `jnp.promote_types` would refuse to mix dtypes if strict."""
    return jnp.dtype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)


def real_array(x: ArrayLike, what: str = "values") -> jax.Array:
    """Returns an array of real numbers; ValueError for anything else, which the message calls `what`."""
    kind = f"of type {type(x).__name__}"
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        array = jnp.asarray(x)
        if not jnp.issubdtype(array.dtype, jnp.complexfloating):
            return array
        kind = f"of dtype {array.dtype}"
    raise ValueError(f"{what} {kind}; allowed: an array of real numbers")


def at_least_float32(x: ArrayLike) -> jax.Array:
    """Casts `x` to float32, unless it is float64 already; ValueError for what is no array of real numbers."""
    x = real_array(x)
    return x.astype(wide_dtype(x))


def axes_of(axis: Any, ndim: int, name: str = "axis") -> tuple[int, ...]:
    """Returns axes, one, several or None for all, as different numbers from 0 on; ValueError for anything else."""
    several = isinstance(axis, Sequence | np.ndarray) and not isinstance(axis, str | bytes) and np.ndim(axis) == 1
    axes = list(range(ndim) if axis is None else axis if several else [axis])
    if all(isinstance(i, numbers.Integral) and not isinstance(i, bool) and -ndim <= int(i) < ndim for i in axes):
        if len(positive := {int(i) % ndim for i in axes}) == len(axes):
            return tuple(positive)
    raise ValueError(
        f"{name}={axis!r} of an array with {ndim} axes; allowed: one of its axes, several, or None for all"
    )


def root_of_range(x: jax.Array) -> float:
    """Returns the square root of the power of two above all numbers of the dtype: 2^64 in float32, 2^512 in float64."""
    return 2.0 ** (jnp.finfo(x.dtype).maxexp // 2)


def shrink(peak: jax.Array) -> jax.Array:
    """Returns 1, or 1 / `root_of_range` for a larger peak: times that, numbers up to it can be divided by the peak.

    Compilers may turn division by a broadcast number into multiplication by its inverse, which is 0 for the largest
    numbers, since the hardware has no subnormal ones.
    """
    root = root_of_range(peak)
    return jnp.where(peak < root, jnp.ones_like(peak), jnp.asarray(1.0 / root, peak.dtype))


def norm(x: ArrayLike, axis: int = -1) -> jax.Array:
    """Computes ||x||_2 along one axis, finite if that number is: `x` without `axis`, in at least float32."""
    x = at_least_float32(x)
    axes_of(axis, x.ndim)
    root = root_of_range(x)
    # Both sums in one pass. The root comes last: the root of a sum that is not taken would have an infinite slope at 0.
    # Not jnp.square: its derivative 2 x overflows for the largest numbers, and times the 0 of the sum not taken is nan.
    plain, shrunk = jnp.sum(x * x, axis), jnp.sum(jnp.square(x / root), axis)
    fits = plain < jnp.inf
    return jnp.sqrt(jnp.where(fits, plain, shrunk)) * jnp.where(fits, 1.0, root)


def kurtosis(x: ArrayLike, axis: int = -1) -> jax.Array:
    """Raw kurtosis along one axis.

    kappa = E[(x - mu)^4] / E[(x - mu)^2]^2 with mu = E[x], all means over `axis` (From Attention to Activation, arXiv
    2410.17174, Eq. 2). Raw, not excess: 3 for a Gaussian. For D values 1 <= kappa <= D - 2 + 1 / (D - 1), the upper end
    for a one-hot vector. It is invariant to scaling and to an offset.

    A constant vector has no kurtosis (0/0); it gets 0, which no other vector has, so that one dead position does not
    turn the mean over a data set into nan. One whose spread is below 1e-31 (float32) counts as constant. Non-finite
    values give nan.

    Returns:
      The shape of `x` (any real dtype) without `axis`; float32, or float64 for float64.

    >>> import jax.numpy as jnp
    >>> float(kurtosis(jnp.array([-1.0, 1.0, -1.0, 1.0])))
    1.0
    >>> round(float(kurtosis(jnp.array([0.0, 0.0, 7.0, 0.0]))), 4)  # a single outlier: D - 2 + 1 / (D - 1)
    2.3333
    >>> float(kurtosis(jnp.full(4, 0.1)))
    0.0
    """
    x = at_least_float32(x)
    axes = axes_of(axis, x.ndim)
    low, high = jnp.min(x, axis, keepdims=True), jnp.max(x, axis, keepdims=True)
    part = 2.0 ** -int(np.prod([x.shape[i] for i in axes])).bit_length()  # the sum of D large values would overflow
    mean = jnp.mean(x * part, axis, keepdims=True) / part
    factor = shrink(jnp.maximum(high, -low))
    centred = x * factor - mean * factor  # in this form XLA for CPU reads x as often as without the factor
    # Fourth powers of outliers overflow long before the outliers do, so take them relative to the largest one.
    # The ratio does not depend on that factor, hence neither does its gradient.
    scale = jax.lax.stop_gradient(jnp.max(jnp.abs(centred), axis, keepdims=True))
    # The rounded mean of equal values can differ from them, so compare the values themselves.
    constant = low == high
    constant |= scale < jnp.finfo(x.dtype).tiny / jnp.finfo(x.dtype).eps  # below that the mean may underflow
    constant &= jnp.isfinite(mean)  # on a CPU the smallest and the largest of values with a NaN may be those of others
    # A vector with some spread in place of a constant one keeps the gradient finite.
    stand_in = jnp.ones_like(centred)
    squared = jnp.square(jnp.where(constant, stand_in, centred / jnp.where(constant, 1.0, scale)))
    ratio = jnp.mean(jnp.square(squared), axis) / jnp.square(jnp.mean(squared, axis))
    return jnp.where(jnp.squeeze(constant, axis), 0.0, ratio)


def norm_ratio(x: ArrayLike, axis: int = -1) -> jax.Array:
    """max|x| / ||x||_2 along one axis: 1 if one channel is everything, 1 / sqrt(D) if all D are equally large.

    The proxy for outliers of From Attention to Activation (arXiv 2410.17174, section 4.2 and Appendix H). A zero vector
    gets 0, which no other vector can have.

    Returns:
      The shape of `x` (any real dtype) without `axis`; float32, or float64 for float64.

    >>> import jax.numpy as jnp
    >>> float(norm_ratio(jnp.array([3.0, 0.0, -4.0]))), float(norm_ratio(jnp.zeros(3)))
    (0.800000011920929, 0.0)
    """
    x = at_least_float32(x)
    axes_of(axis, x.ndim)
    peak = jnp.max(jnp.abs(x), axis, keepdims=True)
    has_nan = jnp.isnan(jnp.sum(x, axis, keepdims=True))  # which the largest of them may not be, as in `kurtosis`
    peak = jnp.where(has_nan, jnp.nan, peak)
    zero, factor = peak < jnp.finfo(x.dtype).tiny, shrink(peak)
    # Relative to the peak the squares neither overflow nor vanish, and the ratio is 1 over the norm.
    relative = jnp.where(zero, 1.0, x * factor / jnp.where(zero, 1.0, peak * factor))
    return jnp.where(jnp.squeeze(zero, axis), 0.0, 1.0 / jnp.linalg.norm(relative, axis=axis))
