"""Fake quantisation: round values to an integer grid and return them as floats on that grid.

What integers would do to a model can be simulated in floats: x -> round(x / step) * step is what quantising and
dequantising gives. `axes` says which elements share one step. Nothing here has a useful gradient (rounding is flat).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from orthojax.ops.statistics import at_least_float32

Axes = int | Sequence[int] | None


def _reduced(axes: Axes) -> int | tuple[int, ...] | None:
    return axes if axes is None or isinstance(axes, int) else tuple(axes)


def _require_bits(bits: int) -> None:
    if not 2 <= bits <= 16:
        raise ValueError(f"bits={bits} is not a width that can be simulated; allowed: 2 to 16")


def absmax(x: ArrayLike, bits: int = 8, axes: Axes = None) -> jax.Array:
    """Symmetric quantisation: the largest absolute value becomes the largest integer.

    step = max|x| / (2^(bits-1) - 1) and y = round(x / step) * step, so int8 uses the 255 integers -127..127 and 0 stays
    0 (Dettmers et al. 2022 as used by From Attention to Activation, arXiv 2410.17174, section 5.2). Definition: int8
    absmax uses 127.

    |y - x| <= step / 2 (plus the rounding of the dtype), absmax(-x) = -absmax(x), and absmax(absmax(x)) = absmax(x) to
    the bit (in half precision up to 8 bits). A slice of zeros is returned as it is; a slice with a not-finite value
    becomes nan.

    Args:
      x: Floating values; half precision is quantised in float32.
      bits: Width of the integers, 2 to 16.
      axes: The axes that share one step; None: all of them.

    Returns:
      The values on their grid, with the shape and dtype of `x`.

    >>> import jax.numpy as jnp
    >>> absmax(jnp.array([-127.0, 0.0, 0.6, 63.4])).tolist()
    [-127.0, 0.0, 1.0, 63.0]
    """
    _require_bits(bits)
    wide, axes = at_least_float32(x), _reduced(axes)
    largest = 2 ** (bits - 1) - 1
    peak = jnp.max(jnp.abs(wide), axis=axes, keepdims=True)
    zero = peak < jnp.finfo(wide.dtype).tiny
    integers = jnp.round(wide / jnp.where(zero, 1.0, peak) * largest)
    # (integer / largest) * peak, not integer * (peak / largest): the peak comes back exactly, and with it the step.
    fraction = jnp.where(jnp.abs(integers) == largest, jnp.sign(integers), integers / largest)
    return jnp.where(zero, wide, fraction * peak).astype(jnp.asarray(x).dtype)


def zeropoint(x: ArrayLike, bits: int = 4, axes: Axes = None) -> jax.Array:
    """Asymmetric quantisation: the smallest value becomes the smallest integer, the largest the largest.

    step = (max x - min x) / (2^bits - 1), z = round(min x / step) and y = k step with the integer k = round(x / step)
    held in z .. z + 2^bits - 1; the stored number is k - z (Dettmers et al. 2022 as used by From Attention to
    Activation, arXiv 2410.17174, section 5.2). Definition: zeropoint is not clamped to contain 0, so values that all
    have one sign use all 2^bits levels. Where 0 lies between min and max it is exact, because the shift z is an
    integer.

    |y - x| <= step / 2 (plus the rounding of the dtype), and quantising twice changes nothing beyond that rounding. A
    constant slice is returned as it is; a slice with a not-finite value becomes nan.

    Args:
      x: Floating values; half precision is quantised in float32.
      bits: Width of the integers, 2 to 16.
      axes: The axes that share one step and one z; None: all of them.

    Returns:
      The values on their grid, with the shape and dtype of `x`.

    >>> import jax.numpy as jnp
    >>> zeropoint(jnp.array([10.0, 13.2, 25.0])).round(4).tolist()  # not clamped to contain 0
    [10.0, 13.0, 25.0]
    >>> zeropoint(jnp.array([-1.0, 0.0, 2.0]), bits=2).tolist()
    [-1.0, 0.0, 2.0]
    """
    _require_bits(bits)
    wide, axes = at_least_float32(x), _reduced(axes)
    levels = 2**bits - 1
    low = jnp.min(wide, axis=axes, keepdims=True)
    high = jnp.max(wide, axis=axes, keepdims=True)
    step = (high - low) / levels
    constant = (high == low) | (step < jnp.finfo(wide.dtype).tiny)
    safe = jnp.where(constant, 1.0, step)
    bottom = jnp.round(low / safe)
    integers = jnp.clip(jnp.round(wide / safe), bottom, bottom + levels)
    # high / step and low / step are `levels` apart; where both are ties, rounding could lose the top level.
    integers = jnp.where(wide == high, bottom + levels, integers)
    return jnp.where(constant, wide, integers * safe).astype(jnp.asarray(x).dtype)
