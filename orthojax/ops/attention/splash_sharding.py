"""Runs a function on the shards of batch and heads: XLA cannot partition a Pallas kernel by itself.

Dimensions are letters. "b" (batch), "n" (query heads) and "k" (key-value heads) may be sharded, the heads alike; every
other dimension is whole.
"""

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

BATCH_AXES, HEAD_AXES = ("data", "fsdp"), ("tensor",)  # on a mesh with Auto axes, whose types do not tell
_SHARDED = "bnk"


def _names(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _dividing(names: tuple[str, ...], size: int, mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """As many of the mesh axes, in their order, as make equal shards of a dimension."""
    kept: tuple[str, ...] = ()
    for name in names:
        if size % math.prod(mesh_shape[axis] for axis in (*kept, name)) == 0:
            kept = (*kept, name)
    return kept


def _specs(
    operands: tuple[str, ...],
    results: tuple[str, ...],
    shapes: list[tuple[int, ...]],
    axes: Mapping[str, tuple[str, ...]],
    mesh_shape: Mapping[str, int],
) -> tuple[list[PartitionSpec], list[PartitionSpec]]:
    """How operands and results are sharded when batch and heads are over those of `axes` that make equal shards."""
    sizes = dict(zip("".join(operands), itertools.chain(*shapes), strict=True))
    size = {"b": sizes["b"]} | dict.fromkeys("nk", math.gcd(sizes["n"], sizes["k"]))
    kept = {letter: _dividing(names, size[letter], mesh_shape) or None for letter, names in axes.items()}
    operand_specs, result_specs = (
        [PartitionSpec(*(kept.get(letter) for letter in dims)) for dims in side] for side in (operands, results)
    )
    return operand_specs, result_specs


def _rule(function, operands, results, mesh, types, _):
    del function, mesh
    counter = itertools.count()
    whole = [[f"w{next(counter)}" for _ in t.shape] for t in types[: len(types) - len(operands)]]
    given = [*whole, *map(list, operands)]
    text = " -> ".join(", ".join(" ".join(dims) for dims in side) for side in (given, results))
    factors = dict.fromkeys(itertools.chain(*given))  # in the order in which they appear, which is demanded
    return text, {"need_replication_factors": tuple(f for f in factors if f not in _SHARDED)}


def _partition(function, operands, results, mesh, arguments, _):
    whole, *arrays = arguments
    axes = dict(zip(operands[0], map(_names, arrays[0].sharding.spec), strict=True))
    axes = {"b": axes["b"], "n": axes["n"], "k": axes["n"]}
    specs = _specs(operands, results, [a.shape for a in arrays], axes, mesh.shape)
    operand_shardings, result_shardings = (tuple(NamedSharding(mesh, spec) for spec in side) for side in specs)
    replicated = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), whole)
    return mesh, function, result_shardings, (replicated, *operand_shardings)


@functools.partial(custom_partitioning, static_argnums=(0, 1, 2))
def _partitioned(function, operands, results, whole, *arrays):
    del operands, results
    return function(whole, *arrays)


_partitioned.def_partition(_partition, sharding_rule=_rule)


def _when_compiled(function, operands, results, whole, *arrays):
    """Sharded as the partitioner finds the arrays sharded, which needs no mesh when tracing."""

    @jax.custom_batching.custom_vmap
    def run(whole, *arrays):
        return _partitioned(function, operands, results, whole, *arrays)

    @run.def_vmap
    def vmapped(size, batched, whole, *arrays):  # custom_partitioning has no rule of its own: fold the axis into "b"
        each = zip(arrays, batched[1:], strict=True)
        full = [a if has_axis else jnp.broadcast_to(a, (size, *a.shape)) for a, has_axis in each]
        outs = run(whole, *(a.reshape(-1, *a.shape[2:]) for a in full))
        return tuple(a.reshape(size, -1, *a.shape[1:]) for a in outs), (True,) * len(results)

    return run(whole, *arrays)


def _specs_from_type(operands, results, arrays):
    """(operand specs, result specs) on the mesh of the first array's type, or None where its axes are not Explicit."""
    sharding = jax.typeof(arrays[0]).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    by_letter = dict(zip(operands[0], map(_names, sharding.spec), strict=True))
    axes = {"b": by_letter["b"], "n": by_letter["n"], "k": by_letter["n"]}
    return _specs(operands, results, [a.shape for a in arrays], axes, sharding.mesh.shape)


def sharded_alike(operands: tuple[str, ...], *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays with batch and heads sharded as the first has them, if their mesh has Explicit axes.

    Done before a function with a derivative of its own, whose gradients must have the types of its arguments.

    Args:
      operands: Dimensions of each array, as for `on_shards`.
      *arrays: The arrays.

    Returns:
      The arrays, their values unchanged.
    """
    if (specs := _specs_from_type(operands, (), arrays)) is None:
        return arrays
    mesh = jax.typeof(arrays[0]).sharding.mesh
    return tuple(jax.sharding.reshard(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays, specs[0], strict=True))


@functools.cache  # one warning for each set of names
def _warn_of_others(names: tuple[str, ...]) -> None:
    if names:
        warnings.warn(
            f"attention by 'splash' is not split over the mesh axes {', '.join(map(repr, names))}: the batch is split "
            f"over {', '.join(map(repr, BATCH_AXES))} and heads over {', '.join(map(repr, HEAD_AXES))}; name the axes "
            "so, make them Explicit, or call it within jax.shard_map",
            stacklevel=2,
        )


def on_shards(
    function: Callable[..., tuple[jax.Array, ...]],
    operands: tuple[str, ...],
    results: tuple[str, ...],
    whole: Any,
    *arrays: jax.Array,
) -> tuple[jax.Array, ...]:
    """function(whole, *arrays), each device on its shard of batch and heads; the results are sharded alike.

    - Inside a `shard_map` over all axes of a mesh it is a plain call.
    - On Explicit axes the type of the first array says how it is sharded; the others must be `sharded_alike`.
    - On the Auto axes of a mesh that is set (`jax.set_mesh`) the batch is over "data" and "fsdp" and heads are over
      "tensor", as far as such axes exist and divide them. Over axes of other names every device gets everything; a
      warning says so once.
    - Without a mesh, `custom_partitioning` asks XLA's partitioner, which knows how the arrays are sharded. CPUs do so;
      TPU compilers are reported not to (https://github.com/jax-ml/jax/issues/38196, open in 2026): set the mesh there.

    Args:
      function: Treats every sequence and every key-value head by itself; returns a tuple.
      operands: Dimensions of each array, one letter each; the first has "b" and "n", another has "k".
      results: Dimensions of each result.
      whole: A pytree of arrays that every device gets in full.
      *arrays: What is sharded.

    Returns:
      What `function` returns.
    """
    mesh = jax.sharding.get_abstract_mesh()
    free = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Manual}
    if not mesh.empty and not free:
        return function(whole, *arrays)
    if (specs := _specs_from_type(operands, results, arrays)) is not None:
        mesh = jax.typeof(arrays[0]).sharding.mesh
        free = free or set(mesh.axis_names)
    elif mesh.empty:
        return _when_compiled(function, operands, results, whole, *arrays)
    else:
        batch, heads = (tuple(name for name in names if name in free) for names in (BATCH_AXES, HEAD_AXES))
        _warn_of_others(tuple(sorted(n for n in free.difference(batch, heads) if mesh.shape[n] > 1)))
        axes = {"b": batch, "n": heads, "k": heads}
        specs = _specs(operands, results, [a.shape for a in arrays], axes, mesh.shape)
    # What the kernel returns carries no record of the axes over which it varies, so there is nothing to check.
    mapped = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(PartitionSpec(), *specs[0]),
        out_specs=tuple(specs[1]),
        axis_names=free,
        check_vma=False,
    )
    return mapped(whole, *arrays)
