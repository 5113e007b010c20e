"""Activations in another orthonormal basis. Legend: B batch, T positions, D d_model.

From Attention to Activation (arXiv 2410.17174), appendix F and Figure 6.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from orthojax.ops.statistics import at_least_float32


def in_singular_basis(x: ArrayLike) -> jax.Array:
    """X V for every sequence, with V [D, D] the right singular vectors of its X [T, D].

    The paper's measure of how large an orthogonal change of basis could make the kurtosis: V gathers the energy of a
    sequence in as few channels as an orthonormal basis can. X V = U S, so the channels beyond min(T, D) are 0, whatever
    V has there; they count as channels. The signs of singular vectors are arbitrary, which moves kurtosis (whose mean
    they move) a little.

    Args:
      x: [B, T, D].

    Returns:
      [B, T, D], at least float32.
    """
    x = at_least_float32(x)
    left, scale, _ = jnp.linalg.svd(x, full_matrices=False)
    turned = left * scale[..., None, :]
    return jnp.pad(turned, ((0, 0), (0, 0), (0, x.shape[-1] - turned.shape[-1])))
