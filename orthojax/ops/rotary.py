"""Rotary position embedding, and its frequencies.

Letters inside functions: T positions, H head width, R <= H channels that are rotated.
"""

import math
import numbers

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from orthojax.ops.statistics import real_array, wide_dtype


def rotary(
    x: jax.Array,
    positions: jax.Array,
    theta: float = 10_000.0,
    *,
    frequencies: ArrayLike | None = None,
    scale: float = 1.0,
) -> jax.Array:
    """Rotates pairs of channels by an angle that grows with the position: rotary position embedding.

    Channel pair (i, i + R/2) at position p rotates by p times frequency i, the half-split layout of Llama checkpoints.

    Args:
      x: [..., T, heads, H]; queries or keys.
      positions: [T], or [..., T] if rows differ, integers.
      theta: Base of the wavelengths: frequencies are those of `rotary_frequencies(H, theta)`.
      frequencies: [R/2], to use instead; the channels from R on stay as they are.
      scale: Factor on the rotated channels, as in YaRN.

    Returns:
      An array with the shape and dtype of `x`, computed in at least float32; ValueError for shapes that do not fit.

    Reference:
      Su et al., `RoFormer <https://arxiv.org/abs/2104.09864>`_, 2021.
    """
    if x.ndim < 3 or positions.shape not in (x.shape[-3:-2], x.shape[:-2]):
        allowed = "[..., T, heads, H] and [T] or [..., T]"
        raise ValueError(f"x has shape {x.shape}, positions {positions.shape}; allowed: {allowed}")
    dtype = wide_dtype(x)
    if frequencies is None:
        frequencies = rotary_frequencies(x.shape[-1], theta)
    frequencies = jnp.asarray(frequencies, dtype)
    if frequencies.ndim != 1 or 2 * frequencies.size > x.shape[-1]:
        raise ValueError(f"frequencies have shape {frequencies.shape}; allowed: [R/2] with R <= {x.shape[-1]}")
    angles = positions.astype(dtype)[..., None, None] * jnp.expand_dims(frequencies, tuple(range(positions.ndim + 1)))
    angles = jnp.expand_dims(angles, tuple(range(x.ndim - angles.ndim)))
    turned, rest = jnp.split(x, [2 * frequencies.size], axis=-1)
    first, second = jnp.split(turned.astype(dtype), 2, axis=-1)
    cos, sin = (a if scale == 1.0 else scale * a for a in (jnp.cos(angles), jnp.sin(angles)))
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned


def rotary_frequencies(width: int, theta: float | jax.Array = 10_000.0) -> jax.Array:
    r"""Returns the radians per position of each pair of channels, :math:`\theta^{-2i/R}`, [R/2].

    ValueError for odd `width` R, or a base `theta` that is not positive.

    >>> rotary_frequencies(4, 100.0).tolist()
    [1.0, 0.10000000149011612]
    """
    if not isinstance(width, numbers.Integral) or width < 0 or width % 2:
        raise ValueError(f"rotary positions need an even head width, got {width!r}")
    if not 0 < theta < math.inf if isinstance(theta, int | float) else jnp.ndim(real_array(theta, "theta")):
        raise ValueError(f"theta={theta}; allowed: a positive number")
    theta = float(theta) if isinstance(theta, int) else theta  # 2**31 or more is not an int32
    return theta ** (-jnp.arange(0, width, 2, dtype=float) / width)


def llama3_frequencies(
    frequencies: ArrayLike,
    factor: float,
    original_length: int,
    low_frequency_factor: float = 1.0,
    high_frequency_factor: float = 4.0,
) -> jax.Array:
    r"""Lowers frequencies for sequences `factor` times longer, as Llama 3.1 does.

    With the number of turns over the original length, :math:`n = L f / 2 \pi`: f stays if n is above
    `high_frequency_factor`, is divided by `factor` if n is below `low_frequency_factor`, and is interpolated linearly
    in n between them.

    Frequencies are [R/2], radians per position, and L is `original_length`, in tokens.

    Reference:
      `The Llama 3 Herd of Models <https://arxiv.org/abs/2407.21783>`_, 2024, and the configuration that its models are
      published with.

    >>> [round(f, 4) for f in llama3_frequencies(jnp.array([1.0, 0.1]), 8.0, 32).tolist()]
    [1.0, 0.0125]
    """
    f = jnp.asarray(frequencies)
    turns = original_length * f / (2 * math.pi)
    kept = jnp.clip((turns - low_frequency_factor) / (high_frequency_factor - low_frequency_factor), 0.0, 1.0)
    return f * (kept + (1.0 - kept) / factor)


def yarn_frequencies(
    width: int,
    theta: float,
    factor: float,
    original_length: int,
    low_frequency_factor: float = 1.0,
    high_frequency_factor: float = 32.0,
    truncate: bool = True,
) -> jax.Array:
    r"""Returns frequencies for sequences `factor` times longer, as YaRN lowers them ("NTK-by-parts").

    Pair i makes :math:`n_i = L \theta^{-2i/R} / 2 \pi` turns over the original length. Pairs before the one with
    `high_frequency_factor` turns keep their frequency, pairs after the one with `low_frequency_factor` turns have it
    divided by `factor`, and between them it is interpolated linearly in i; `truncate` rounds the two bounds outwards.

    R is `width`, `theta` the base of the wavelengths, above 1, and L `original_length`, in tokens; the next two
    arguments are beta_slow and beta_fast. The result is [R/2], radians per position.

    Reference:
      Peng et al., `YaRN <https://arxiv.org/abs/2309.00071>`_, 2023, section 3.2. The rounding, and bounds of 0 and
      R - 1, come from the configurations that models are published with.

    >>> lowered = yarn_frequencies(8, 100.0, 4.0, 64, high_frequency_factor=4.0) / rotary_frequencies(8, 100.0)
    >>> [round(f, 4) for f in lowered.tolist()]
    [1.0, 0.75, 0.5, 0.25]
    """
    plain = rotary_frequencies(width, theta)
    if not theta > 1:
        raise ValueError(f"theta={theta}; allowed: above 1")

    def pair_of(turns: float) -> float:
        return width * math.log(original_length / (2 * math.pi * turns)) / (2 * math.log(theta))

    first, last = pair_of(high_frequency_factor), pair_of(low_frequency_factor)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    lowered = jnp.clip((jnp.arange(width // 2) - first) / max(last - first, 1e-3), 0.0, 1.0)
    return plain * (1.0 - lowered + lowered / factor)


def dynamic_frequencies(
    width: int, theta: float, factor: float, original_length: int, length: int | jax.Array
) -> jax.Array:
    r"""Returns frequencies for a text of `length` tokens, with a base that grows with the length ("dynamic NTK").

    With L the original length, R the `width`, above 2, and :math:`n = \max(\mathrm{length}, L)`, the base is
    :math:`\theta (s n / L - s + 1)^{R / (R - 2)}` for the factor s: `theta` up to L. The result is [R/2], radians per
    position.

    Reference:
      The configurations that models are published with, as implementations read them; YaRN (Peng et al.,
      `arXiv 2309.00071 <https://arxiv.org/abs/2309.00071>`_), section 3.3, names it.

    >>> dynamic_frequencies(4, 100.0, 2.0, 8, 16).tolist() == rotary_frequencies(4, 900.0).tolist()
    True
    """
    n = jnp.maximum(length, original_length).astype(float)
    return rotary_frequencies(width, theta * (factor * n / original_length - factor + 1) ** (width / (width - 2)))


def yarn_mscale(factor: float, mscale: float) -> float:
    """Computes YaRN's factor for logits of longer sequences, 0.1 mscale ln(factor) + 1.

    >>> round(yarn_mscale(40.0, 0.707), 4)
    1.2608
    """
    return 0.1 * mscale * math.log(factor) + 1.0
