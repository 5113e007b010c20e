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
      [B, T, D], at least float32; channels in the order of their singular values, the largest first.
    """
    x = at_least_float32(x)
    T, D = x.shape[-2:]
    # From the eigenvectors of the smaller Gram matrix, ten times faster than a singular value decomposition; rounding
    # reaches singular values below 1e-3 of the largest, which no kurtosis notices.
    if T >= D:
        _, right = jnp.linalg.eigh(jnp.einsum("BTD,BTE->BDE", x, x, precision="highest"))
        return jnp.einsum("BTD,BDE->BTE", x, right, precision="highest")[..., ::-1]
    squares, left = jnp.linalg.eigh(jnp.einsum("BTD,BSD->BTS", x, x, precision="highest"))
    turned = (left * jnp.sqrt(jnp.maximum(squares, 0.0))[..., None, :])[..., ::-1]
    return jnp.pad(turned, ((0, 0), (0, 0), (0, D - T)))
