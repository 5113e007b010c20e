"""Quantisation to an integer grid: simulated in floats (fake quantisation), or as the integers themselves.

Simulation is x -> round(x / step) * step, quantising and dequantising in one. `axes` says which elements share one
step. Nothing here has a useful gradient (rounding is flat).
"""

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from orthojax.ops.statistics import at_least_float32, shrink

Axes = int | Sequence[int] | None
Scheme = Literal["absmax", "zeropoint"]


def _reduced(axes: Axes) -> tuple[int, ...] | None:
    reduced = None if axes is None else tuple(np.atleast_1d(axes).tolist())
    if not all(isinstance(axis, int) for axis in reduced or ()):
        raise ValueError(f"axes={axes!r}; allowed: an integer, several, or None for all axes")
    return reduced


def _require_bits(bits: int, most: int) -> None:
    if not isinstance(bits, numbers.Integral) or not 2 <= bits <= most:
        problem = "cannot be simulated" if most > 8 else "does not fit into int8"
        raise ValueError(f"bits={bits!r} {problem}; allowed: 2 to {most}, whole")


def _wide(x: ArrayLike) -> jax.Array:
    if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        raise ValueError(f"values of dtype {jnp.result_type(x)} cannot be quantised; allowed: floating ones")
    return at_least_float32(x)


def _within(values: jax.Array, dtype: Any) -> jax.Array:
    """Clips to a dtype: a grid with an exact 0 may reach half a step beyond its values, and so beyond all numbers."""
    limit = jnp.asarray(jnp.finfo(dtype).max, values.dtype)
    return jnp.clip(values, -limit, limit)


def require_scheme(scheme: str) -> None:
    """Raises a ValueError for anything but a `Scheme`."""
    if scheme not in get_args(Scheme):
        raise ValueError(f"unknown scheme {scheme!r}; allowed: {', '.join(map(repr, get_args(Scheme)))}")


def absmax(x: ArrayLike, bits: int = 8, axes: Axes = None) -> jax.Array:
    """Rounds symmetrically: the largest absolute value becomes the largest integer.

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
    _require_bits(bits, 16)
    wide, largest = _wide(x), 2 ** (bits - 1) - 1
    integers, peak, zero = _absmax_integers(wide, bits, axes)
    # (integer / largest) * peak, not integer * (peak / largest): the peak comes back exactly, and with it the step.
    fraction = jnp.where(jnp.abs(integers) == largest, jnp.sign(integers), integers / largest)
    return jnp.where(zero, wide, fraction * peak).astype(jnp.asarray(x).dtype)


def zeropoint(x: ArrayLike, bits: int = 4, axes: Axes = None) -> jax.Array:
    """Rounds asymmetrically: the smallest value becomes the smallest integer, the largest the largest.

    step = (max x - min x) / (2^bits - 1), z = round(min x / step) and y = k step with the integer k = round(x / step)
    clipped to z .. z + 2^bits - 1; the stored number is k - z (Dettmers et al. 2022 as used by From Attention to
    Activation, arXiv 2410.17174, section 5.2). Definition: zeropoint is not clamped to contain 0, so values that all
    have one sign use all 2^bits levels. A 0 between min and max is exact, because z is an integer.

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
    _require_bits(bits, 16)
    wide, dtype = _wide(x), jnp.asarray(x).dtype
    integers, _, step, constant = _zeropoint_integers(wide, bits, axes)
    values = jnp.where(jnp.isfinite(step), _within(integers * step, dtype), jnp.nan)
    return jnp.where(constant, wide, values).astype(dtype)


def _absmax_integers(wide: jax.Array, bits: int, axes: Axes) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns integers as floats, max|x| of every slice, and a mask of the slices that are zero."""
    peak = jnp.max(jnp.abs(wide), axis=_reduced(axes), keepdims=True, initial=0.0)
    zero, factor = peak < jnp.finfo(wide.dtype).tiny, shrink(peak)
    return jnp.round(wide * factor / jnp.where(zero, 1.0, peak * factor) * (2 ** (bits - 1) - 1)), peak, zero


def _zeropoint_integers(wide: jax.Array, bits: int, axes: Axes) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns integers as floats, the smallest that a slice may have, its step, and a mask of constant slices.

    The step of a slice with a not-finite value is not finite.
    """
    levels = 2**bits - 1
    low = jnp.min(wide, axis=_reduced(axes), keepdims=True, initial=jnp.inf)
    high = jnp.max(wide, axis=_reduced(axes), keepdims=True, initial=-jnp.inf)
    factor = shrink(jnp.maximum(high, -low))
    step = (high * factor - low * factor) / levels
    constant = (high == low) & jnp.isfinite(high) | (step < jnp.finfo(wide.dtype).tiny)
    safe = jnp.where(constant, 1.0, step)
    bottom = jnp.round(low * factor / safe)
    integers = jnp.clip(jnp.round(wide * factor / safe), bottom, bottom + levels)
    # high / step and low / step are `levels` apart; if both are ties, rounding could lose the top level.
    return jnp.where(wide == high, bottom + levels, integers), bottom, safe / factor, constant


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """An array as integers: its values are (qvalue + zero_point) * scale, as `dequantize` computes them.

    Attributes:
      qvalue: int8, with the shape of the array.
      scale: Floating; every axis has the length 1 or that of the array.
      zero_point: Whole numbers as floats, shaped as `scale`; None if 0 is 0 (absmax). It is the z of `zeropoint` plus
        the 2^(bits-1) by which signed integers differ from unsigned ones; it is added, while others subtract it.
    """

    qvalue: jax.Array
    scale: jax.Array
    zero_point: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.qvalue.shape

    @property
    def dtype(self) -> Any:
        """Dtype of the values."""
        return self.scale.dtype

    def reshape(self, *shape: Any) -> jax.Array:
        """Returns the values in another shape: code that reads a kernel as an array may be given a quantised one."""
        return dequantize(self).reshape(*shape)


def quantize(x: ArrayLike, scheme: Scheme, bits: int, axes: Axes = None) -> Quantized:
    """Rounds as `absmax` or `zeropoint`, to 8-bit integers and scales.

    `dequantize` of it is `absmax(x, bits, axes)` or `zeropoint(x, bits, axes)`, up to the rounding of floats. Slices of
    zeros (absmax) and constant slices (zeropoint) keep their value; the scale of a slice with a not-finite value is
    nan.

    Args:
      x: Floating values; half precision is quantised in float32.
      scheme: `absmax`: integers within -(2^(bits-1) - 1) .. 2^(bits-1) - 1; `zeropoint`: all 2^bits of that width.
      bits: Width of the integers, 2 to 8.
      axes: The axes that share one scale; None: all of them.

    Returns:
      Integers shaped as `x`; scales, and zero points of `zeropoint`, with length 1 along `axes`, in at least float32.

    >>> import jax.numpy as jnp
    >>> q = quantize(jnp.array([-127.0, 0.0, 0.6, 63.4]), "absmax", 8)
    >>> q.qvalue.tolist(), q.scale.tolist(), q.zero_point
    ([-127, 0, 1, 63], [1.0], None)
    >>> q = quantize(jnp.array([10.0, 13.2, 25.0]), "zeropoint", 4)
    >>> q.qvalue.tolist(), q.zero_point.tolist()
    ([-8, -5, 7], [18.0])
    """
    _require_bits(bits, 8)
    require_scheme(scheme)
    wide = _wide(x)
    if scheme == "absmax":
        integers, peak, _ = _absmax_integers(wide, bits, axes)
        finite, zero_point = jnp.isfinite(peak), None
        step = peak / (2 ** (bits - 1) - 1)
    else:
        half = 2 ** (bits - 1)
        integers, bottom, step, constant = _zeropoint_integers(wide, bits, axes)
        low = jnp.min(wide, axis=_reduced(axes), keepdims=True, initial=jnp.inf)
        finite = jnp.isfinite(low) & jnp.isfinite(step)
        # A constant slice is 1 times its value: integer -half, and integer + zero_point = 1.
        step = jnp.where(constant, low, step)
        zero_point = jnp.where(constant, 1.0, bottom) + half
        integers = jnp.where(constant, -half, integers - zero_point)
    integers = jnp.where(finite, integers, 0.0).astype(jnp.int8)
    return Quantized(integers, jnp.where(finite, step, jnp.nan), zero_point)


def dequantize(x: Quantized) -> jax.Array:
    """Computes the values (qvalue + zero_point) * scale in the dtype of the scales, with the shape of the array.

    >>> import jax.numpy as jnp
    >>> dequantize(quantize(jnp.array([10.0, 13.2, 25.0]), "zeropoint", 4)).round(4).tolist()
    [10.0, 13.0, 25.0]
    """
    values = x.qvalue.astype(x.scale.dtype)
    values = values if x.zero_point is None else values + x.zero_point
    return _within(values * x.scale, x.scale.dtype)
