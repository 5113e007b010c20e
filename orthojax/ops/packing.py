"""Arrays of 8 or 4 bits, in blocks with a scale each: how an optimizer keeps moments in little memory."""

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

_SMALLEST_BLOCK = 16
_SMALLEST_SIZE = 4096  # arrays with fewer elements are not packed


class Packing(NamedTuple):
    """How an array is rounded to few bits.

    Attributes:
      bits: 4 or 8.
      block: The most consecutive values that share a scale.
      at_random: Rounds to either neighbour, the nearer the likelier, so that the mean is right.
    """

    bits: Literal[4, 8]
    block: int
    at_random: bool

    def block_of(self, shape: tuple[int, ...]) -> int | None:
        """Returns the largest even divisor of the last axis up to `block`; None for an array that stays float.

        >>> [packing_of("int4").block_of(shape) for shape in ((128, 768), (128, 96), (128, 31), (64,))]
        [64, 48, None, None]
        """
        if not shape or math.prod(shape) < _SMALLEST_SIZE:
            return None
        divisors = (block for block in range(self.block, _SMALLEST_BLOCK - 1, -1) if shape[-1] % block == 0)
        return next((block for block in divisors if block % 2 == 0), None)


# 4 bits of larger blocks, or rounded to the nearest level, cost perplexity and may make outliers.
_PACKINGS = {"int8": Packing(8, 256, at_random=False), "int4": Packing(4, 64, at_random=True)}


def packing_of(dtype: Any) -> Packing | None:
    """Returns what is meant by `int8` and `int4`, or a `Packing` itself; None for all else."""
    if isinstance(dtype, Packing):
        return dtype
    try:
        return _PACKINGS.get(jnp.dtype(dtype).name)
    except TypeError:
        return None


class Packed(NamedTuple):
    """An array [..., n] of few bits.

    Attributes:
      codes: int8 [..., n / block, block] or, of magnitudes, uint8; with 4 bits uint8 [..., n / block, block / 2], two
        to a byte: those of the first half of a block in the low bits.
      scales: float32 [..., n / block], the largest absolute value of each block of consecutive values.
    """

    codes: jax.Array
    scales: jax.Array


def pack(x: jax.Array, packing: Packing, *, signed: bool, noise: jax.Array | None = None) -> Packed:
    """Rounds an array [..., n] of whole blocks to few bits.

    Signed values have the levels -7 ... 7 (4 bits) or -127 ... 127, times scale / 7 or scale / 127; magnitudes have
    1 ... 16 or 1 ... 256, times scale / 16 or scale / 256, and no 0: a step is divided by them.

    Args:
      x: Values; without a sign they are at least 0. A block with a nan has the scale inf.
      packing: Bits and block.
      signed: Whether values have signs.
      noise: Numbers in [0, 1), like x, for rounding at random.
    """
    bits, block = packing.bits, packing.block_of(x.shape)
    assert block is not None
    blocks = x.reshape(*x.shape[:-1], -1, block)
    scales = jnp.max(jnp.where(jnp.isnan(blocks), jnp.inf, jnp.abs(blocks)), axis=-1)  # a CPU's may leave out a nan
    low, high, offset = _levels(bits, signed)
    unit = jnp.where(scales > 0, (high + offset) / jnp.where(scales > 0, scales, 1.0), 0.0)
    levels = blocks * unit[..., None] - offset
    if packing.at_random:
        assert noise is not None
        levels = jnp.floor(levels + noise.reshape(blocks.shape))
    levels = jnp.clip(jnp.round(levels), low, high)
    if bits == 8:
        return Packed(levels.astype(jnp.int8 if signed else jnp.uint8), scales)
    codes = (levels[..., : block // 2] - low) + 16 * (levels[..., block // 2 :] - low)
    return Packed(codes.astype(jnp.uint8), scales)


def packed_zeros(shape: tuple[int, ...], packing: Packing, *, signed: bool) -> Packed:
    """Returns zeros of a shape of whole blocks."""
    bits, block = packing.bits, packing.block_of(shape)
    assert block is not None
    blocks = (*shape[:-1], shape[-1] // block)
    codes = jnp.zeros((*blocks, block * bits // 8), jnp.int8 if signed and bits == 8 else jnp.uint8)
    return Packed(codes, jnp.zeros(blocks, jnp.float32))


def unpack(packed: Packed, bits: int, *, signed: bool) -> jax.Array:
    """Returns what `pack` has kept, float32 [..., n]."""
    low, high, offset = _levels(bits, signed)
    codes = packed.codes
    if bits == 4:
        codes = jnp.stack([codes & 15, codes >> 4], axis=-2).reshape(*packed.scales.shape, -1)
    levels = codes.astype(packed.scales.dtype) + (low if bits == 4 else 0) + offset
    blocks = levels * (packed.scales / (high + offset))[..., None]
    return blocks.reshape(*packed.scales.shape[:-1], -1)


def _levels(bits: int, signed: bool) -> tuple[int, int, int]:
    """Returns the smallest and the largest level, and what is added to a level before the scale: 1 leaves out 0."""
    return (1 - 2 ** (bits - 1), 2 ** (bits - 1) - 1, 0) if signed else (0, 2**bits - 1, 1)
