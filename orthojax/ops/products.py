"""Products of activations with kernels, in the form that XLA runs fastest on the platform, and types on a mesh."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.typing import DTypeLike


def kernel_product(
    x: jax.Array, kernel: jax.Array, *, contract: int = 0, preferred_element_type: DTypeLike | None = None
) -> jax.Array:
    """Computes the product of the last axis of `x` with one axis of a kernel: x @ kernel, or x @ kernel.T.

    On a CPU the leading axes of `x` become one: with several, the gradient of the kernel sums over all of them, and XLA
    transposes large arrays first. With Explicit mesh axes, the leading axes stay as they are.

    x [..., in] and a kernel [in, out], or [out, in] with `contract=1`, give [..., out]; `preferred_element_type` is the
    dtype of the sums and of the result, by default that of the operands.
    """
    rows, dtype = _as_rows(x), jnp.promote_types(x.dtype, kernel.dtype)
    contracted = ((rows.ndim - 1,), (contract,))
    dot = partial(lax.dot_general, preferred_element_type=preferred_element_type)
    y = dot(rows.astype(dtype), kernel.astype(dtype), (contracted, ((), ())))
    return y.reshape(*x.shape[:-1], y.shape[-1])


def transposed_product(x: jax.Array, y: jax.Array, *, preferred_element_type: DTypeLike | None = None) -> jax.Array:
    """Sums the outer products of `x` and `y` over all leading axes: x.T @ y, the gradient of a kernel.

    `x` [..., in] and `y` [..., out] of one dtype give [in, out].
    """
    x, y = _as_rows(x), _as_rows(y)
    leading = tuple(range(x.ndim - 1))
    return lax.dot_general(x, y, ((leading, leading), ((), ())), preferred_element_type=preferred_element_type)


def _as_rows(x: jax.Array) -> jax.Array:
    if AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types or jax.default_backend() != "cpu":
        return x
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def is_head(path: str) -> bool:
    """Returns whether a linear layer is the output head, by its path, also inside another module (`lm/head`)."""
    return path.rpartition("/")[2] == "head"


def varying_alike(arrays: Any) -> Any:
    """Casts arrays within `shard_map` to types that vary over the same mesh axes, as loops and derivatives require.

    The transpose of the cast sums the gradient of what the devices share. Outside a `shard_map`, or in one without
    these types (`check_vma=False`), arrays stay as they are.
    """

    def axes_of(array: jax.Array) -> frozenset[str]:
        return jax.typeof(array).mat.varying

    every = frozenset[str]().union(*map(axes_of, jax.tree.leaves(arrays)))

    def cast(array: jax.Array) -> jax.Array:
        missing = every - axes_of(array)
        return jax.lax.pcast(array, tuple(missing), to="varying") if missing else array

    return jax.tree.map(cast, arrays)
