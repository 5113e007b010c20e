"""Quantisation to integers or narrow floats, simulated in floats (fake quantisation).

Simulation is x -> round(x / step) * step, quantising and dequantising in one. `axes` says which elements share one
step. Nothing here has a useful gradient (rounding is flat).
"""

import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from orthojax.ops.statistics import at_least_float32, axes_of, real_array, shrink

Axes = int | Sequence[int] | None

# Bits of the mantissa, the lowest exponent and the largest number; E4M3 is E4M3FN, which has no infinity.
_E4M3, _E5M2, _E2M1 = (3, -6, 448.0), (2, -14, 57344.0), (1, 0, 6.0)


def _require_bits(bits: int) -> None:
    if not isinstance(bits, numbers.Integral) or not 2 <= bits <= 16:
        raise ValueError(f"bits={bits!r} cannot be simulated; allowed: 2 to 16, whole")


def _wide(x: ArrayLike) -> jax.Array:
    if not jnp.issubdtype((values := real_array(x)).dtype, jnp.floating):
        raise ValueError(f"values of dtype {values.dtype} cannot be quantised; allowed: floating ones")
    return at_least_float32(values)


def _within(values: jax.Array, dtype: Any) -> jax.Array:
    """Clips to a dtype: a grid with an exact 0 may reach half a step beyond its values, and so beyond the range."""
    limit = jnp.asarray(jnp.finfo(dtype).max, values.dtype)
    return jnp.clip(values, -limit, limit)


def absmax(x: ArrayLike, bits: int = 8, axes: Axes = None) -> jax.Array:
    """Rounds symmetrically: the largest absolute value becomes the largest integer.

    step = max|x| / (2^(bits-1) - 1) and y = round(x / step) * step, so int8 uses the 255 integers -127..127 and 0 stays
    0 (Dettmers et al. 2022 as used by From Attention to Activation, arXiv 2410.17174, section 5.2).

    |y - x| <= step / 2 (plus the rounding of the dtype), absmax(-x) = -absmax(x), and absmax(absmax(x)) = absmax(x) to
    the bit (in half precision up to 8 bits). A slice of zeros is returned as it is; a slice with a non-finite value
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
    wide, largest = _wide(x), 2 ** (bits - 1) - 1
    integers, peak, zero = _absmax_integers(wide, bits, axes)
    # (integer / largest) * peak, not integer * (peak / largest): the peak comes back exactly, and with it the step.
    fraction = jnp.where(jnp.abs(integers) == largest, jnp.sign(integers), integers / largest)
    return jnp.where(zero, wide, fraction * peak).astype(jnp.asarray(x).dtype)


def zeropoint(x: ArrayLike, bits: int = 4, axes: Axes = None) -> jax.Array:
    """Rounds asymmetrically: the smallest value becomes the smallest integer, the largest the largest.

    step = (max x - min x) / (2^bits - 1), z = round(min x / step) and y = k step with the integer k = round(x / step)
    clipped to z .. z + 2^bits - 1; the stored number is k - z (Dettmers et al. 2022 as used by From Attention to
    Activation, arXiv 2410.17174, section 5.2). Definition: zeropoint is not clamped to contain 0, so values of one sign
    use all 2^bits levels. A 0 between min and max is exact, because z is an integer.

    |y - x| <= step / 2 (plus the rounding of the dtype), and quantising twice changes nothing beyond that rounding. A
    constant slice is returned as it is; a slice with a non-finite value becomes nan.

    Arguments and result are as for `absmax`.

    >>> import jax.numpy as jnp
    >>> zeropoint(jnp.array([10.0, 13.2, 25.0])).round(4).tolist()  # not clamped to contain 0
    [10.0, 13.0, 25.0]
    >>> zeropoint(jnp.array([-1.0, 0.0, 2.0]), bits=2).tolist()
    [-1.0, 0.0, 2.0]
    """
    _require_bits(bits)
    wide, dtype = _wide(x), jnp.asarray(x).dtype
    integers, step, constant = _zeropoint_integers(wide, bits, axes)
    values = jnp.where(jnp.isfinite(step), _within(integers * step, dtype), jnp.nan)
    return jnp.where(constant, wide, values).astype(dtype)


def _round_to_float(x: jax.Array, bits: int, lowest: int, largest: float, noise: jax.Array | None = None) -> jax.Array:
    # Products with powers of two are exact, so this is the only rounding.
    step = jnp.maximum(_leading_power(x), 2.0**lowest) * 2.0**-bits
    steps = x / step
    steps = jnp.round(steps) if noise is None else jnp.floor(steps + noise)
    return jnp.clip(steps * step, -largest, largest)


# Bits, because the frexp and ldexp of XLA cost more than all else of rounding.


def _leading_power(x: jax.Array) -> jax.Array:
    """Computes the largest power of two up to |x|, 0 for subnormals."""
    if x.dtype != jnp.float32:
        return jnp.where(x == 0, 0.0, jnp.ldexp(jnp.ones_like(x), jnp.frexp(x)[1] - 1))
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(x, jnp.uint32) & 0x7F800000, jnp.float32)


def _power_of_two(exponent: jax.Array, dtype: Any) -> jax.Array:
    """Computes 2^exponent, of -126 to 127."""
    if dtype != jnp.float32:
        return jnp.ldexp(jnp.ones((), dtype), exponent)
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _in_blocks(x: jax.Array, axes: tuple[int, ...], size: int) -> tuple[jax.Array, tuple[int, ...]]:
    """Splits each of some ascending axes as `split_blocks`; returns the axes within a block as well."""
    for axis in reversed(axes):
        x = split_blocks(x, axis, size)
    return x, tuple(axis + i + 1 for i, axis in enumerate(axes))


def _of_blocks(x: jax.Array, axes: tuple[int, ...], shape: tuple[int, ...]) -> jax.Array:
    """Inverts `_in_blocks` of an array of this shape."""
    for axis in axes:
        x = join_blocks(x, axis, shape[axis])
    return x


def _block_axes(x: jax.Array, axis: int | Sequence[int]) -> tuple[int, ...]:
    if axis is None or not 1 <= np.size(axis) <= 2:
        raise ValueError(f"axis={axis!r}; allowed: one axis, or two for square blocks")
    return tuple(sorted(axes_of(axis, x.ndim)))


def split_blocks(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Splits an axis [n] in two, [ceil(n / size), size]; the end of the last block is filled with zeros.

    >>> import jax.numpy as jnp
    >>> split_blocks(jnp.array([1, 2, 3]), 0, 2).tolist()
    [[1, 2], [3, 0]]
    """
    axis %= x.ndim
    size = min(size, max(x.shape[axis], 1))  # a short axis is not padded to a whole block
    blocks = -(-x.shape[axis] // size)
    padding = [(0, blocks * size - n if a == axis else 0) for a, n in enumerate(x.shape)]
    return jnp.pad(x, padding).reshape(*x.shape[:axis], blocks, size, *x.shape[axis + 1 :])


def join_blocks(x: jax.Array, axis: int, n: int) -> jax.Array:
    """Inverts `split_blocks` of an axis >= 0 that had n elements."""
    joined = x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])
    return jax.lax.slice_in_dim(joined, 0, n, axis=axis)


def e4m3(x: ArrayLike, axes: Axes = None, block: int | None = None) -> jax.Array:
    """Rounds to the 8-bit float E4M3FN: the largest absolute value becomes 448, the format's largest.

    y = E4M3(x s) / s with s = 448 / max|x|, to nearest even (FP8 Formats for Deep Learning, arXiv 2209.05433, with the
    scale of the current tensor). With `block`, each piece of that many neighbours along each of `axes` has its own
    scale, like the 1 x 128 tiles and 128 x 128 blocks of DeepSeek-V3 (arXiv 2412.19437, section 3.3.2); the last piece
    may be smaller. Scales stay float32.

    |y - x| <= max(|x| / 16, max|x| / (448 2^10)) (plus the rounding of the dtype), e4m3(-x) = -e4m3(x),
    e4m3(e4m3(x)) = e4m3(x) to the bit, and multiplying x by a power of two multiplies y by it. A slice of zeros is
    returned as it is; a slice with a non-finite value becomes nan. Arguments and result are otherwise as for `absmax`.

    >>> import jax.numpy as jnp
    >>> e4m3(jnp.array([-448.0, 17.0, 1.06, 0.003])).tolist()  # the smallest step is 2^-9
    [-448.0, 16.0, 1.0, 0.00390625]
    """
    wide, dtype = _wide(x), jnp.asarray(x).dtype
    if block is not None:
        if not isinstance(block, numbers.Integral) or block < 1:
            raise ValueError(f"block={block!r}; allowed: 1 or more neighbours, whole")
        split = tuple(sorted(axes_of(axes, wide.ndim, "axes")))
        blocks, inner = _in_blocks(wide, split, int(block))
        return _of_blocks(e4m3(blocks, inner), split, wide.shape).astype(dtype)
    scaled, back = _scaled_to(wide, axes, _E4M3[2])
    return back(_round_to_float(scaled, *_E4M3)).astype(dtype)


def e5m2(x: ArrayLike, axes: Axes = None) -> jax.Array:
    """Rounds to the 8-bit float E5M2: the largest absolute value becomes 57344, the format's largest finite one.

    y = E5M2(x s) / s with s = 57344 / max|x|, to nearest even (FP8 Formats for Deep Learning, arXiv 2209.05433, where
    it is the format of gradients). |y - x| <= max(|x| / 8, max|x| / (57344 2^17)); arguments, result and other
    properties are those of `e4m3`.

    >>> import jax.numpy as jnp
    >>> e5m2(jnp.array([-57344.0, 17.0, 1.1])).tolist()
    [-57344.0, 16.0, 1.0]
    """
    scaled, back = _scaled_to(_wide(x), axes, _E5M2[2])
    return back(_round_to_float(scaled, *_E5M2)).astype(jnp.asarray(x).dtype)


def mxfp4(x: ArrayLike, axis: int | Sequence[int] = -1, *, noise: jax.Array | None = None) -> jax.Array:
    """Rounds to MXFP4: 32 neighbours along an axis become 4-bit E2M1 floats that share a power of two as scale.

    y = E2M1(x / s) s with s = 2^(floor(log2 max|x|) - 2), an exponent of 8 bits (E8M0), to nearest even; what is above
    6 s becomes 6 s (OCP Microscaling Formats, version 1.0). The last block may be smaller.

    |y - x| <= max|x| / 4, because the largest may be clipped; mxfp4 has the other properties of `e4m3`. The values of
    E2M1 are 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with a sign.

    Two axes give square blocks, 32 x 32, of which a matrix and its transpose round alike. With `noise`, uniform in
    [0, 1) and shaped as `x`, 3/4 of each element is rounded to either neighbour, the nearer the
    likelier, and divided by 3/4: nothing is clipped, and the mean over the noise is x (Training LLMs with MXFP4, arXiv
    2502.20586). Arguments and result are otherwise as for `e4m3`.

    >>> import jax.numpy as jnp
    >>> mxfp4(jnp.array([7.9, -2.5, 0.6, 0.25])).tolist()
    [6.0, -2.0, 0.5, 0.0]
    """
    at = _block_axes(wide := _wide(x), axis)
    blocks, inner = _in_blocks(wide, at, 32)
    peak = jnp.max(jnp.abs(blocks), inner, keepdims=True, initial=0.0)
    exponent = jnp.clip(jnp.frexp(peak)[1] - 3, -127, 127)
    share = 1.0
    if noise is not None:
        noise, share = _in_blocks(noise, at, 32)[0], 0.75
    y = _round_to_float(blocks * _power_of_two(-exponent, blocks.dtype) * share, *_E2M1, noise) / share
    # In two steps: 2^-127 is a subnormal of float32, which hardware may take for 0.
    y = y * _power_of_two(jnp.maximum(exponent, -126), blocks.dtype) * jnp.where(exponent < -126, 0.5, 1.0)
    y = jnp.where(jnp.isfinite(peak), jnp.where(peak < jnp.finfo(wide.dtype).tiny, blocks, y), jnp.nan)
    return _of_blocks(y, at, wide.shape).astype(jnp.asarray(x).dtype)


def nvfp4(
    x: ArrayLike, axis: int | Sequence[int] = -1, axes: Axes = None, *, noise: jax.Array | None = None
) -> jax.Array:
    """Rounds to NVFP4: 16 neighbours along an axis become 4-bit E2M1 floats with an E4M3 scale, relative to a tensor's.

    y = E2M1(x / (s g)) s g with the scale g = max|x| / (6 448) of a tensor and s = E4M3(max_block|x| / (6 g)) of a
    block, all to nearest even and clipped at the largest (Pretraining Large Language Models with NVFP4, arXiv
    2509.25149). The last block may be smaller. g stays float32. Definition here: a block whose s rounds to 0 becomes 0.

    If every block's peak is above 2^-6 / 448 of the tensor's, s is not subnormal, |y - x| <= 0.18 max_block|x|, and
    nvfp4 has the other properties of `e4m3`. `axes` share one scale g, `axis` among them; None: all of them. Two axes
    give square blocks, 16 x 16. With `noise`, as for `mxfp4`, elements are rounded at random as they are: the mean is
    x, except for the largest of a block whose s was rounded down, which are clipped, and for blocks whose s is 0. The
    rest is as for `e4m3`.

    >>> import jax.numpy as jnp
    >>> nvfp4(jnp.array([2688.0, -2000.0, 200.0])).tolist()  # g = 1, s = 448
    [2688.0, -1792.0, 224.0]
    """
    at = _block_axes(wide := _wide(x), axis)
    scaled, back = _scaled_to(wide, axes, _E2M1[2] * _E4M3[2])
    blocks, inner = _in_blocks(scaled, at, 16)
    largest = jnp.max(jnp.abs(blocks), inner, keepdims=True, initial=0.0)
    scale = _round_to_float(largest / _E2M1[2], *_E4M3)
    noise = None if noise is None else _in_blocks(noise, at, 16)[0]
    elements = _round_to_float(jnp.where(scale == 0, 0.0, blocks / jnp.where(scale == 0, 1.0, scale)), *_E2M1, noise)
    return back(_of_blocks(elements * scale, at, wide.shape)).astype(jnp.asarray(x).dtype)


class NumberFormat(NamedTuple):
    """A number format: the functions that round to it, and its sizes."""

    bits: int | None  # width of a number; None for integers, which have any
    # (x, bits, axes) -> x rounded, with one scale for all of `axes`; None if it only has blocks.
    slices: Callable[[jax.Array, int, Axes], jax.Array] | None
    # (x, axes) -> x rounded in blocks along the first of `axes`, or along all; None if it has no blocks.
    blocks: Callable[[jax.Array, tuple[int, ...]], jax.Array] | None = None
    block: int = 0  # neighbours in a block


FORMATS = {
    "absmax": NumberFormat(None, absmax),
    "zeropoint": NumberFormat(None, zeropoint),
    "e4m3": NumberFormat(8, lambda x, bits, axes: e4m3(x, axes), lambda x, axes: e4m3(x, axes, 128), 128),
    "e5m2": NumberFormat(8, lambda x, bits, axes: e5m2(x, axes)),
    "mxfp4": NumberFormat(4, None, lambda x, axes: mxfp4(x, axes[0]), 32),
    "nvfp4": NumberFormat(4, None, lambda x, axes: nvfp4(x, axes[0], axes if len(axes) > 1 else None), 16),
}
"""The number formats by name. Settings of its floats and the card's list are made from it."""


def _scaled_to(wide: jax.Array, axes: Axes, largest: float) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """Returns x s, with s = largest / max|x| of every slice, and the function that divides by s again."""
    peak = jnp.max(jnp.abs(wide), axis=axes_of(axes, wide.ndim, "axes"), keepdims=True, initial=0.0)
    zero = peak < jnp.finfo(wide.dtype).tiny
    # The power of two is split off, because s would overflow for small numbers.
    exponent = jnp.where(zero, 0, jnp.clip(jnp.frexp(peak)[1] - 1, -126, 126))
    size = jnp.where(zero, 1.0, jnp.ldexp(peak, -exponent))

    def back(y: jax.Array) -> jax.Array:
        # The peak comes back exactly, and with it the scale.
        y = jnp.where(jnp.abs(y) == largest, jnp.sign(y) * size, y * (size / largest))
        return jnp.where(zero, wide, y * _power_of_two(exponent, wide.dtype))

    return wide * _power_of_two(-exponent, wide.dtype) * (largest / size), back


def _absmax_integers(wide: jax.Array, bits: int, axes: Axes) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns integers as floats, max|x| of every slice, and a mask of the slices that are zero."""
    peak = jnp.max(jnp.abs(wide), axis=axes_of(axes, wide.ndim, "axes"), keepdims=True, initial=0.0)
    zero, factor = peak < jnp.finfo(wide.dtype).tiny, shrink(peak)
    return jnp.round(wide * factor / jnp.where(zero, 1.0, peak * factor) * (2 ** (bits - 1) - 1)), peak, zero


def _zeropoint_integers(wide: jax.Array, bits: int, axes: Axes) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns integers as floats, the step of every slice, and a mask of constant slices."""
    levels = 2**bits - 1
    low = jnp.min(wide, axis=axes_of(axes, wide.ndim, "axes"), keepdims=True, initial=jnp.inf)
    high = jnp.max(wide, axis=axes_of(axes, wide.ndim, "axes"), keepdims=True, initial=-jnp.inf)
    factor = shrink(jnp.maximum(high, -low))
    step = (high * factor - low * factor) / levels
    constant = (high == low) & jnp.isfinite(high) | (step < jnp.finfo(wide.dtype).tiny)
    safe = jnp.where(constant, 1.0, step)
    bottom = jnp.round(low * factor / safe)
    integers = jnp.clip(jnp.round(wide * factor / safe), bottom, bottom + levels)
    # high / step and low / step are `levels` apart; if both are ties, rounding could lose the top level.
    return jnp.where(wide == high, bottom + levels, integers), safe / factor, constant
