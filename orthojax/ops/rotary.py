"""Rotary position embedding."""

import jax
import jax.numpy as jnp


def rotary(x: jax.Array, positions: jax.Array, theta: float = 10_000.0) -> jax.Array:
    """Turns pairs of channels by an angle that grows with the position.

    Channel pair (i, i + H/2) of position p turns by p * theta^(-2i/H), the half-split layout of Llama checkpoints.

    Args:
      x: [..., T, heads, H] with even H; queries or keys.
      positions: [T], integers.
      theta: Base wavelength.

    Returns:
      Shape and dtype of `x`; computed in float32 at least.

    Raises:
      ValueError: For odd H.

    Reference:
      Su et al., `RoFormer <https://arxiv.org/abs/2104.09864>`_, 2021.
    """
    width = x.shape[-1]
    if width % 2:
        raise ValueError(f"rotary positions need an even head width, got {width}")
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    frequencies = theta ** (-jnp.arange(0, width, 2, dtype=dtype) / width)
    angles = (positions.astype(dtype)[:, None] * frequencies[None, :])[:, None, :]
    angles = jnp.expand_dims(angles, tuple(range(x.ndim - 3)))
    first, second = jnp.split(x.astype(dtype), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
