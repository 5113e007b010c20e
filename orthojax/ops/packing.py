"""Arrays of 8 or 4 bits, in blocks with a scale each: how an optimizer keeps moments in little memory."""

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

Bits = Literal[4, 8]

_BLOCK = {8: 256, 4: 64}  # the most values that share a scale; 4 bits of larger blocks cost perplexity
_SMALLEST_BLOCK = 16
_SMALLEST_SIZE = 4096  # arrays with fewer elements keep floating moments


class Packed(NamedTuple):
    """An array [..., n] of few bits.

    Attributes:
      codes: int8 [..., n] or, of magnitudes, uint8 [..., n]; with 4 bits uint8 [..., n / 2], two to a byte, the even
        position in the low half.
      scales: float32 [..., n / block], the largest absolute value of each block of consecutive values.
    """

    codes: jax.Array
    scales: jax.Array


def bits_of(dtype: Any) -> Bits | None:
    """Returns the bits of `int8` and `int4`, and None for all else."""
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        return None
    return 8 if name == "int8" else 4 if name == "int4" else None


def block_of(shape: tuple[int, ...], bits: int) -> int | None:
    """Returns the block along the last axis: its largest even divisor up to 256 (8 bits) or 64; None to stay float.

    >>> block_of((128, 768), 8), block_of((128, 96), 4), block_of((128, 31), 4), block_of((64,), 8)
    (256, 48, None, None)
    """
    if not shape or math.prod(shape) < _SMALLEST_SIZE:
        return None
    divisors = (block for block in range(_BLOCK[bits], _SMALLEST_BLOCK - 1, -1) if shape[-1] % block == 0)
    return next((block for block in divisors if block % 2 == 0), None)


def pack(x: jax.Array, bits: int, *, signed: bool, noise: jax.Array | None = None) -> Packed:
    """Rounds an array [..., n] with a `block_of` to few bits.

    Signed values have the levels -7 ... 7 (4 bits) or -127 ... 127, times scale / 7 or scale / 127; magnitudes have
    1 ... 16 or 1 ... 256, times scale / 16 or scale / 256, and no 0: a step is divided by them.

    Args:
      x: Values; without a sign they are at least 0. A block with a nan has the scale nan.
      bits: 4 or 8.
      signed: Whether values have signs.
      noise: Numbers in [0, 1), like x: rounds up where the fraction is larger. None rounds to the nearest.
    """
    block = block_of(x.shape, bits)
    assert block is not None
    blocks = x.reshape(*x.shape[:-1], -1, block)
    scales = jnp.max(jnp.abs(blocks), axis=-1)
    scales = jnp.where(jnp.isnan(jnp.sum(blocks, axis=-1)), jnp.nan, scales)  # a CPU's largest may leave it out
    low, high, offset = _levels(bits, signed)
    unit = jnp.where(scales > 0, (high + offset) / jnp.where(scales > 0, scales, 1.0), 0.0)
    levels = blocks * unit[..., None] - offset
    levels = jnp.round(levels) if noise is None else jnp.floor(levels + noise.reshape(blocks.shape))
    levels = jnp.clip(levels, low, high).reshape(x.shape)
    if bits == 8:
        return Packed(levels.astype(jnp.int8 if signed else jnp.uint8), scales)
    pairs = (levels - low).astype(jnp.uint8).reshape(*x.shape[:-1], -1, 2)
    return Packed(pairs[..., 0] | (pairs[..., 1] << 4), scales)


def packed_zeros(shape: tuple[int, ...], bits: int, *, signed: bool) -> Packed:
    """Returns an array of zeros, of a shape with a `block_of`."""
    block = block_of(shape, bits)
    assert block is not None
    codes = jnp.zeros((*shape[:-1], shape[-1] * bits // 8), jnp.int8 if signed and bits == 8 else jnp.uint8)
    return Packed(codes, jnp.zeros((*shape[:-1], shape[-1] // block), jnp.float32))


def unpack(packed: Packed, bits: int, *, signed: bool) -> jax.Array:
    """Returns what `pack` has kept, float32 [..., n]."""
    low, high, offset = _levels(bits, signed)
    codes = packed.codes
    if bits == 4:
        codes = jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    levels = codes.astype(packed.scales.dtype) + (low if bits == 4 else 0) + offset
    blocks = levels.reshape(*packed.scales.shape, -1) * (packed.scales / (high + offset))[..., None]
    return blocks.reshape(codes.shape)


def _levels(bits: int, signed: bool) -> tuple[int, int, int]:
    """Returns the smallest and the largest level, and what is added to a level before the scale: 1 leaves out 0."""
    return (1 - 2 ** (bits - 1), 2 ** (bits - 1) - 1, 0) if signed else (0, 2**bits - 1, 1)
