"""Rotary position embedding, and its frequencies.

Letters inside functions: T positions, H head width, R <= H channels that are rotated.
"""

import math

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from orthojax.ops.statistics import wide_dtype


def rotary(
    x: jax.Array, positions: jax.Array, theta: float = 10_000.0, *, frequencies: ArrayLike | None = None
) -> jax.Array:
    """Rotary position embedding: rotates pairs of channels by an angle that grows with the position.

    Channel pair (i, i + R/2) at position p rotates by p times frequency i, the half-split layout of Llama checkpoints.

    Args:
      x: [..., T, heads, H]; queries or keys.
      positions: [T], integers.
      theta: Base of the wavelengths: frequencies are those of `rotary_frequencies(H, theta)`.
      frequencies: [R/2], instead; the channels from R on stay as they are.

    Returns:
      Shape and dtype of `x`; computed in float32 at least.

    Raises:
      ValueError: For odd H, more frequencies than pairs, other than T positions, or a base that is not positive.

    Reference:
      Su et al., `RoFormer <https://arxiv.org/abs/2104.09864>`_, 2021.
    """
    if x.ndim < 3 or positions.shape != x.shape[-3:-2]:
        raise ValueError(f"x has shape {x.shape}, positions {positions.shape}; allowed: [..., T, heads, H] and [T]")
    dtype = wide_dtype(x)
    if frequencies is None:
        frequencies = rotary_frequencies(x.shape[-1], theta)
    frequencies = jnp.asarray(frequencies, dtype)
    if frequencies.ndim != 1 or 2 * frequencies.size > x.shape[-1]:
        raise ValueError(f"frequencies have shape {frequencies.shape}; allowed: [R/2] with R <= {x.shape[-1]}")
    angles = (positions.astype(dtype)[:, None] * frequencies[None, :])[:, None, :]
    angles = jnp.expand_dims(angles, tuple(range(x.ndim - 3)))
    turned, rest = jnp.split(x, [2 * frequencies.size], axis=-1)
    first, second = jnp.split(turned.astype(dtype), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned


def rotary_frequencies(width: int, theta: float = 10_000.0) -> jax.Array:
    r"""Radians per position of each pair of channels, :math:`\theta^{-2i/R}`, [R/2].

    Args:
      width: R.
      theta: Base of the wavelengths.

    Raises:
      ValueError: For odd R, or a base that is not positive.

    >>> rotary_frequencies(4, 100.0).tolist()
    [1.0, 0.10000000149011612]
    """
    if width % 2:
        raise ValueError(f"rotary positions need an even head width, got {width}")
    if isinstance(theta, int | float) and not theta > 0:
        raise ValueError(f"theta={theta}; allowed: a positive number")
    return theta ** (-jnp.arange(0, width, 2, dtype=float) / width)


def llama3_frequencies(
    frequencies: ArrayLike,
    factor: float,
    original_length: int,
    low_frequency_factor: float = 1.0,
    high_frequency_factor: float = 4.0,
) -> jax.Array:
    r"""Frequencies for sequences `factor` times longer, as Llama 3.1 lowers them.

    With the number of turns over the original length, :math:`n = L f / 2 \pi`: where it is above
    `high_frequency_factor` f stays, below `low_frequency_factor` it is divided by `factor`, and between them
    interpolated linearly in n.

    Args:
      frequencies: [R/2], radians per position.
      factor: By how much the longest wavelengths grow.
      original_length: L, in tokens.
      low_frequency_factor: See above.
      high_frequency_factor: See above.

    Returns:
      [R/2].

    Reference:
      `The Llama 3 Herd of Models <https://arxiv.org/abs/2407.21783>`_, 2024, and the configuration that its models are
      published with.

    >>> llama3_frequencies(jnp.array([1.0, 0.1]), 8.0, 32).round(4).tolist()
    [1.0, 0.0125]
    """
    f = jnp.asarray(frequencies)
    turns = original_length * f / (2 * math.pi)
    kept = jnp.clip((turns - low_frequency_factor) / (high_frequency_factor - low_frequency_factor), 0.0, 1.0)
    return f * (kept + (1.0 - kept) / factor)
