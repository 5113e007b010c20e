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


# Jitted, so that outside of jit too the shards are turned by one program, compiled once for each shape.
@functools.partial(jax.jit, static_argnames=("plan", "kind", "sharding", "transpose"), inline=True)
def _turn_sharded(
    x: jax.Array, constants: Any, plan: LeafPlan, kind: Kind, sharding: jax.sharding.NamedSharding, transpose: bool
) -> jax.Array:
    """Every turn of a parameter that is split as `sharding` says; the result is split in the same way."""

    def local_fn(shard, constants, names):
        for turn, whole in zip(plan.turns, constants, strict=True):
            moved, over, back = layout.gather_axes(shard, turn.axes, plan.stacked, names)
            lengths = [moved.shape[axis] for axis in plan.stacked]
            mine = tuple(layout.local_slice(c, [over[axis] for axis in plan.stacked], lengths) for c in whole)
            shard = back(_turn_group(moved, plan, turn, kind, mine, transpose))
        return shard

    return layout.over_shards(local_fn, x, constants, sharding)


def _turn_leaf(
    rotation: Rotation, plan: LeafPlan, x: jax.Array, sharding: Any, basis: Any, transpose: bool
) -> jax.Array:
    constants = turn_constants(rotation, plan, basis, transpose)
    y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if isinstance(sharding, jax.sharding.NamedSharding) and any(sharding.spec):
        y = _turn_sharded(y, constants, plan, rotation.kind, sharding, transpose)
    else:
        for turn, mine in zip(plan.turns, constants, strict=True):
            y = _turn_group(y, plan, turn, rotation.kind, mine, transpose)
    return y.astype(x.dtype)


def turn_whole(
    rotation: Rotation, plan: LeafPlan, leaf: Any, basis: Any, *, transpose: bool = False, like: Any = None
) -> Any:
    """Q, or Q^T, on one parameter; the arguments are those of `orthojax.optim.rotation.apply_rotation`."""
    given = None if rotation.layout is None else rotation.layout(plan.path)
    if not plan.turns and given is None:
        return leaf
    x = jnp.asarray(leaf)
    x = x if given is None else layout.place(x, given)
    if plan.turns:
        x = _turn_leaf(rotation, plan, x, given or layout.known_sharding(x), basis, transpose)
    after = None if given is None else layout.known_sharding(like)
    return x if after is None else layout.place(x, after)


def turn_one_layer(
    rotation: Rotation, plan: LeafPlan, x: jax.Array, basis: Any, layer: Any, *, transpose: bool = False
) -> jax.Array:
    """Q, or Q^T, on one layer x of a parameter whose first axes are stacked; `layer`, row-major, may be traced."""
    k = len(plan.stacked)
    alone = plan._replace(stacked=(), stacked_shape=())
    y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    for turn, constants in zip(plan.turns, turn_constants(rotation, plan, basis, transpose), strict=True):
        mine = tuple(jnp.asarray(c).reshape(-1, *c.shape[k:])[layer] for c in constants)
        moved = turn._replace(axes=tuple(axis - k for axis in turn.axes))
        y = _turn_group(y, alone, moved, rotation.kind, mine, transpose)
    return y.astype(x.dtype)
