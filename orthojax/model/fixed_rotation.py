"""Fixed orthogonal matrices inside the model, the alternative to OrthoAdam that its authors name and do not take.

From Attention to Activation, section 4.2: "make Q part of the model parameters that are kept fixed during training".
What a part writes to the residual stream is turned by a matrix of its own; Adam on such a model is OrthoAdam (axes
`writers`) on the plain one, seen in other coordinates.
"""

import zlib

import jax
import jax.numpy as jnp

from orthojax.ops.orthogonal import fixed_transform, hash_signs


def _signs(x: jax.Array, name: str, layer: int) -> jax.Array:
    # The key and the name are those of OrthoAdam with seed 0, so that the two can be compared run by run.
    signs = hash_signs(zlib.crc32(name.encode()), (layer,), x.shape[-1])
    return jnp.asarray(signs.reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


def to_residual(x: jax.Array, name: str, layer: int = 0) -> jax.Array:
    """Q^T x along the last axis: from the coordinates of the part `name` to those of the residual stream.

    Args:
      x: [..., D].
      name: Of the part's kernel, as `layers/mlp/output/kernel`.
      layer: Its layer number.
    """
    return _signs(x, name, layer) * fixed_transform(x, x.ndim - 1, transpose=True)


def from_residual(x: jax.Array, name: str, layer: int = 0) -> jax.Array:
    """Q x along the last axis: the inverse of `to_residual`."""
    return fixed_transform(_signs(x, name, layer) * x, x.ndim - 1)
