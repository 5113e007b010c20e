"""Where the arrays of the optimizer are on a mesh, and how an axis is turned that is spread over devices."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from orthojax.optim.axes import leaf_path
from orthojax.optim.plan import Rotation, plan_leaf

Names = Sequence[tuple[str, ...]]  # the mesh axes that each dimension is split over
Undo = Callable[[jax.Array], jax.Array]


def dimension_names(sharding: NamedSharding, ndim: int) -> list[tuple[str, ...]]:
    """The mesh axes that each of the `ndim` dimensions is split over; () for none."""
    entries = (*sharding.spec, *[None] * ndim)[:ndim]
    return [entry if isinstance(entry, tuple) else () if entry is None else (entry,) for entry in entries]


def _canonical(mesh: Any, names: Names) -> NamedSharding:
    # jit takes P("x") and P("x", None) for two types and would compile again for its own output, which has the trailing
    # None over Explicit axes and has it not over Auto ones.
    spec = [over[0] if len(over) == 1 else over or None for over in names]
    while spec and spec[-1] is None and AxisType.Explicit not in mesh.axis_types:
        spec.pop()
    return NamedSharding(mesh, PartitionSpec(*spec))


def known_sharding(x: Any) -> NamedSharding | None:
    """How an array is split, as far as it can be told: of a traced one, over Explicit mesh axes only."""
    if isinstance(x, jax.core.Tracer):
        found = jax.typeof(x).sharding
        return found if AxisType.Explicit in found.mesh.axis_types else None
    return x.sharding if isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding) else None


def place(x: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    """Moves an array, at once or in the program that is being traced."""
    if not isinstance(x, jax.core.Tracer):
        return jax.device_put(x, sharding)
    if isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types:
        return jax.sharding.reshard(x, sharding)
    return jax.lax.with_sharding_constraint(x, sharding)


def split_sharding(path: str, x: Any, given: Any) -> NamedSharding | None:
    """How a parameter is split, by its layout or as far as it can be told; None where it is whole.

    Raises:
      ValueError: For a sharding that does not divide it evenly.
    """
    sharding = known_sharding(x) if given is None else given
    if not isinstance(sharding, NamedSharding) or not any(sharding.spec):
        return None
    widths = [math.prod(sharding.mesh.shape[name] for name in over) for over in dimension_names(sharding, x.ndim)]
    if any(length % width for length, width in zip(x.shape, widths, strict=True)):
        raise ValueError(f"{path}: {x.shape} does not divide over {sharding.spec}; allowed: multiples of {widths}")
    return sharding


def over_shards(local_fn: Callable[[Any, Any, Names], Any], x: Any, constants: Any, sharding: NamedSharding) -> Any:
    """`local_fn` on every device's shard of x.

    Args:
      local_fn: (shard, constants, mesh axes of each dimension) -> what is like the shard.
      x: An array, or a tuple of arrays of one shape, split as `sharding` says, or to be split so.
      constants: A tree of arrays that every device gets whole.
      sharding: Divides x evenly.

    Returns:
      What is like x, split in the same way.
    """
    first = jax.tree.leaves(x)[0]
    mesh, names = sharding.mesh, dimension_names(sharding, first.ndim)
    explicit = AxisType.Explicit in mesh.axis_types
    # A traced sharding tells about Explicit axes only: others stay the compiler's, and a vmap may have taken some.
    told = explicit and isinstance(first, jax.core.Tracer)
    manual = {name for over in names for name in over} if told else set(mesh.axis_names)
    whole = NamedSharding(mesh, PartitionSpec())
    constants = jax.tree.map(lambda c: c if known_sharding(c) is None else place(c, whole), constants)
    spec = PartitionSpec(*(over or None for over in names))
    mapped = jax.shard_map(
        lambda shard, whole: local_fn(shard, whole, names),
        mesh=mesh,
        in_specs=(spec, PartitionSpec()),
        out_specs=spec,
        axis_names=manual,
    )
    return mapped(x, constants)


def local_slice(constant: Any, stacked: Sequence[int], shape: Sequence[int], names: Names) -> Any:
    """What belongs to a shard of a whole constant whose first axes are the stacked axes of the parameter.

    Args:
      constant: [*lengths of the whole stacked axes, ...].
      stacked: Which axes of the parameter these are.
      shape: Of the shard.
      names: Mesh axes that each dimension of the parameter is split over.
    """
    for axis, dimension in enumerate(stacked):
        over, length = names[dimension], shape[dimension]
        if over:
            start = jax.lax.axis_index(over) * length
            constant = jax.lax.dynamic_slice_in_dim(constant, start, length, axis)
    return constant


def gather_axes(
    x: jax.Array, axes: Sequence[int], stacked: Sequence[int], names: Names
) -> tuple[jax.Array, list[tuple[str, ...]], Undo]:
    """Inside `over_shards`: makes `axes` whole on every device, by an all-to-all that splits another axis instead.

    Each device sends and receives one shard. The other axis is the longest that divides evenly, or else the longest,
    padded with zeros; a stacked axis can not be padded, since its slices have constants of their own. Where there is
    none (all axes in `axes`, or the others stacked and indivisible) an all-gather makes the axis whole.

    Args:
      x: The shard of one device.
      axes: What must be whole.
      stacked: Axes that must not be padded.
      names: Mesh axes that each dimension is split over; where none is, nothing is done, outside of shards too.

    Returns:
      The moved shard, the mesh axes of its dimensions, and the function that moves an array of that shape back.
    """
    names, undo = list(names), []
    for axis in axes:
        over, names[axis] = names[axis], ()
        width = jax.lax.axis_size(over) if over else 1
        if width == 1:
            continue
        free = [d for d in range(x.ndim) if d not in axes and (d not in stacked or x.shape[d] % width == 0)]
        if not free:
            undo.append(_slice_back(axis, over, x.shape[axis]))
            x = jax.lax.all_gather(x, over, axis=axis, tiled=True)
            continue
        other = max(free, key=lambda d: (x.shape[d] % width == 0, x.shape[d]))
        undo.append(_exchange_back(axis, other, over, x.shape[other]))
        if missing := -x.shape[other] % width:
            x = jnp.pad(x, [(0, missing if d == other else 0) for d in range(x.ndim)])
        x = jax.lax.all_to_all(x, over, split_axis=other, concat_axis=axis, tiled=True)
        names[other] += over

    def back(y: jax.Array) -> jax.Array:
        for step in reversed(undo):
            y = step(y)
        return y

    return x, names, back


def _slice_back(axis: int, over: tuple[str, ...], length: int) -> Undo:
    return lambda y: jax.lax.dynamic_slice_in_dim(y, jax.lax.axis_index(over) * length, length, axis)


def _exchange_back(axis: int, other: int, over: tuple[str, ...], length: int) -> Undo:
    def back(y: jax.Array) -> jax.Array:
        y = jax.lax.all_to_all(y, over, split_axis=axis, concat_axis=other, tiled=True)
        return jax.lax.slice_in_dim(y, 0, length, axis=other)

    return back


def layout_of(shardings: Any) -> Callable[[str], jax.sharding.Sharding | None]:
    """A `Rotation.layout` from a tree of shardings.

    Args:
      shardings: A tree like the parameters whose leaves are shardings: those of the parameters, or of `zero1`.

    Returns:
      A function from a path, as `describe` prints it, to the sharding; ValueError for a path that the tree has not.
    """
    by_path = {leaf_path(keys): sharding for keys, sharding in jax.tree_util.tree_leaves_with_path(shardings)}

    def layout(path: str) -> jax.sharding.Sharding | None:
        if path not in by_path:
            raise ValueError(f"{path!r} has no sharding in the layout; allowed: {', '.join(sorted(by_path)[:5])}, ...")
        return by_path[path]

    return layout


def _require_named(sharding: Any, path: str) -> None:
    if not isinstance(sharding, NamedSharding):
        raise ValueError(f"{path}: its sharding is {sharding!r}; allowed: a jax.sharding.NamedSharding")


def zero1(rotation: Rotation, params: optax.Params, shardings: Any, axis: str = "data") -> Any:
    """Shardings of the moments that split them over the data axis of the mesh too (ZeRO stage 1).

    Every replica then keeps and updates one part of the moments. The gradient is sliced to that part (compilers that
    know reduce-scatter merge this with its sum), the update is gathered: one all-gather of the update per step.

    Of each parameter one dimension is split further, of those that the axis divides: one that is not rotated before
    one that is, one that is whole before one that is split already, then the longest. A parameter that no dimension of
    which can be divided, or that is split over `axis` already, keeps its sharding.

    Args:
      rotation: Tells which dimensions are rotated.
      params: Arrays, or the jax.ShapeDtypeStruct of `jax.eval_shape`.
      shardings: A tree like `params` of NamedSharding.
      axis: Name of the mesh axis.

    Returns:
      A tree like `shardings`, for `layout_of` and `state_shardings`.

    Raises:
      ValueError: For a mesh without this axis.

    References:
      ZeRO: Memory Optimizations Toward Training Trillion Parameter Models,
      `arXiv 1910.02054 <https://arxiv.org/abs/1910.02054>`_, 2019
    """

    def split(keys: tuple[Any, ...], leaf: Any, sharding: NamedSharding) -> NamedSharding:
        _require_named(sharding, leaf_path(keys))
        mesh, names = sharding.mesh, dimension_names(sharding, len(leaf.shape))
        if axis not in mesh.shape:
            raise ValueError(f"zero1 axis={axis!r}; allowed: an axis of the mesh, {', '.join(mesh.axis_names)}")
        rotated = {d for turn in plan_leaf(rotation, keys, leaf).turns for d in turn.axes}
        widths = [math.prod(mesh.shape[name] for name in (*over, axis)) for over in names]
        free = [d for d, length in enumerate(leaf.shape) if length and length % widths[d] == 0]
        if not free or any(axis in over for over in names):
            return sharding
        chosen = max(free, key=lambda d: (d not in rotated, not names[d], leaf.shape[d]))
        names[chosen] += (axis,)
        return _canonical(mesh, names)

    return jax.tree_util.tree_map_with_path(split, params, shardings)


def state_shardings(optimizer: optax.GradientTransformation, params: optax.Params, shardings: Any) -> Any:
    """Shardings of an optimizer's state: what is like a parameter is split like it, the rest is on every device.

    The bases of `haar` and the step count are of the rest, as are factored moments, whose shape is not the parameter's.

    Args:
      optimizer: Any optax transformation.
      params: Arrays, or the jax.ShapeDtypeStruct of `jax.eval_shape`.
      shardings: A tree like `params` of NamedSharding: the parameters' own, or that of `zero1`.

    Returns:
      A tree like the state, for the `out_shardings` of a jitted init and step, or for `jax.device_put`.

    Examples:
      >>> from orthojax.optim import orthoadam
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
      >>> params = {"kernel": jnp.ones((4, 8))}
      >>> own = {"kernel": NamedSharding(mesh, PartitionSpec())}
      >>> rotation = Rotation("haar")
      >>> moments = zero1(rotation, params, own)
      >>> optimizer = orthoadam(1e-3, rotation=Rotation("haar", layout=layout_of(moments)))
      >>> found = state_shardings(optimizer, params, moments)
      >>> print(found[0].inner.mu["kernel"].spec, found[0].basis["kernel"]["basis_0"].spec)
      P('data',) P()
      >>> state = jax.jit(optimizer.init, out_shardings=found)(params)
    """
    for keys, sharding in jax.tree_util.tree_leaves_with_path(shardings):
        _require_named(sharding, leaf_path(keys))
    meshes = {sharding.mesh for sharding in jax.tree.leaves(shardings)}
    if len(meshes) != 1:
        raise ValueError(f"state_shardings got {len(meshes)} meshes; allowed: one for all parameters")
    mesh = meshes.pop()

    def everywhere(x: Any) -> NamedSharding:
        return _canonical(mesh, [()] * len(x.shape))

    def of_moment(moment: Any, param: Any, sharding: NamedSharding) -> Any:
        if isinstance(moment, optax.MaskedNode):
            return moment
        if moment.shape != jnp.shape(param):
            return everywhere(moment)
        return _canonical(mesh, dimension_names(sharding, len(moment.shape)))

    return optax.tree.map_params(
        optimizer,
        of_moment,
        jax.eval_shape(optimizer.init, params),
        params,
        shardings,
        transform_non_params=lambda subtree: jax.tree.map(everywhere, subtree),
        is_leaf=lambda x: isinstance(x, optax.MaskedNode),
    )
