"""Runs a function on the shards of batch and heads: XLA cannot partition a Pallas kernel by itself.

Dimensions are letters: "b" and "k" may be sharded, over whatever axes of a mesh; every other dimension is whole.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

_SHARDED = ("b", "k")


def _specs(dims: tuple[str, ...], first: str, spec, shape, sizes) -> list[PartitionSpec]:
    """One for each array, so that all are sharded as the first is, where its shards are of equal size."""
    axes = {}
    for dim, names, size in zip(first, (*spec, *(None,) * len(first)), shape, strict=False):
        names = (names,) if isinstance(names, str) else names or ()
        if dim in _SHARDED and size % math.prod(sizes[name] for name in names) == 0:
            axes[dim] = names or None
    return [PartitionSpec(*(axes.get(dim) for dim in array)) for array in dims]


def _rule(_, operands, results, __, types, ___):
    counter = itertools.count()
    whole = [[f"w{next(counter)}" for _ in t.shape] for t in types[: len(types) - len(operands)]]
    given = [*whole, *map(list, operands)]
    text = " -> ".join(", ".join(" ".join(dims) for dims in side) for side in (given, results))
    factors = dict.fromkeys(itertools.chain(*given))  # in the order in which they appear, which is demanded
    return text, {"need_replication_factors": tuple(f for f in factors if f not in _SHARDED)}


def _partition(function, operands, results, mesh, arguments, _):
    whole, *arrays = arguments
    specs = _specs(operands + results, operands[0], arrays[0].sharding.spec, arrays[0].shape, mesh.shape)
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    replicated = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), whole)
    n = len(operands)
    return mesh, function, tuple(shardings[n:]), (replicated, *shardings[:n])


@functools.partial(custom_partitioning, static_argnums=(0, 1, 2))
def _partitioned(function, operands, results, whole, *arrays):
    del operands, results
    return function(whole, *arrays)


_partitioned.def_partition(_partition, sharding_rule=_rule)


def _automatic(function, operands, results, whole, *arrays):
    @jax.custom_batching.custom_vmap
    def run(whole, *arrays):
        return _partitioned(function, operands, results, whole, *arrays)

    @run.def_vmap
    def vmapped(size, batched, whole, *arrays):  # custom_partitioning has no rule of its own: fold the axis into "b"
        full = [
            a if is_batched else jnp.broadcast_to(a, (size, *a.shape)) for a, is_batched in zip(arrays, batched[1:])
        ]
        outs = run(whole, *(a.reshape(-1, *a.shape[2:]) for a in full))
        return tuple(a.reshape(size, -1, *a.shape[1:]) for a in outs), (True,) * len(results)

    return run(whole, *arrays)


def on_shards(
    function: Callable[..., tuple[jax.Array, ...]],
    operands: tuple[str, ...],
    results: tuple[str, ...],
    whole: Any,
    *arrays: jax.Array,
) -> tuple[jax.Array, ...]:
    """function(whole, *arrays), each device on its shard of batch and heads; the results are sharded alike.

    Inside a `shard_map` over all axes it is a plain call. On Explicit axes the first array's type says how it is
    sharded; on Auto axes the partitioner does, when it compiles.

    Args:
      function: Treats every entry of "b" and of "k" by itself; returns a tuple.
      operands: Dimensions of each array, one letter each; all start with "b".
      results: Dimensions of each result.
      whole: A pytree of arrays that every device gets in full.
      *arrays: What is sharded, as the first is.

    Returns:
      What `function` returns.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.axis_types and all(kind == AxisType.Manual for kind in mesh.axis_types):
        return function(whole, *arrays)
    sharding = jax.typeof(arrays[0]).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return _automatic(function, operands, results, whole, *arrays)
    specs = _specs(operands + results, operands[0], sharding.spec, arrays[0].shape, sharding.mesh.shape)
    n = len(operands)
    arrays = tuple(jax.sharding.reshard(array, spec) for array, spec in zip(arrays, specs[:n], strict=True))
    mapped = jax.shard_map(
        function, in_specs=(PartitionSpec(), *specs[:n]), out_specs=tuple(specs[n:]), check_vma=False
    )
    return mapped(whole, *arrays)
