"""Value-state drains: how much a token can contribute at all. Legend: B batch, N query heads, S key positions.

The norm of a value is taken after the output projection, ||W_o^h v_j||_2 with the rows of W_o that belong to query head
h of the same layer, because that is what reaches the residual stream.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from orthojax.ops.statistics import at_least_float32


def value_norm_first(value_norms: ArrayLike) -> jax.Array:
    """||W_o v||_2 of the token at position 0, mean over heads and sequences.

    Definition: value norms are of W_o v (Active-Dormant Attention Heads, arXiv 2410.13835: value-state drains);
    measured for language models too.

    Args:
      value_norms: ||W_o^h v_j||_2 of one layer, [B, N, S].

    Returns:
      A scalar, at least float32.
    """
    return jnp.mean(at_least_float32(value_norms)[..., 0])


def value_norm_rest(value_norms: ArrayLike) -> jax.Array:
    """||W_o v||_2, mean over positions >= 1, heads and sequences; see `value_norm_first`."""
    return jnp.mean(at_least_float32(value_norms)[..., 1:])
