"""cuDNN's kernels under vmap and over a mesh.

JAX's own rules for these primitives cut the query and the value, and leave every other operand as it comes: a bias or
lengths that are not cut the same way would then be read at the wrong place. Here the query's batch and head axes decide
for all operands. What stays whole: sequences, head widths, and a key head together with its group of query heads.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from orthojax.ops.attention.cudnn_kernel import Operands, Settings, Statistics, bind, private_module
from orthojax.ops.attention.platforms import compiled_for


def forward(settings: Settings, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Softmax attention.

    Returns:
      The output [B, T, N, H] in the dtype of the query, and lse [B, N, T] in float32.
    """
    output, lse = _vmappable(settings, operands, None)
    return output, lse


def backward(settings: Settings, operands: Operands, statistics: Statistics) -> tuple[jax.Array, ...]:
    """Gradients of query, key and value, and of the bias where `settings.bias_gradient`."""
    return _vmappable(settings, operands, statistics)


# vmap: a further batch axis is folded into the kernel's own.


def _vmappable(settings: Settings, operands: Operands, statistics: Statistics | None) -> tuple[jax.Array, ...]:
    @custom_vmap
    def kernel(operands, statistics):
        operands = operands._replace(query=compiled_for(operands.query, "cudnn", "cuda"))
        return _over_mesh(settings, operands, statistics)

    @kernel.def_vmap
    def rule(size, batched, operands, statistics):
        B = operands.query.shape[int(batched[0].query)]
        bias, bias_is_batched = operands.bias, batched[0].bias
        summed = bias is not None and bias.shape[int(bias_is_batched)] != B  # one bias for all B sequences
        # It stays one, unless it or its gradient differs between the mapped calls.
        keep = bias is not None and bias.shape[0] == 1 and not bias_is_batched and not settings.bias_gradient

        def fold(array, is_batched):
            array = array if is_batched else array[None]
            return jnp.broadcast_to(array, (size, B, *array.shape[2:])).reshape(size * B, *array.shape[2:])

        folded = jax.tree.map(
            fold,
            (operands._replace(bias=None), statistics),
            (batched[0]._replace(bias=None), batched[1]),
        )
        folded_bias = bias if bias is None or keep else fold(bias, bias_is_batched)
        results = _vmappable(settings, folded[0]._replace(bias=folded_bias), folded[1])
        results = [array.reshape(size, B, *array.shape[1:]) for array in results]
        if settings.bias_gradient and summed:
            results[3] = jnp.sum(results[3], 1, keepdims=True)
        return tuple(results), (True,) * len(results)

    return kernel(operands, statistics)


# A mesh.


class Axes(NamedTuple):
    """The mesh axes over which batch and heads are cut: a name, a tuple of names, or None."""

    batch: Any
    heads: Any


def _length(names: Any, sizes: Any) -> int:
    return math.prod(sizes[name] for name in _as_tuple(names))


def _as_tuple(names: Any) -> tuple[str, ...]:
    return () if names is None else names if isinstance(names, tuple) else (names,)


def axes(spec: Sequence[Any], sizes: Any, batch: int, heads: int, key_heads: int) -> Axes:
    """The part of the query's PartitionSpec that the kernel can be cut by.

    Axes must divide the batch, and the key heads; a single key head serves query heads on any number of devices.
    """
    batch_names, _, head_names, *_ = (*spec, None, None, None)
    return Axes(
        None if batch % _length(batch_names, sizes) else batch_names,
        None if (heads if key_heads == 1 else key_heads) % _length(head_names, sizes) else head_names,
    )


class _Specs(NamedTuple):
    arguments: tuple[Operands, Statistics | None]  # of PartitionSpecs
    results: tuple[P, ...]
    sums: tuple[tuple[str, ...], ...]  # of each result: mesh axes whose devices each have a part of the sum


def _specs(sharding: Any, settings: Settings, operands: Operands, statistics: Statistics | None) -> _Specs:
    B, _, N, _ = operands.query.shape
    K = operands.key.shape[2]
    cut = axes(sharding.spec, sharding.mesh.shape, B, N, K)
    rows, lse = P(cut.batch, None, cut.heads, None), P(cut.batch, cut.heads, None)
    keys = P(cut.batch, None, None if K == 1 else cut.heads, None)
    key_sum = _as_tuple(cut.heads) if K == 1 else ()
    bias, lengths, bias_sum = None, None, ()
    if operands.bias is not None:
        batch = cut.batch if operands.bias.shape[0] == B else None
        heads = cut.heads if operands.bias.shape[1] == N else None
        bias = P(batch, heads, None, None)
        bias_sum = (*(() if batch else _as_tuple(cut.batch)), *(() if heads else _as_tuple(cut.heads)))
    if operands.query_lengths is not None:
        lengths = P(cut.batch)
    inputs: Any = Operands(rows, keys, keys, bias, lengths, lengths)  # pyright: ignore[reportArgumentType]
    if statistics is None:
        return _Specs((inputs, None), (rows, lse), ((), ()))
    outputs: Any = Statistics(lse, rows, rows)  # pyright: ignore[reportArgumentType]
    results, sums = (rows, keys, keys), ((), key_sum, key_sum)
    if settings.bias_gradient and bias is not None:
        results, sums = (*results, bias), (*sums, bias_sum)
    return _Specs((inputs, outputs), results, sums)


def _on_one_device(
    settings: Settings,
    operands: Operands,
    statistics: Statistics | None,
    sums: tuple[tuple[str, ...], ...] = ((), (), (), ()),
) -> tuple[jax.Array, ...]:
    results = bind(private_module(), settings, operands, statistics)
    pairs = zip(results, sums, strict=False)
    return tuple(jax.lax.psum(result, names) if names else result for result, names in pairs)


def is_explicit(sharding: Any) -> bool:
    """Whether a sharding is one of those that are part of an array's type."""
    return AxisType.Explicit in (sharding.mesh.axis_types or ())


def sharded_as(gradient: jax.Array | None, primal: jax.Array | None) -> jax.Array | None:
    """A gradient with the sharding of its input, which is a matter of types where mesh axes are explicit."""
    if gradient is None or primal is None or not is_explicit(jax.typeof(primal).sharding):
        return gradient
    return jax.sharding.reshard(gradient, jax.typeof(primal).sharding)


def varying_alike(arrays: Any) -> Any:
    """Inside `shard_map`: arrays that are all typed as differing between the same devices, as a derivative rule wants.

    The transpose of the cast sums the gradient of what the devices share.
    """

    def axes_of(array: jax.Array) -> frozenset[str]:
        return jax.typeof(array).mat.varying

    every = frozenset[str]().union(*map(axes_of, jax.tree.leaves(arrays)))

    def cast(array: jax.Array) -> jax.Array:
        missing = every - axes_of(array)
        return jax.lax.pcast(array, tuple(missing), to="varying") if missing else array

    return jax.tree.map(cast, arrays)


def _over_mesh(settings: Settings, operands: Operands, statistics: Statistics | None) -> tuple[jax.Array, ...]:
    sharding = jax.typeof(operands.query).sharding
    mesh = sharding.mesh
    if not is_explicit(sharding):
        return _partitioned(settings, operands, statistics)
    # Explicit axes are part of the arrays' types, so the cut is known while tracing.
    specs = _specs(sharding, settings, operands, statistics)

    def local(operands, statistics):
        return _on_one_device(settings, operands, statistics, specs.sums)

    arguments = jax.tree.map(
        lambda array, spec: jax.sharding.reshard(array, NamedSharding(mesh, spec)),
        (operands, statistics),
        specs.arguments,
    )
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs.arguments, out_specs=specs.results, check_vma=False)
    return mapped(*arguments)


# Automatic axes: the compiler calls back with the cut that it arrived at.


def _sharding_rule(settings, mesh, value_types, result_types) -> str:
    """How cuts spread between the arrays, in the einsum-like notation of Shardy."""
    del mesh
    shapes = [list(value_type.shape) for value_type in value_types]
    (B, _, N, _), (_, _, K, _) = shapes[0], shapes[1]
    # Heads of queries and of groups of them stay unrelated here: half a mesh axis has no name for `_partition` to read.
    rows, keys, lse = "b t n h", "b s n h" if N == K else "b s k h", "b n t"
    arguments = [rows, keys, keys]
    backward = len(result_types) > 2
    rest = shapes[3 : len(shapes) - 3 if backward else None]
    bias = ""
    if rest and len(rest[0]) == 4:
        bias = f"{'b' if rest[0][0] == B else 'x'} {'n' if rest[0][1] == N else 'y'} t s"
        arguments.append(bias)
    arguments += ["b"] * sum(len(shape) == 1 for shape in rest)
    if backward:
        arguments += [lse, rows, rows]
        results = [rows, keys, keys] + [bias] * settings.bias_gradient
    else:
        results = [rows, lse]
    return f"{', '.join(arguments)} -> {', '.join(results)}"


def _partition(settings, mesh, arguments, results):
    del results
    operands, statistics = arguments
    specs = _specs(operands.query.sharding, settings, operands, statistics)

    def local(operands, statistics):
        return _on_one_device(settings, operands, statistics, specs.sums)

    arguments, results = (
        jax.tree.map(lambda spec: NamedSharding(mesh, spec), tree) for tree in (specs.arguments, specs.results)
    )
    return mesh, local, results, arguments


def _whole(settings, operands, statistics):
    return _on_one_device(settings, operands, statistics)


_partitioned = custom_partitioning(_whole, static_argnums=(0,))
_partitioned.def_partition(partition=_partition, sharding_rule=_sharding_rule)
