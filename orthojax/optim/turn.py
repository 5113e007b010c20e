"""Turning one parameter into its basis and back: whole, split over a mesh, or one layer of it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orthojax.ops import orthogonal
from orthojax.optim import layout
from orthojax.optim.basis import turn_constants
from orthojax.optim.plan import Kind, LeafPlan, Rotation, Turn


def _along(values: Any, axes: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    """Reshapes a constant [*lengths of axes] such that it broadcasts along `axes` of an array of `shape`."""
    values = values.transpose(np.argsort(axes))
    return values.reshape([length if axis in axes else 1 for axis, length in enumerate(shape)])


def _turn_axis(
    x: jax.Array, axis: int, stacked: tuple[int, ...], kind: Kind, constants: tuple[Any, ...], transpose: bool
) -> jax.Array:
    """Q, or Q^T, along one axis of x, with its own Q for every slice along `stacked`."""
    if kind == "haar":
        return orthogonal.apply_matrix(x, constants[0], axis, batch_axes=stacked, transpose=transpose)
    signs, *order = (jnp.asarray(_along(constant, (*stacked, axis), x.shape)) for constant in constants)
    signs = signs.astype(x.dtype)
    if kind == "signed_permutation":
        if transpose:
            return signs * jnp.take_along_axis(x, order[0], axis)
        return jnp.take_along_axis(signs * x, order[0], axis)
    fixed = "dct" if kind == "dct" else "hadamard"
    if transpose:
        return signs * orthogonal.fixed_transform(x, axis, kind=fixed, transpose=True)
    return orthogonal.fixed_transform(signs * x, axis, kind=fixed)


def _turn_group(
    x: jax.Array, plan: LeafPlan, turn: Turn, kind: Kind, constants: tuple[Any, ...], transpose: bool
) -> jax.Array:
    """As `_turn_axis` for a group of axes, which are flattened meanwhile."""
    width, rest = len(turn.axes), [axis for axis in range(x.ndim) if axis not in turn.axes]
    adjacent = turn.axes == tuple(range(turn.axes[0], turn.axes[0] + width))
    first = turn.axes[0] if adjacent else len(rest)
    there = tuple(range(first, first + width))
    y = x if adjacent else jnp.moveaxis(x, turn.axes, there)
    flat = y.reshape(*y.shape[:first], turn.size, *y.shape[first + width :])
    stacked = tuple(rest.index(axis) + (rest.index(axis) >= first) for axis in plan.stacked)
    flat = _turn_axis(flat, first, stacked, kind, constants, transpose)
    y = flat.reshape(y.shape)
    return y if adjacent else jnp.moveaxis(y, there, turn.axes)


def turn_shard(
    x: jax.Array, plan: LeafPlan, kind: Kind, constants: Any, names: layout.Names, transpose: bool = False
) -> jax.Array:
    """Q, or Q^T, on the shard that one device has of a parameter, or on the whole of it.

    Args:
      x: The shard; outside of `layout.over_shards` the whole parameter.
      plan: Of the whole parameter.
      kind: Of the rotation.
      constants: Of the whole parameter, from `turn_constants`.
      names: Mesh axes that each dimension is split over.
      transpose: Turn back.

    Returns:
      An array like x. Computed in at least float32.
    """
    y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    for turn, whole in zip(plan.turns, constants, strict=True):
        moved, over, back = layout.gather_axes(y, turn.axes, plan.stacked, names)
        mine = tuple(layout.local_slice(c, plan.stacked, moved.shape, over) for c in whole)
        y = back(_turn_group(moved, plan, turn, kind, mine, transpose))
    return y.astype(x.dtype)


# Jitted, so that outside of jit too the shards are turned by one program, compiled once for each shape.
@functools.partial(jax.jit, static_argnames=("plan", "kind", "sharding", "transpose"), inline=True)
def _turn_sharded(
    x: jax.Array, constants: Any, plan: LeafPlan, kind: Kind, sharding: jax.sharding.NamedSharding, transpose: bool
) -> jax.Array:
    def local_fn(shard: jax.Array, constants: Any, names: layout.Names) -> jax.Array:
        return turn_shard(shard, plan, kind, constants, names, transpose)

    return layout.over_shards(local_fn, x, constants, sharding)


def turn_whole(
    rotation: Rotation, plan: LeafPlan, leaf: Any, basis: Any, *, transpose: bool = False, like: Any = None
) -> Any:
    """Q, or Q^T, on one parameter; the arguments are those of `orthojax.optim.rotation.apply_rotation`."""
    given = None if rotation.layout is None else rotation.layout(plan.path)
    if not plan.turns and given is None:
        return leaf
    x = jnp.asarray(leaf)
    sharding = layout.split_sharding(plan.path, x, given)
    x = x if given is None else layout.place(x, given)
    if plan.turns:
        constants = turn_constants(rotation, plan, basis, transpose)
        if sharding is None:
            x = turn_shard(x, plan, rotation.kind, constants, [()] * x.ndim, transpose)
        else:
            x = _turn_sharded(x, constants, plan, rotation.kind, sharding, transpose)
    after = None if given is None else layout.known_sharding(like)
    return x if after is None else layout.place(x, after)
