"""Types of arrays within `jax.shard_map`: over which mesh axes they vary."""

from typing import Any

import jax


def varying_alike(arrays: Any) -> Any:
    """Within `shard_map`: arrays typed as varying over the same mesh axes, as loops and derivative rules require.

    The transpose of the cast sums the gradient of what the devices share. Outside of a `shard_map`, or in one without
    these types (`check_vma=False`), the arrays as they are.
    """

    def axes_of(array: jax.Array) -> frozenset[str]:
        return jax.typeof(array).mat.varying

    every = frozenset[str]().union(*map(axes_of, jax.tree.leaves(arrays)))

    def cast(array: jax.Array) -> jax.Array:
        missing = every - axes_of(array)
        return jax.lax.pcast(array, tuple(missing), to="varying") if missing else array

    return jax.tree.map(cast, arrays)
