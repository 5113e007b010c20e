"""Shardings of the optimizer's arrays on a mesh, and the exchange that rotates a sharded axis."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from orthojax.ops.packing import Packed
from orthojax.optim.rotation import Rotation, leaf_path, leaf_paths, noting_bases, plan_tree

Names = Sequence[tuple[str, ...]]  # the mesh axes that each dimension is sharded over


def _dimension_names(sharding: NamedSharding, ndim: int) -> list[tuple[str, ...]]:
    """Returns the mesh axes that each of the `ndim` dimensions is sharded over; () for none."""
    entries = (*sharding.spec, *[None] * ndim)[:ndim]
    return [entry if isinstance(entry, tuple) else () if entry is None else (entry,) for entry in entries]


def _canonical(mesh: Any, names: Names) -> NamedSharding:
    # jit takes P("x") and P("x", None) for two types and would compile again for its own output, which has the trailing
    # None over Explicit axes and not over Auto ones.
    spec = [over[0] if len(over) == 1 else over or None for over in names]
    while spec and spec[-1] is None and AxisType.Explicit not in mesh.axis_types:
        spec.pop()
    return NamedSharding(mesh, PartitionSpec(*spec))


def known_sharding(x: Any) -> NamedSharding | None:
    """Returns the sharding of an array, if it is known; for a traced one, only over Explicit mesh axes."""
    if isinstance(x, jax.core.Tracer):
        found = jax.typeof(x).sharding
        return found if AxisType.Explicit in found.mesh.axis_types else None
    return x.sharding if isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding) else None


def place(x: jax.Array, sharding: jax.sharding.Sharding | None) -> jax.Array:
    """Moves an array, at once or in the program that is being traced; None does not move it."""
    if sharding is None:
        return x
    if not isinstance(x, jax.core.Tracer):
        return jax.device_put(x, sharding)
    if isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types:
        return jax.sharding.reshard(x, sharding)
    return jax.lax.with_sharding_constraint(x, sharding)


def split_sharding(path: str, x: Any, given: Any) -> NamedSharding | None:
    """Returns the sharding of a parameter, by its layout or as far as known; None if whole, ValueError if uneven."""
    sharding = known_sharding(x) if given is None else given
    if not isinstance(sharding, NamedSharding) or not any(sharding.spec):
        return None
    widths = [math.prod(sharding.mesh.shape[name] for name in over) for over in _dimension_names(sharding, x.ndim)]
    if any(length % width for length, width in zip(x.shape, widths, strict=True)):
        raise ValueError(f"{path}: {x.shape} does not divide over {sharding.spec}; allowed: multiples of {widths}")
    return sharding


def axes_width(sharding: NamedSharding, axes: Sequence[int]) -> int:
    """Returns over how many devices some axes of an array are sharded, all together."""
    names = _dimension_names(sharding, max(axes) + 1)
    return math.prod(sharding.mesh.shape[name] for axis in axes for name in names[axis])


def over_shards(
    local_fn: Callable[[Any, Any, Names], Any],
    x: Any,
    constants: Any,
    sharding: NamedSharding,
    of_stack: Sequence[int] = (),
) -> Any:
    """Calls `local_fn(shard, constants, mesh axes of each dimension)` on every device's shard; the result is like x.

    `x` is an array or a tuple of arrays of one shape, which `sharding` divides evenly. Every device gets all of the
    tree `constants`, or if their first dimensions are the dimensions `of_stack` of x, the part for its own ones.
    """
    first = jax.tree.leaves(x)[0]
    mesh, names = sharding.mesh, _dimension_names(sharding, first.ndim)
    explicit = AxisType.Explicit in mesh.axis_types
    # A traced sharding shows Explicit axes only: others stay the compiler's, and a vmap may have taken some.
    traced = explicit and isinstance(first, jax.core.Tracer)
    manual = {name for over in names for name in over} if traced else set(mesh.axis_names)
    spec, held = (PartitionSpec(*(over or None for over in of)) for of in (names, [names[d] for d in of_stack]))
    there = NamedSharding(mesh, held)
    constants = jax.tree.map(lambda c: c if known_sharding(c) is None else place(c, there), constants)
    mapped = jax.shard_map(
        lambda shard, constants: local_fn(shard, constants, names),
        mesh=mesh,
        in_specs=(spec, held),
        out_specs=spec,
        axis_names=manual,
    )
    return mapped(x, constants)


def local_slice(constant: Any, stacked: Sequence[int], shape: Sequence[int], names: Names) -> Any:
    """Returns the part of a constant [*lengths of the stacked axes, ...] for a shard of `shape`.

    `names` are the mesh axes over which each dimension of the shard is split and the constant is not.
    """
    for axis, dimension in enumerate(stacked):
        over, length = names[dimension], shape[dimension]
        if over:
            start = jax.lax.axis_index(over) * length
            constant = jax.lax.dynamic_slice_in_dim(constant, start, length, axis)
    return constant


def gather_axes(
    x: jax.Array, axes: Sequence[int], stacked: Sequence[int], names: Names
) -> tuple[jax.Array, list[tuple[str, ...]], Callable[[jax.Array], jax.Array]]:
    """Makes `axes` whole on every device inside `over_shards`, by an all-to-all that shards another axis instead.

    Each device sends and receives one shard. The other axis is the longest that divides evenly, or else the longest,
    padded with zeros; a stacked axis cannot be padded, since its slices have their own constants. If there is no such
    axis, an all-gather makes the axis whole.

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
        other = max(free, key=lambda d: (x.shape[d] % width == 0, x.shape[d]), default=None)
        undo.append(functools.partial(_undo_gather, axis=axis, other=other, over=over, shape=x.shape))
        if other is None:
            x = jax.lax.all_gather(x, over, axis=axis, tiled=True)
            continue
        if missing := -x.shape[other] % width:
            x = jnp.pad(x, [(0, missing if d == other else 0) for d in range(x.ndim)])
        x = jax.lax.all_to_all(x, over, split_axis=other, concat_axis=axis, tiled=True)
        names[other] += over
    return x, names, lambda y: functools.reduce(lambda y, step: step(y), reversed(undo), y)


def _undo_gather(y: jax.Array, axis: int, other: int | None, over: tuple[str, ...], shape: Sequence[int]) -> jax.Array:
    if other is None:
        return jax.lax.dynamic_slice_in_dim(y, jax.lax.axis_index(over) * shape[axis], shape[axis], axis)
    y = jax.lax.all_to_all(y, over, split_axis=axis, concat_axis=other, tiled=True)
    return jax.lax.slice_in_dim(y, 0, shape[other], axis=other)


def layout_of(shardings: Any) -> Callable[[str], jax.sharding.Sharding | None]:
    """Makes a `Rotation.layout` from a tree of shardings.

    The tree is like the parameters and holds their shardings, or those of `zero1`. The layout is a function from a
    path, as `describe` prints it, to the sharding; ValueError for a path that is not in the tree.
    """
    by_path = dict(zip(leaf_paths(shardings), jax.tree.leaves(shardings), strict=True))

    def layout(path: str) -> jax.sharding.Sharding | None:
        if path not in by_path:
            known = f"{', '.join(sorted(by_path)[:5])}, ..." if by_path else "none, since no leaf is a sharding"
            raise ValueError(f"{path!r} has no sharding in the layout; allowed: {known}")
        return by_path[path]

    return layout


def _require_named(keys: tuple[Any, ...], sharding: Any) -> NamedSharding:
    if not isinstance(sharding, NamedSharding):
        raise ValueError(f"{leaf_path(keys)}: its sharding is {sharding!r}; allowed: a jax.sharding.NamedSharding")
    return sharding


def zero1(rotation: Rotation, params: optax.Params, shardings: Any, axis: str = "data") -> Any:
    """Also shards the moments over the data axis of the mesh: ZeRO stage 1 (Rajbhandari et al., arXiv 1910.02054).

    Every replica then keeps and updates one part of the moments: it slices the gradient to that part, and the updates
    are all-gathered once per step. One of the dimensions that `axis` divides is sharded further: preferably one that is
    not rotated, then one that is whole, then the longest. A parameter without such a dimension, or already sharded over
    `axis`, stays as it is.

    Args:
      rotation: Decides which dimensions are rotated.
      params: Arrays, or the jax.ShapeDtypeStruct of `jax.eval_shape`.
      shardings: A tree like `params` of NamedSharding.
      axis: Name of the mesh axis.

    Returns:
      A tree like `shardings`, for `layout_of` and `state_shardings`; ValueError for a mesh without this axis.
    """
    plans = iter(plan_tree(rotation, params).parameters)

    def split(keys: tuple[Any, ...], leaf: Any, sharding: NamedSharding) -> NamedSharding:
        mesh, names = _require_named(keys, sharding).mesh, _dimension_names(sharding, len(leaf.shape))
        if axis not in mesh.shape:
            raise ValueError(f"zero1 axis={axis!r}; allowed: an axis of the mesh, {', '.join(mesh.axis_names)}")
        rotated = {d for group in next(plans).groups for d in group.axes}
        widths = [math.prod(mesh.shape[name] for name in (*over, axis)) for over in names]
        free = [d for d, length in enumerate(leaf.shape) if length and length % widths[d] == 0]
        if not free or any(axis in over for over in names):
            return sharding
        chosen = max(free, key=lambda d: (d not in rotated, not names[d], leaf.shape[d]))
        names[chosen] += (axis,)
        return _canonical(mesh, names)

    return jax.tree_util.tree_map_with_path(split, params, shardings)


def by_layers(rotation: Rotation, params: optax.Params, shardings: Any) -> Any:
    """Shards the moments of stacked parameters over their layers only, and with them the bases of `haar`.

    A device then holds the bases of its own layers instead of all, for one exchange of the gradient's shards and one of
    the update's. Arguments and result are as for `zero1`; a parameter whose layers do not divide stays as it is.
    """
    plans = iter(plan_tree(rotation, params).parameters)

    def move(keys: tuple[Any, ...], leaf: Any, sharding: NamedSharding) -> NamedSharding:
        mesh, plan = _require_named(keys, sharding).mesh, next(plans)
        over = sum(_dimension_names(sharding, len(leaf.shape)), ())
        width = math.prod(mesh.shape[name] for name in over)
        if not (plan.groups and plan.stacked and leaf.shape[plan.stacked[0]] % width == 0):
            return sharding
        return _canonical(mesh, [over if d == plan.stacked[0] else () for d in range(len(leaf.shape))])

    return jax.tree_util.tree_map_with_path(move, params, shardings)


def state_shardings(optimizer: optax.GradientTransformation, params: optax.Params, shardings: Any) -> Any:
    """Returns shardings of an optimizer's state: moments are sharded like their parameter, the rest is replicated.

    The rest includes the step count, and factored moments, whose shape is not the parameter's. The bases of `haar` are
    sharded as the layers of the moments, see `by_layers`.

    `params` and `shardings` are as for `zero1`, whose result may be the shardings. The result is a tree like the state,
    for the `out_shardings` of a jitted init and step, or for `jax.device_put`.

    Examples:
      >>> import dataclasses
      >>> from orthojax.optim import orthoadam
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
      >>> params = {"kernel": jnp.ones((4, 8))}
      >>> own = {"kernel": NamedSharding(mesh, PartitionSpec())}
      >>> rotation = Rotation("haar", axes=8, embeddings="")
      >>> moments = zero1(rotation, params, own)
      >>> optimizer = orthoadam(1e-3, rotation=dataclasses.replace(rotation, layout=layout_of(moments)))
      >>> found = state_shardings(optimizer, params, moments)
      >>> print(found[0].inner.mu["kernel"].spec, found[0].basis["kernel"]["basis_0"].spec)
      P('data',) P()
      >>> state = jax.jit(optimizer.init, out_shardings=found)(params)
    """
    meshes = {_require_named(*pair).mesh for pair in jax.tree_util.tree_leaves_with_path(shardings)}
    if len(meshes) != 1:
        raise ValueError(f"state_shardings got {len(meshes)} meshes; allowed: one for all parameters")
    (mesh,) = meshes

    def everywhere(x: Any) -> NamedSharding:
        return _canonical(mesh, [()] * len(x.shape))

    def of_moment(moment: Any, param: Any, sharding: NamedSharding) -> Any:
        if isinstance(moment, optax.MaskedNode):
            return moment
        if isinstance(moment, Packed):
            *names, last = _dimension_names(sharding, moment.scales.ndim)
            width = math.prod(mesh.shape[name] for name in last)
            last = last if moment.scales.shape[-1] % width == 0 else ()  # a block is on one device
            return jax.tree.map(lambda part: _canonical(mesh, [*names, last, ()][: part.ndim]), moment)
        like = moment.shape == jnp.shape(param)
        return _canonical(mesh, _dimension_names(sharding, len(moment.shape))) if like else everywhere(moment)

    with noting_bases() as bases:
        state = jax.eval_shape(optimizer.init, params)
    of_path = dict(zip(leaf_paths(params), jax.tree.leaves(shardings), strict=True))

    def of_other(keys: tuple[Any, ...], x: Any) -> NamedSharding:
        plan = bases.get(leaf_path(keys))
        if plan is None or plan.path not in of_path:
            return everywhere(x)
        names = _dimension_names(of_path[plan.path], len(plan.shape))
        return _canonical(mesh, [*(names[d] for d in plan.stacked), (), ()])

    return optax.tree.map_params(
        optimizer,
        of_moment,
        state,
        params,
        shardings,
        transform_non_params=lambda subtree: jax.tree_util.tree_map_with_path(of_other, subtree),
        is_leaf=lambda x: isinstance(x, optax.MaskedNode | Packed),
    )
